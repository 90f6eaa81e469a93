"""Trials that did not end ok: why, what helps, and the last of what their ranks printed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shardmark.analysis.compare.rows import Row
from shardmark.core.run_files import LOG_FILE
from shardmark.core.text import one_line
from shardmark.results.files import open_regular
from shardmark.results.schema import Failure, Outcome, TrialResult
from shardmark.results.store import RunFolder

TAIL_LINES = 40
TAIL_BYTES = 64 * 1024
LINE_CHARACTERS = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class LogTail:
    trial: str
    text: str
    lines: int
    cut: bool
    """More stands before it in the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NotOk:
    """Trials of one row that ended alike."""

    place: str
    outcome: str
    failure: Failure
    repeats: str
    logs: tuple[LogTail, ...]


def not_ok(rows: Sequence[Row]) -> list[NotOk]:
    """By row, outcome and reason; in the order of the comparison."""
    groups: dict[object, tuple[Row, list[TrialResult]]] = {}
    for number, row in enumerate(rows):
        for trial in row.trials:
            if trial.outcome is not Outcome.OK:
                key = (number, trial.outcome, _failure(trial))
                groups.setdefault(key, (row, []))[1].append(trial)
    return [
        NotOk(
            place=row.place,
            outcome=str(trials[0].outcome),
            failure=_failure(trials[0]),
            repeats=", ".join(str(trial.repeat) for trial in trials),
            logs=tuple(filter(None, (_tail_of(row, trial) for trial in trials))),
        )
        for row, trials in groups.values()
    ]


def log_tail(folder: Path) -> LogTail | None:
    """The last lines of a trial's log as plain text; None where there is nothing to show."""
    try:
        with open_regular(folder / LOG_FILE) as file:
            size_bytes = file.seek(0, os.SEEK_END)
            file.seek(max(0, size_bytes - TAIL_BYTES))
            content = file.read()
    except OSError:
        return None
    lines = content.decode("utf-8", errors="replace").rstrip().split("\n")
    if size_bytes > TAIL_BYTES:
        lines = lines[1:]  # the first one may be a part
    if not any(lines):
        return None
    shown = [shortened(line) for line in lines[-TAIL_LINES:]]
    return LogTail(
        trial=folder.name,
        text="\n".join(shown),
        lines=len(shown),
        cut=size_bytes > TAIL_BYTES or len(lines) > len(shown),
    )


def shortened(line: str) -> str:
    """No longer than a reader can use."""
    text = one_line(line.rstrip().rpartition("\r")[2])  # of a line that was overwritten
    return text if len(text) <= LINE_CHARACTERS else f"{text[:LINE_CHARACTERS]} ..."


def _failure(trial: TrialResult) -> Failure:
    return trial.failure or Failure(reason="no reason was recorded")


def _tail_of(row: Row, trial: TrialResult) -> LogTail | None:
    return None if row.folder is None else log_tail(RunFolder(row.folder).trial_folder(trial.id))
