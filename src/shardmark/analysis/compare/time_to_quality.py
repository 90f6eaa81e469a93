"""How long a row trains until a loss or a quality is reached, over its repeats."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean

from shardmark.analysis.compare.epochs import Epoch, epochs_of
from shardmark.analysis.compare.rows import Row
from shardmark.analysis.statistics.intervals import Estimate, estimate_mean
from shardmark.core.metrics import METRICS

TARGET_METRICS = tuple(
    metric.name
    for metric in METRICS.values()
    if metric.group == "quality" and metric.better is not None
)
"""What a target may be set for: every quality whose better direction the catalogue knows."""

NEVER_RECORDED = "the metric was not recorded"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """What one repeat did with the target."""

    repeat: int
    epoch: int | None
    """Counted from 1: the first epoch at whose end the target was reached; None if none."""
    seconds: float | None
    """Training time to the end of that epoch; None where it was not reached, or not timed."""
    trained_seconds: float | None
    """Training time of all its epochs: without success, the target takes longer than that."""
    recorded: bool
    """Whether the metric was recorded at all, finite or not."""
    best: float | None
    """The best value at the end of any epoch; None where none is finite."""
    reason: str | None
    """Why there is no `seconds`."""


@dataclass(frozen=True, kw_only=True)
class TimeTo:
    """Training seconds of a row until a target is reached, evaluations left out."""

    row: Row
    metric: str
    target: float
    repeats: tuple[Reach, ...]
    """One for each trial that ended ok."""

    @cached_property
    def seconds_by_repeat(self) -> Mapping[int, float]:
        """Of the repeats that reached the target; too short a time where others did not."""
        return {reach.repeat: reach.seconds for reach in self.repeats if reach.seconds is not None}

    @property
    def reached(self) -> int:
        """How many repeats reached the target."""
        return sum(reach.epoch is not None for reach in self.repeats)

    @cached_property
    def estimate(self) -> Estimate | None:
        """Mean over the repeats; None unless every one reached the target and was timed.

        The mean over the survivors alone would be too short, so it is not given.
        """
        seconds = self.seconds_by_repeat
        if not seconds or len(seconds) < len(self.repeats):
            return None
        return estimate_mean(list(seconds.values()))

    @property
    def at_least_seconds(self) -> float | None:
        """What the mean exceeds where some repeat missed the target; None where all reached it.

        A repeat that missed it counts with all of its training, which was too short.
        """
        if self.reached == len(self.repeats) or not all(r.recorded for r in self.repeats):
            return None
        known = [r.trained_seconds if r.epoch is None else r.seconds for r in self.repeats]
        seconds = [value for value in known if value is not None]
        return fmean(seconds) if seconds and len(seconds) == len(known) else None

    @property
    def reason(self) -> str | None:
        """Why there is no `estimate`; None where there is one."""
        if self.estimate is not None:
            return None
        if not self.repeats:
            return "no trial ended ok"
        missed = sum(reach.epoch is None and reach.recorded for reach in self.repeats)
        if missed:
            repeats = "repeat" if len(self.repeats) == 1 else "repeats"
            return f"not reached in {missed} of {len(self.repeats)} {repeats}"
        return next(reach.reason for reach in self.repeats if reach.reason is not None)


def time_to_quality(row: Row, metric: str, target: float) -> TimeTo:
    """Seconds of training until the end of the first epoch whose value is at least that good.

    Nothing is interpolated between epochs: a quality is known where it was evaluated, and a
    training loss is the mean of its epoch.  `metric` is one of `TARGET_METRICS`; `KeyError`
    otherwise.  Over the trials that ended ok.
    """
    repeats = tuple(_reach(part, metric, target) for part in _by_repeat(row))
    return TimeTo(row=row, metric=metric, target=target, repeats=repeats)


def common_target(rows: Sequence[Row], metric: str) -> float | None:
    """The best value that every repeat of every row reached, computed from them; None for none.

    Rows without a trial that ended ok do not count, nor those of which a repeat has no finite value
    at all: they never recorded the metric, or diverged at once.
    """
    worst = worst_of(rows, metric)
    return None if worst is None else worst[1]


def worst_of(rows: Sequence[Row], metric: str) -> tuple[Row, float] | None:
    """The row that bounds `common_target`, with its value."""
    known = [(row, value) for row in rows if (value := sure_value(row, metric)) is not None]
    pick = min if METRICS[metric].better == "higher" else max
    return pick(known, key=lambda pair: pair[1]) if known else None


def sure_value(row: Row, metric: str) -> float | None:
    """The best value that every repeat of the row reached at the end of some epoch."""
    values = _all_known([_best(epochs, metric) for epochs in _epochs_by_repeat(row)])
    return None if values is None else worst_value(metric, values)


def training_seconds(row: Row) -> float | None:
    """Of all epochs, in the repeat that took longest; None where some repeat was not timed."""
    seconds = _all_known([_last(epochs, "elapsed_seconds") for epochs in _epochs_by_repeat(row)])
    return None if seconds is None else max(seconds)


def quality_after(row: Row, metric: str, seconds: float) -> float | None:
    """The best value at the end of an epoch within so much training, a mean over the repeats.

    None where some repeat had no value by then.
    """

    def within(epoch: Epoch) -> bool:
        end = _number(epoch, "elapsed_seconds")
        return end is not None and end <= seconds

    by_repeat = _epochs_by_repeat(row)
    values = _all_known([_best([*filter(within, epochs)], metric) for epochs in by_repeat])
    return None if values is None else fmean(values)


def ends_below(row: Row, metric: str, target: float) -> bool:
    """Whether some repeat's last value does not reach the target (any more)."""
    last = [_last(epochs, metric) for epochs in _epochs_by_repeat(row)]
    return any(value is None or not good_enough(metric, value, target) for value in last)


