"""Training seconds of every row until a loss or a quality is reached, evaluations left out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean

from shardmark.analysis.compare.comparison import Comparison
from shardmark.analysis.compare.epochs import Epoch, epochs_of
from shardmark.analysis.compare.rows import Row
from shardmark.analysis.statistics.intervals import estimate_mean
from shardmark.core.errors import InputError
from shardmark.core.metrics import METRICS
from shardmark.report.table.columns import for_programs, metric_column, table_by_row
from shardmark.report.table.notes import by_reason, left_out
from shardmark.report.table.table import Column, Missing, Table, Value, number
from shardmark.results.schema import TrialResult

OPTION = "--time-to"
NOT_REACHED = "not reached"
TARGET_METRICS = tuple(
    metric.name
    for metric in METRICS.values()
    if metric.group == "quality" and metric.better is not None
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A loss or quality, and the value that it is to reach."""

    metric: str
    value: float

    def is_reached_by(self, value: float | None) -> bool:
        if value is None:
            return False
        return value >= self.value if _higher(self.metric) else value <= self.value


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """What one repeat did with the target."""

    repeat: int
    epoch: int | None
    """Counted from 1: the first epoch at whose end the target was reached; None if none."""
    seconds: float | None
    """Training time to the end of that epoch; of all epochs where none reached it."""
    best: float | None
    """The best value at the end of any epoch; None where none is finite."""
    reason: str | None
    """Why there is no time to the target."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeTo:
    """One row's time to the target."""

    repeats: tuple[Reach, ...]
    """One for each trial that ended ok."""

    @property
    def reached(self) -> int:
        return sum(reach.epoch is not None for reach in self.repeats)

    @property
    def seconds(self) -> Value:
        """Missing unless every repeat reached it: a mean over the survivors would be too short."""
        missed = len(self.repeats) - self.reached
        known = [reach.seconds for reach in self.repeats if reach.seconds is not None]
        if not missed and len(known) == len(self.repeats):
            return estimate_mean(known)
        reasons = [reach.reason for reach in self.repeats if reach.reason is not None]
        if NOT_REACHED in reasons:
            return Missing(f"{NOT_REACHED} in {missed} of {len(self.repeats)} repeats")
        return Missing(reasons[0])

    @property
    def at_least_seconds(self) -> float | None:
        """What the mean exceeds where some repeat missed the target after all of its training."""
        known = [reach.seconds for reach in self.repeats if reach.seconds is not None]
        missed = self.reached < len(self.repeats)
        return fmean(known) if missed and len(known) == len(self.repeats) else None

    @property
    def epochs(self) -> str | None:
        """Of the repeats that reached it; several where they differ."""
        epochs = sorted({reach.epoch for reach in self.repeats if reach.epoch is not None})
        return " to ".join(map(str, dict.fromkeys((epochs[0], epochs[-1])))) if epochs else None


def time_to_tables(comparison: Comparison, text: str) -> list[Table]:
    """One line for each row that has a trial that ended ok.

    `text` is `METRIC=VALUE`, or `METRIC` for the best value that every row reached.  Raises
    `InputError` for a metric that is no quality, a value that is no number or that no such metric
    can have, and a metric that no row recorded.
    """
    target, note = _parse_target(comparison.rows, text)
    times = [
        (row, TimeTo(repeats=tuple(_reach(row, trial, target) for trial in row.ok_trials)))
        for row in comparison.rows
        if row.ok_trials
    ]
    metric = target.metric
    shown = metric_column("elapsed_seconds", interval="±")
    seconds = metric_column("total_seconds", key="seconds", shown_to="programs")

    def time_to(time: TimeTo) -> str:
        bound = time.at_least_seconds
        return shown.show(time.seconds) if bound is None else f"> {number(bound)}"

    table = table_by_row(
        f"Training time to {metric} {'≥' if _higher(metric) else '≤'} {target.value:g}",
        times,
        [
            (for_programs("metric"), lambda _: metric),
            (for_programs("target"), lambda _: target.value),
            (seconds, lambda time: time.seconds),
            (for_programs("more_than_seconds"), lambda time: time.at_least_seconds),
            (_people("time to", "s"), time_to),
            (_people("after", "epoch"), lambda time: time.epochs),
            (_people("reached"), lambda time: f"{time.reached} of {len(time.repeats)}"),
            (for_programs("reached"), lambda time: time.reached),
            (
                Column(key="best", title="best", decimals=4),
                lambda time: _worst(metric, (reach.best for reach in time.repeats)),
            ),
            (for_programs("repeats"), lambda time: [asdict(reach) for reach in time.repeats]),
        ],
        [*note, *_notes(times, metric), *left_out(comparison.rows)],
    )
    return [table]


