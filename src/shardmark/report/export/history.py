"""A trial as trackers see one: named values over steps and epochs, with the training's own time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shardmark.report.export._protocol import Source
from shardmark.report.export.marks import Record, epoch_rows, finite, step_rows
from shardmark.results.schema import TrialResult

SPAN_COLUMNS = (
    "step_seconds",
    "data_seconds",
    "forward_seconds",
    "backward_seconds",
    "optimizer_seconds",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One value of one series."""

    name: str
    """`step/...` or `epoch/...`."""
    index: int
    """The optimizer step, from 0, or the epoch, from 1."""
    step: int
    """The optimizer step it belongs to; for an epoch its last one."""
    at_seconds: float
    """Unix time at which the training had got there."""
    value: float


def history(source: Source, trial: TrialResult) -> list[Point]:
    """By step, then by epoch; nothing for what is missing, nor of a trial that did not end ok."""
    return [*_by_step(source, trial), *_by_epoch(trial)]


def _by_step(source: Source, trial: TrialResult) -> Iterator[Point]:
    """Loss: mean over the ranks.  Seconds: the slowest rank, measured steps alone."""
    steps: dict[int, list[Record]] = {}
    for row in step_rows(source, trial):
        steps.setdefault(row["step"], []).append(row)
    for step, rows in sorted(steps.items()):
        at_seconds = _ended_at_seconds(rows) or trial.started_at_seconds
        values = {"train_loss": _mean(rows, "loss"), "learning_rate": _mean(rows, "learning_rate")}
        if all(row.get("measured") for row in rows):
            values |= {name: _largest(rows, name) for name in SPAN_COLUMNS}
        for name, value in values.items():
            if value is not None:
                yield Point(
                    name=f"step/{name}", index=step, step=step, at_seconds=at_seconds, value=value
                )


def _by_epoch(trial: TrialResult) -> Iterator[Point]:
    for row in epoch_rows(trial):
        at_seconds = row["ended_at_seconds"] or trial.started_at_seconds
        for name, value in row.items():
            if value is not None and name not in ("epoch", "end_step", "ended_at_seconds"):
                yield Point(
                    name=f"epoch/{name}",
                    index=row["epoch"],
                    step=row["end_step"] - 1,
                    at_seconds=at_seconds,
                    value=value,
                )


def _ended_at_seconds(rows: Sequence[Record]) -> float | None:
    ends = [
        start + (finite(row.get("step_seconds")) or 0.0)
        for row in rows
        if (start := finite(row.get("started_at_seconds"))) is not None
    ]
    return max(ends, default=None)


def _mean(rows: Sequence[Record], name: str) -> float | None:
    """None as soon as one rank has no value: a mean over the others would be another number."""
    values = [finite(row.get(name)) for row in rows]
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known and len(known) == len(values) else None


def _largest(rows: Sequence[Record], name: str) -> float | None:
    values = [finite(row.get(name)) for row in rows]
    known = [value for value in values if value is not None]
    return max(known) if known and len(known) == len(values) else None