def good_enough(metric: str, value: float, target: float) -> bool:
    """Whether the value reaches the target, in the metric's own direction."""
    return value >= target if METRICS[metric].better == "higher" else value <= target


def worst_value(metric: str, values: Sequence[float]) -> float:
    """The least good of them, in the metric's own direction."""
    return min(values) if METRICS[metric].better == "higher" else max(values)


def _by_repeat(row: Row) -> list[Row]:
    """The row's trials that ended ok, each as a row of its own."""
    return [replace(row, trials=(trial,)) for trial in row.ok_trials]


def _epochs_by_repeat(row: Row) -> list[tuple[Epoch, ...]]:
    return [epochs_of(part).epochs for part in _by_repeat(row)]


def _all_known(values: Sequence[float | None]) -> list[float] | None:
    """None as soon as one is missing, or for none."""
    known = [value for value in values if value is not None]
    return known if known and len(known) == len(values) else None


def _reach(row: Row, metric: str, target: float) -> Reach:
    """Of a row that has one trial."""
    (trial,) = row.trials
    history = epochs_of(row)
    epochs = history.epochs
    values = [(epoch, _number(epoch, metric)) for epoch in epochs]
    first = next((e for e, v in values if v is not None and good_enough(metric, v, target)), None)
    recorded = any(metric in epoch.metrics for epoch in epochs)
    if first is not None:
        reason = first.missing.get("elapsed_seconds")
    else:
        reason = "not reached" if recorded else history.reason or NEVER_RECORDED
    return Reach(
        repeat=trial.repeat,
        epoch=None if first is None else first.number,
        seconds=None if first is None else _number(first, "elapsed_seconds"),
        trained_seconds=_last(epochs, "elapsed_seconds"),
        recorded=recorded,
        best=_best(epochs, metric),
        reason=reason,
    )


def _best(epochs: Sequence[Epoch], metric: str) -> float | None:
    values = [value for epoch in epochs if (value := _number(epoch, metric)) is not None]
    if not values:
        return None
    return max(values) if METRICS[metric].better == "higher" else min(values)


def _last(epochs: Sequence[Epoch], name: str) -> float | None:
    return _number(epochs[-1], name) if epochs else None


def _number(epoch: Epoch, name: str) -> float | None:
    estimate = epoch.metrics.get(name)
    return None if estimate is None or not math.isfinite(estimate.value) else estimate.value
