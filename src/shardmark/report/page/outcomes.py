"""Trials that did not end ok: why, what helps, and the last of what their ranks printed."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shardmark.analysis.compare.rows import Row
from shardmark.core.run_files import LOG_FILE
from shardmark.results.schema import Failure, Outcome, TrialResult
from shardmark.results.store import RunFolder

TAIL_LINES = 40
TAIL_BYTES = 64 * 1024
LINE_CHARACTERS = 400
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|.)")
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


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
        with (folder / LOG_FILE).open("rb") as file:
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
    shown = [printable(line) for line in lines[-TAIL_LINES:]]
    return LogTail(
        trial=folder.name,
        text="\n".join(shown),
        lines=len(shown),
        cut=size_bytes > TAIL_BYTES or len(lines) > len(shown),
    )


def printable(line: str) -> str:
    """Without colours and what moves a cursor; no longer than a reader can use."""
    last = _ESCAPES.sub("", line.rstrip()).rpartition("\r")[2]  # of a line that was overwritten
    text = _CONTROLS.sub("\N{REPLACEMENT CHARACTER}", last)
    return text if len(text) <= LINE_CHARACTERS else f"{text[:LINE_CHARACTERS]} ..."


def _failure(trial: TrialResult) -> Failure:
    return trial.failure or Failure(reason="no reason was recorded")


def _tail_of(row: Row, trial: TrialResult) -> LogTail | None:
    return None if row.folder is None else log_tail(RunFolder(row.folder).trial_folder(trial.id))
