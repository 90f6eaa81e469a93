"""Training seconds of every row until a loss or a quality is reached, evaluations left out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from operator import attrgetter
from statistics import fmean

from shardmark.analysis.compare.comparison import Comparison
from shardmark.analysis.compare.epochs import Epoch, epochs_of
from shardmark.analysis.compare.rows import Row
from shardmark.analysis.statistics.intervals import Estimate, estimate_mean
from shardmark.core.errors import InputError
from shardmark.core.metrics import METRICS
from shardmark.report.table.columns import for_items, metric_column, row_columns
from shardmark.report.table.gaps import by_reason, left_out
from shardmark.report.table.table import Column, Missing, Table, number, table_of
from shardmark.results.schema import TrialResult

OPTION = "--time-to"
NOT_REACHED = "not reached"
TARGET_METRICS = tuple(
    metric.name
    for metric in METRICS.values()
    if metric.group == "quality" and metric.better is not None
)


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

    row: Row
    repeats: tuple[Reach, ...]
    """One for each trial that ended ok."""
    estimate: Estimate | None
    """None unless every repeat reached it: the mean over the survivors would be too short."""
    at_least_seconds: float | None
    """What the mean exceeds where some repeat missed the target after all of its training."""
    reason: str | None
    """Why there is neither."""

    @property
    def reached(self) -> int:
        return sum(reach.epoch is not None for reach in self.repeats)


def time_to_tables(comparison: Comparison, text: str) -> list[Table]:
    """One line for each row that has a trial that ended ok.

    `text` is `METRIC=VALUE`, or `METRIC` for the best value that every row reached.  Raises
    `InputError` for a metric that is no quality, a value that is no number or that no such metric
    can have, and a metric that no row recorded.
    """
    metric, target, note = _parse_target(comparison.rows, text)
    times = [_time_to(row, metric, target) for row in comparison.rows if row.ok_trials]
    sign = "≥" if METRICS[metric].better == "higher" else "≤"
    seconds = metric_column("elapsed_seconds", interval="±")
    table = table_of(
        f"Training time to {metric} {sign} {target:g}",
        times,
        [
            *for_items(row_columns([time.row for time in times]), attrgetter("row")),
            (_programs("metric"), lambda _: metric),
            (_programs("target"), lambda _: target),
            (
                metric_column("total_seconds", key="seconds", shown_to="programs"),
                lambda time: time.estimate or Missing(time.reason or "the target was not reached"),
            ),
            (_programs("more_than_seconds"), lambda time: time.at_least_seconds),
            (
                _people("time to", "s"),
                lambda time: (
                    f"> {number(time.at_least_seconds)}"
                    if time.at_least_seconds is not None
                    else seconds.show(time.estimate)
                ),
            ),
            (_people("after", "epoch"), _epochs),
            (_people("reached"), lambda time: f"{time.reached} of {len(time.repeats)}"),
            (_programs("reached"), lambda time: time.reached),
            (
                Column(key="best", title="best", decimals=4),
                lambda time: _worst(metric, [reach.best for reach in time.repeats]),
            ),
            (_programs("repeats"), lambda time: [asdict(reach) for reach in time.repeats]),
        ],
        [*note, *_notes(times, metric), *left_out(comparison.rows)],
    )
    return [table]


def _parse_target(rows: Sequence[Row], text: str) -> tuple[str, float, list[str]]:
    """Metric, target, and where a computed target comes from."""
    metric, equals, given = text.partition("=")
    metric = metric.strip()
    if metric not in TARGET_METRICS:
        allowed = f"allowed are {', '.join(TARGET_METRICS)}"
        raise InputError(OPTION, f"{metric!r} is no loss or quality", allowed)
    if equals:
        return metric, _value(metric, given), []
    bounds = {name: _common_target(rows, name) for name in TARGET_METRICS}
    bound = bounds[metric]
    if bound is None:
        recorded = ", ".join(name for name, known in bounds.items() if known) or "none"
        raise InputError(
            OPTION, f"no trial has {metric} by epoch", f"recorded by epoch: {recorded}"
        )
    row, target = bound
    note = f"Target: the best value that every row reached; {row.place} bounds it."
    return metric, target, [note]


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
    values = []
    for row in rows:
        repeats = [_best(metric, _history(row, trial)[0]) for trial in row.ok_trials]
        value = None if None in repeats else _worst(metric, repeats)
        values += [] if value is None else [(row, value)]
    worst = _worst(metric, [value for _, value in values])
    return next((bound for bound in values if bound[1] == worst), None)


def _time_to(row: Row, metric: str, target: float) -> TimeTo:
    """To the end of the first epoch whose value is at least that good: nothing is interpolated."""
    repeats = tuple(_reach(row, trial, metric, target) for trial in row.ok_trials)
    missed = [reach for reach in repeats if reach.epoch is None]
    seconds = [reach.seconds for reach in repeats if reach.seconds is not None]
    timed = len(seconds) == len(repeats)
    reason = next((reach.reason for reach in repeats if reach.reason is not None), None)
    if any(reach.reason == NOT_REACHED for reach in missed):
        reason = f"not reached in {len(missed)} of {len(repeats)} repeats"
    return TimeTo(
        row=row,
        repeats=repeats,
        estimate=estimate_mean(seconds) if timed and not missed else None,
        at_least_seconds=fmean(seconds) if timed and missed else None,
        reason=reason,
    )


def _reach(row: Row, trial: TrialResult, metric: str, target: float) -> Reach:
    epochs, no_epochs = _history(row, trial)
    better = METRICS[metric].better
    first = next(
        (
            epoch
            for epoch in epochs
            if (value := _number(epoch, metric)) is not None
            and (value >= target if better == "higher" else value <= target)
        ),
        None,
    )
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


def _best(metric: str, epochs: Sequence[Epoch]) -> float | None:
    values = [value for epoch in epochs if (value := _number(epoch, metric)) is not None]
    pick = max if METRICS[metric].better == "higher" else min
    return pick(values, default=None)


def _worst(metric: str, values: Sequence[float | None]) -> float | None:
    pick = min if METRICS[metric].better == "higher" else max
    return pick((value for value in values if value is not None), default=None)


def _people(title: str, unit: str = "") -> Column:
    return Column(key=title, title=title, unit=unit, shown_to="people")


def _programs(key: str) -> Column:
    return Column(key=key, title=key, shown_to="programs")


def _epochs(time: TimeTo) -> str | None:
    """Of the repeats that reached it; several where they differ."""
    epochs = sorted({reach.epoch for reach in time.repeats if reach.epoch is not None})
    return " to ".join(map(str, dict.fromkeys((epochs[0], epochs[-1])))) if epochs else None


def _notes(times: Sequence[TimeTo], metric: str) -> list[str]:
    notes = []
    if any(time.at_least_seconds is not None for time in times):
        notes.append(
            "> : some repeat never reached the target. It counts with all of its training, so the"
            " mean is longer than that."
        )
    unknown = [
        (f"Not known: {time.reason}", time.row.place)
        for time in times
        if time.estimate is None and time.at_least_seconds is None
    ]
    notes += by_reason(unknown, len(times))
    notes.append(
        "Time of training alone, warm-up included, to the end of the first epoch that reached the"
        " target; nothing is interpolated between epochs."
    )
    if metric == "train_loss":
        notes.append("The loss of an epoch is the mean over its steps, not the loss at its end.")
    if any(len(time.repeats) > 1 for time in times):
        notes.append("Mean over the repeats, ± 95 % interval; best: of the repeat that did worst.")
    else:
        notes.append("One repeat: no interval.")
    return notes
