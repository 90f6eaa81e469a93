"""A trial as trackers see one: named values over steps and epochs, with the training's own time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shardmark.report.export.source import Source
from shardmark.report.export.tables import Record, epoch_rows, finite, step_rows
from shardmark.results.schema import TrialResult

SPANS = (
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
        series = {"train_loss": "loss", "learning_rate": "learning_rate"}
        known = {name: _all_finite(rows, key) for name, key in series.items()}
        values = {name: sum(each) / len(each) for name, each in known.items() if each}
        if all(row.get("measured") for row in rows):
            values |= {name: max(each) for name in SPANS if (each := _all_finite(rows, name))}
        ends = [
            start + (finite(row.get("step_seconds")) or 0.0)
            for row in rows
            if (start := finite(row.get("started_at_seconds"))) is not None
        ]
        at_seconds = max(ends, default=trial.started_at_seconds)
        for name, value in values.items():
            yield Point(
                name=f"step/{name}", index=step, step=step, at_seconds=at_seconds, value=value
            )


def _by_epoch(trial: TrialResult) -> Iterator[Point]:
    for row in epoch_rows(trial):
        for name, value in row.items():
            if value is not None and name not in ("epoch", "end_step", "ended_at_seconds"):
                yield Point(
                    name=f"epoch/{name}",
                    index=row["epoch"],
                    step=row["end_step"] - 1,
                    at_seconds=row["ended_at_seconds"] or trial.started_at_seconds,
                    value=value,
                )


def _all_finite(rows: Sequence[Record], name: str) -> list[float]:
    """Nothing as soon as one rank has no value: the others' mean would be another number."""
    values = [finite(row.get(name)) for row in rows]
    known = [value for value in values if value is not None]
    return known if len(known) == len(values) else []