def _parse_target(rows: Sequence[Row], text: str) -> tuple[Target, list[str]]:
    """The target, and where a computed one comes from."""
    metric, equals, given = text.partition("=")
    metric = metric.strip()
    if metric not in TARGET_METRICS:
        allowed = f"allowed are {', '.join(TARGET_METRICS)}"
        raise InputError(OPTION, f"{metric!r} is no loss or quality", allowed)
    if equals:
        return Target(metric=metric, value=_value(metric, given)), []
    bounds = {name: _common_target(rows, name) for name in TARGET_METRICS}
    bound = bounds[metric]
    if bound is None:
        recorded = ", ".join(name for name, known in bounds.items() if known) or "none"
        raise InputError(
            OPTION, f"no trial has {metric} by epoch", f"recorded by epoch: {recorded}"
        )
    note = f"Target: the best value that every row reached; {bound[0].place} bounds it."
    return Target(metric=metric, value=bound[1]), [note]


def _value(metric: str, given: str) -> float:
    fraction = METRICS[metric].unit == "fraction"
    try:
        value = float(given)
    except ValueError:
        value = math.nan
    if 0 <= value <= (1 if fraction else math.inf) and value != math.inf:
        return value
    allowed = "a fraction from 0 to 1" if fraction else "a number from 0"
    raise InputError(f"{OPTION} {metric}", f"{given.strip()!r}", f"must be {allowed}")


def _common_target(rows: Sequence[Row], metric: str) -> tuple[Row, float] | None:
    """The best value that every repeat of every row reached, with the row that bounds it.

    Rows of which a repeat has no finite value at all do not count: they never recorded the metric,
    or diverged at once.
    """
    bounds = []
    for row in rows:
        repeats = [_best(metric, _history(row, trial)[0]) for trial in row.ok_trials]
        value = None if None in repeats else _worst(metric, repeats)
        bounds += [] if value is None else [(row, value)]
    worst = _worst(metric, (value for _, value in bounds))
    return next((bound for bound in bounds if bound[1] == worst), None)


def _reach(row: Row, trial: TrialResult, target: Target) -> Reach:
    """To the end of the first epoch whose value is at least that good: nothing is interpolated."""
    metric = target.metric
    epochs, no_epochs = _history(row, trial)
    first = next((epoch for epoch in epochs if target.is_reached_by(_number(epoch, metric))), None)
    last = first or (epochs[-1] if any(metric in epoch.metrics for epoch in epochs) else None)
    reason = NOT_REACHED if last else no_epochs or "the metric was not recorded"
    return Reach(
        repeat=trial.repeat,
        epoch=None if first is None else first.number,
        seconds=None if last is None else _number(last, "elapsed_seconds"),
        best=_best(metric, epochs),
        reason=reason if first is None else first.missing.get("elapsed_seconds"),
    )


def _history(row: Row, trial: TrialResult) -> tuple[tuple[Epoch, ...], str | None]:
    """The epochs of one repeat, or why there are none."""
    history = epochs_of(replace(row, trials=(trial,)))
    return history.epochs, history.reason


def _number(epoch: Epoch, name: str) -> float | None:
    estimate = epoch.metrics.get(name)
    return None if estimate is None or not math.isfinite(estimate.value) else estimate.value


def _higher(metric: str) -> bool:
    return METRICS[metric].better == "higher"


def _best(metric: str, epochs: Sequence[Epoch]) -> float | None:
    values = [value for epoch in epochs if (value := _number(epoch, metric)) is not None]
    return (max if _higher(metric) else min)(values, default=None)


def _worst(metric: str, values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return (min if _higher(metric) else max)(known, default=None)


def _people(title: str, unit: str = "") -> Column:
    return Column(key=title, title=title, unit=unit, shown_to="people")


def _notes(times: Sequence[tuple[Row, TimeTo]], metric: str) -> list[str]:
    notes = []
    if any(time.at_least_seconds is not None for _, time in times):
        notes.append(
            "> : some repeat never reached the target. It counts with all of its training, so the"
            " mean is longer than that."
        )
    unknown = [
        (f"Not known: {time.seconds.reason}", row.place)
        for row, time in times
        if isinstance(time.seconds, Missing) and time.at_least_seconds is None
    ]
    notes += by_reason(unknown, len(times))
    notes.append(
        "Time of training alone, warm-up included, to the end of the first epoch that reached the"
        " target; nothing is interpolated between epochs."
    )
    if metric == "train_loss":
        notes.append("The loss of an epoch is the mean over its steps, not the loss at its end.")
    if any(len(time.repeats) > 1 for _, time in times):
        notes.append("Mean over the repeats, ± 95 % interval; best: of the repeat that did worst.")
    else:
        notes.append("One repeat: no interval.")
    return notes
