"""Trials that did not end ok: why, what helps, and the last of what their ranks printed."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shardmark.analysis.compare.rows import Row
from shardmark.core.run_files import LOG_FILE
from shardmark.results.schema import Outcome, TrialResult
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
    repeats: str
    reason: str
    remedy: str
    rank: int | None
    logs: tuple[LogTail, ...]


def not_ok(rows: Sequence[Row]) -> tuple[NotOk, ...]:
    """By row, outcome and reason; in the order of the comparison."""
    return tuple(
        _described(row, trials)
        for row in rows
        for trials in _alike([one for one in row.trials if one.outcome is not Outcome.OK])
    )


def log_tail(folder: Path) -> LogTail | None:
    """The last lines of a trial's log as plain text; None where there is nothing to show."""
    try:
        with (folder / LOG_FILE).open("rb") as file:
            size_bytes = file.seek(0, os.SEEK_END)
            file.seek(max(0, size_bytes - TAIL_BYTES))
            content = file.read()
    except OSError:
        return None
    lines = content.decode("utf-8", errors="replace").split("\n")
    if size_bytes > TAIL_BYTES:
        lines = lines[1:]  # the first one may be a part
    while lines and not lines[-1].strip():
        lines.pop()
    if not lines:
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


def _alike(trials: Sequence[TrialResult]) -> list[list[TrialResult]]:
    groups: dict[object, list[TrialResult]] = {}
    for trial in trials:
        failure = trial.failure
        cause = None if failure is None else (failure.reason, failure.remedy, failure.rank)
        groups.setdefault((trial.outcome, cause), []).append(trial)
    return list(groups.values())


def _described(row: Row, trials: Sequence[TrialResult]) -> NotOk:
    failure = trials[0].failure
    tails = [_tail_of(row, trial) for trial in trials]
    return NotOk(
        place=row.place,
        outcome=str(trials[0].outcome),
        repeats=", ".join(str(trial.repeat) for trial in trials),
        reason="no reason was recorded" if failure is None else failure.reason,
        remedy="" if failure is None or failure.remedy is None else failure.remedy,
        rank=None if failure is None else failure.rank,
        logs=tuple(tail for tail in tails if tail is not None),
    )


def _tail_of(row: Row, trial: TrialResult) -> LogTail | None:
    return None if row.folder is None else log_tail(RunFolder(row.folder).trial_folder(trial.id))
