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
        return {one.repeat: one.seconds for one in self.repeats if one.seconds is not None}

    @property
    def reached(self) -> int:
        """How many repeats reached the target."""
        return sum(one.epoch is not None for one in self.repeats)

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
        if self.reached == len(self.repeats) or not all(one.recorded for one in self.repeats):
            return None
        known = [one.trained_seconds if one.epoch is None else one.seconds for one in self.repeats]
        seconds = [value for value in known if value is not None]
        return fmean(seconds) if seconds and len(seconds) == len(known) else None

    @property
    def reason(self) -> str | None:
        """Why there is no `estimate`; None where there is one."""
        if self.estimate is not None:
            return None
        if not self.repeats:
            return "no trial ended ok"
        missed = sum(one.epoch is None and one.recorded for one in self.repeats)
        if missed:
            repeats = "repeat" if len(self.repeats) == 1 else "repeats"
            return f"not reached in {missed} of {len(self.repeats)} {repeats}"
        return next(one.reason for one in self.repeats if one.reason is not None)


def time_to_quality(row: Row, metric: str, target: float) -> TimeTo:
    """Seconds of training until the end of the first epoch whose value is at least that good.

    Nothing is interpolated between epochs: a quality is known where it was evaluated, and a
    training loss is the mean of its epoch.  `metric` is one of `TARGET_METRICS`; `KeyError`
    otherwise.  Over the trials that ended ok.
    """
    repeats = (_reach(replace(row, trials=(trial,)), metric, target) for trial in row.ok_trials)
    return TimeTo(row=row, metric=metric, target=target, repeats=tuple(repeats))


def common_target(rows: Sequence[Row], metric: str) -> float | None:
    """The best value that every repeat of every row reached, computed from them; None for none.

    Rows without a trial that ended ok do not count, nor those of which a repeat has no finite value
    at all: they never recorded the metric, or diverged at once.
    """
    worst = worst_of(rows, metric)
    return None if worst is None else worst[1]


def worst_of(rows: Sequence[Row], metric: str) -> tuple[Row, float] | None:
    """The row that bounds `common_target`, with its value."""
    found = [(row, value) for row in rows if (value := sure_value(row, metric)) is not None]
    pick = min if METRICS[metric].better == "higher" else max
    return pick(found, key=lambda one: one[1]) if found else None


def sure_value(row: Row, metric: str) -> float | None:
    """The best value that every repeat of the row reached at the end of some epoch."""
    values = [
        _best(epochs_of(replace(row, trials=(trial,))).epochs, metric) for trial in row.ok_trials
    ]
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return None
    return min(known) if METRICS[metric].better == "higher" else max(known)


def training_seconds(row: Row) -> float | None:
    """Of all epochs, in the repeat that took longest; None where some repeat was not timed."""
    each = [epochs_of(replace(row, trials=(trial,))).epochs for trial in row.ok_trials]
    seconds = [_number(epochs[-1], "elapsed_seconds") if epochs else None for epochs in each]
    known = [value for value in seconds if value is not None]
    return max(known) if known and len(known) == len(seconds) else None


def quality_after(row: Row, metric: str, seconds: float) -> float | None:
    """The best value at the end of an epoch within so much training, a mean over the repeats.

    None where some repeat had no value by then.
    """
    values = []
    for trial in row.ok_trials:
        epochs = epochs_of(replace(row, trials=(trial,))).epochs
        passed = [(epoch, _number(epoch, "elapsed_seconds")) for epoch in epochs]
        within = [epoch for epoch, end in passed if end is not None and end <= seconds]
        values.append(_best(within, metric))
    known = [value for value in values if value is not None]
    return fmean(known) if known and len(known) == len(values) else None


def ends_below(row: Row, metric: str, target: float) -> bool:
    """Whether some repeat's last value does not reach the target (any more)."""
    for trial in row.ok_trials:
        epochs = epochs_of(replace(row, trials=(trial,))).epochs
        last = _number(epochs[-1], metric) if epochs else None
        if last is None or not good_enough(metric, last, target):
            return True
    return False


def good_enough(metric: str, value: float, target: float) -> bool:
    """Whether the value reaches the target, in the metric's own direction."""
    return value >= target if METRICS[metric].better == "higher" else value <= target


def _reach(row: Row, metric: str, target: float) -> Reach:
    """Of a row that has one trial."""
    (trial,) = row.trials
    found = epochs_of(row)
    epochs = found.epochs
    values = ((epoch, _number(epoch, metric)) for epoch in epochs)
    first = next(
        (one for one, v in values if v is not None and good_enough(metric, v, target)), None
    )
    best = _best(epochs, metric)
    recorded = any(metric in epoch.metrics for epoch in epochs)
    if first is not None:
        reason = first.missing.get("elapsed_seconds")
    else:
        reason = "not reached" if recorded else found.reason or NEVER_RECORDED
    return Reach(
        repeat=trial.repeat,
        epoch=None if first is None else first.number,
        seconds=None if first is None else _number(first, "elapsed_seconds"),
        trained_seconds=_number(epochs[-1], "elapsed_seconds") if epochs else None,
        recorded=recorded,
        best=best,
        reason=reason,
    )


def _best(epochs: Sequence[Epoch], metric: str) -> float | None:
    values = [value for epoch in epochs if (value := _number(epoch, metric)) is not None]
    if not values:
        return None
    return max(values) if METRICS[metric].better == "higher" else min(values)


def _number(epoch: Epoch, name: str) -> float | None:
    estimate = epoch.metrics.get(name)
    return None if estimate is None or not math.isfinite(estimate.value) else estimate.value
