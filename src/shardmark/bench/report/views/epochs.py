"""Views of epochs: all metrics by epoch, and the training time to a loss or a quality."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter
from statistics import fmean
from typing import NamedTuple

from shardmark.base.errors import InputError
from shardmark.base.metrics import METRICS
from shardmark.base.results.schema import TrialResult
from shardmark.base.statistics.intervals import estimate_mean
from shardmark.base.table.table import (
    Column,
    Missing,
    Table,
    Value,
    for_programs,
    metric,
    metric_column,
    number,
)
from shardmark.bench.analysis.compare.comparison import Comparison
from shardmark.bench.analysis.compare.epochs import Epoch, EpochsOfRow, epochs_of
from shardmark.bench.analysis.compare.rows import Row
from shardmark.bench.report.table.notes import by_reason, left_out, seeds_note
from shardmark.bench.report.table.row_columns import table_by_row

SHOWN = ("train_loss", "epoch_seconds", "elapsed_seconds", "evaluation_seconds", "map", "map_50",
         "accuracy_top1", "bits_per_byte", "perplexity")  # fmt: skip
"""Metrics that are shown to people; CSV and JSON hold every quality."""
OPTION = "--view time-to"
NOT_REACHED = "not reached"
TARGET_METRICS = tuple(
    metric.name
    for metric in METRICS.values()
    if metric.group == "quality" and metric.better is not None
)


def epochs_tables(comparison: Comparison) -> list[Table]:
    """Return a table with a line for each epoch of each row."""
    epochs_of_rows = [epochs_of(row) for row in comparison.rows]
    lines = [(epochs.row, epoch) for epochs in epochs_of_rows for epoch in epochs.epochs]
    recorded = dict.fromkeys(name for _, epoch in lines for name in epoch.metrics)
    names = dict.fromkeys((*(name for name in SHOWN if name in recorded), *recorded))
    for_people = {*SHOWN, *(names.keys() - METRICS.keys())}  # all metrics of user tasks
    table = table_by_row(
        "Epoch by epoch",
        lines,
        [
            (Column("epoch", names_row=True), lambda epoch: epoch.number),
            *(
                metric(name, interval="±", shown_to="all" if name in for_people else "programs")
                for name in names
            ),
        ],
        [
            *_epoch_notes(epochs_of_rows),
            *seeds_note([epochs.row for epochs in epochs_of_rows if epochs.epochs]),
            *left_out(comparison.rows),
        ],
    )
    return [table]


def _epoch_notes(epochs_of_rows: Sequence[EpochsOfRow]) -> list[str]:
    """Return notes on the seconds of an epoch and on missing rows and metrics."""
    timed = [epochs for epochs in epochs_of_rows if epochs.epochs]
    notes = []
    if timed:
        notes.append("Time of an epoch: training alone, on the slowest rank, without evaluation.")
    if any(len(epochs.row.ok_trials) > 1 for epochs in timed):
        notes.append("Mean over the repeats, ± 95 % interval of the mean (Student's t).")
    warmup = sorted({epochs.warmup_steps for epochs in timed} - {0})
    if warmup:
        steps = " or ".join(map(str, warmup))
        notes.append(f"In this view, the first epoch's time includes its {steps} warm-up steps.")
    measured = [epochs for epochs in epochs_of_rows if epochs.row.ok_trials]
    reasons = [
        *(
            (f"No epochs: {epochs.reason}", epochs.row.place)
            for epochs in measured
            if epochs.reason
        ),
        *(
            (f"Not known: {name} of epoch {epoch.number}: {epoch.missing[name]}", epochs.row.place)
            for epochs in measured
            for epoch in epochs.epochs
            for name in epoch.missing
            if name in SHOWN
        ),
    ]
    return [*notes, *by_reason(reasons, len(measured))]


class TargetReached(NamedTuple):
    """Result of one repeat for the target."""

    repeat: int
    epoch: int | None
    """The first epoch, from 1, at whose end the target was reached; None if none."""
    seconds: float | None
    """Training time to the end of that epoch, or of all epochs if none reached the target."""
    best: float | None
    """The best value at the end of any epoch; None where none is finite."""
    reason: str | None
    """The reason for which there is no time to the target."""


def time_to_tables(comparison: Comparison, text: str) -> list[Table]:
    """Return a table with a line for each row that has a trial that ended ok.

    `text` is `METRIC=VALUE`, or `METRIC` for the best value that every row reached.  Raises
    `InputError` for a metric that is no quality, a value that is no number or that no such metric
    can have, and a metric that no row recorded.
    """
    metric, target, note = _target(comparison.rows, text)
    higher = _higher(metric, comparison.rows)
    times = [
        (
            row,
            [_target_reached(row, trial, metric, target, higher=higher) for trial in row.ok_trials],
        )
        for row in comparison.rows
        if row.ok_trials
    ]
    shown = metric_column("elapsed_seconds", interval="±")
    people = partial(Column, shown_to="people")

    def time_to(repeats: list[TargetReached]) -> str:
        bound = _more_than_seconds(repeats)
        return shown.show(_seconds(repeats)) if bound is None else f"> {number(bound)}"

    table = table_by_row(
        f"Training time to {metric} {'≥' if higher else '≤'} {target:g}",
        times,
        [
            (for_programs("metric"), lambda _: metric),
            (for_programs("target"), lambda _: target),
            (metric_column("total_seconds", key="seconds", shown_to="programs"), _seconds),
            (for_programs("more_than_seconds"), _more_than_seconds),
            (people("time to", unit="s"), time_to),
            (people("after", unit="epoch"), _epochs),
            (people("reached_of", "reached"), _reached_text),
            (for_programs("reached"), _reached),
            (
                Column("best", decimals=4),
                lambda repeats: (min if higher else max)(
                    (repeat.best for repeat in repeats if repeat.best is not None), default=None
                ),
            ),
            (for_programs("repeats"), lambda repeats: [repeat._asdict() for repeat in repeats]),
        ],
        [*note, *_time_notes(times, metric), *left_out(comparison.rows)],
    )
    return [table]


def _target(rows: Sequence[Row], text: str) -> tuple[str, float, list[str]]:
    """Return metric, target value, and a note on a target that was not given."""
    metric, equals, value_text = (part.strip() for part in text.partition("="))
    user_defined = {
        name for row in rows for name in row.values.keys() - METRICS.keys() if row.better(name)
    }
    if metric not in {*TARGET_METRICS, *user_defined}:
        allowed = f"allowed are {', '.join((*TARGET_METRICS, *sorted(user_defined)))}"
        reason = f"{metric!r} is no loss or quality"
        if any(metric in row.values for row in rows):
            reason = f"the task does not say which values of {metric!r} are better"
            allowed = f'better = {{"{metric}": "higher"}} or "lower" in its class'
        raise InputError(OPTION, reason, allowed)
    higher = _higher(metric, rows)
    if equals:
        return metric, _value(metric, value_text), []
    bounds = []
    for row in rows:
        bests = [
            _best(metric, _history(row, trial).epochs, higher=higher) for trial in row.ok_trials
        ]
        best_values = [best for best in bests if best is not None]
        # A row that never recorded the metric, or whose loss is not finite, sets no target.
        if best_values and len(best_values) == len(bests) and row.diverged is None:
            bounds.append(((min if higher else max)(best_values), row.place))
    if not bounds:
        epochs = [epoch for row in rows for epoch in epochs_of(row).epochs]
        recorded = [n for n in TARGET_METRICS if any(epoch.metrics.get(n) for epoch in epochs)]
        allowed = f"recorded by epoch: {', '.join(recorded) or 'none'}"
        raise InputError(OPTION, f"no trial has {metric} by epoch", allowed)
    value, place = (min if higher else max)(bounds, key=itemgetter(0))
    return metric, value, [f"Target: the best value that every row reached; {place} bounds it."]


def _value(metric: str, value_text: str) -> float:
    definition = METRICS.get(metric)
    fraction = definition is not None and definition.unit == "fraction"
    try:
        value = float(value_text)
    except ValueError:
        value = math.nan
    least = 0 if definition else -math.inf
    if least <= value <= (1 if fraction else math.inf) and math.isfinite(value):
        return value
    allowed = (
        "a fraction from 0 to 1" if fraction else "a number from 0" if definition else "a number"
    )
    raise InputError(f"{OPTION} {metric}", repr(value_text), f"must be {allowed}")


def _target_reached(
    row: Row, trial: TrialResult, metric: str, target: float, *, higher: bool
) -> TargetReached:
    """Return the time to the end of the first epoch that reached the target, not interpolated."""
    history = _history(row, trial)

    def reached(epoch: Epoch) -> bool:
        value = _number(epoch, metric)
        return value is not None and (value >= target if higher else value <= target)

    if trial.diverged:
        best = _best(metric, history.epochs, higher=higher)
        return TargetReached(
            trial.repeat, epoch=None, seconds=None, best=best, reason=trial.diverged
        )
    first = next(filter(reached, history.epochs), None)
    recorded = [epoch for epoch in history.epochs if metric in epoch.metrics]
    last = first or (history.epochs[-1] if recorded else None)
    reason = NOT_REACHED if last else history.reason or "the metric was not recorded"
    return TargetReached(
        repeat=trial.repeat,
        epoch=None if first is None else first.number,
        seconds=None if last is None else _number(last, "elapsed_seconds"),
        best=_best(metric, history.epochs, higher=higher),
        reason=reason if first is None else first.missing.get("elapsed_seconds"),
    )


def _history(row: Row, trial: TrialResult) -> EpochsOfRow:
    return epochs_of(replace(row, trials=(trial,)))


def _number(epoch: Epoch, name: str) -> float | None:
    estimate = epoch.metrics.get(name)
    return None if estimate is None or not math.isfinite(estimate.value) else estimate.value


def _higher(metric: str, rows: Sequence[Row]) -> bool:
    return any(row.better(metric) == "higher" for row in rows)


def _best(metric: str, epochs: Sequence[Epoch], *, higher: bool) -> float | None:
    values = [value for epoch in epochs if (value := _number(epoch, metric)) is not None]
    return (max if higher else min)(values, default=None)


def _reached(repeats: Sequence[TargetReached]) -> int:
    return sum(repeat.epoch is not None for repeat in repeats)


def _reached_text(repeats: Sequence[TargetReached]) -> str | Missing:
    recorded = [repeat for repeat in repeats if repeat.best is not None]
    reason = next((repeat.reason for repeat in repeats if repeat.reason), None)
    if not recorded and reason is not None:
        return Missing(reason)
    return f"{_reached(repeats)} of {len(repeats)}"


def _known_seconds(repeats: Sequence[TargetReached]) -> list[float]:
    """Return the seconds of every repeat; an empty list if one is not known."""
    seconds = [repeat.seconds for repeat in repeats if repeat.seconds is not None]
    return seconds if len(seconds) == len(repeats) else []


def _seconds(repeats: Sequence[TargetReached]) -> Value:
    """Return the mean time; missing if a repeat missed the target: the mean would be too short."""
    missed, seconds = len(repeats) - _reached(repeats), _known_seconds(repeats)
    if seconds and not missed:
        return estimate_mean(seconds)
    reasons = [repeat.reason for repeat in repeats if repeat.reason is not None]
    if NOT_REACHED in reasons:
        return Missing(f"{NOT_REACHED} in {missed} of {len(repeats)} repeats")
    return Missing(reasons[0])


def _more_than_seconds(repeats: Sequence[TargetReached]) -> float | None:
    """Return a lower bound of the mean if some repeat missed the target; else None."""
    seconds = _known_seconds(repeats)
    return fmean(seconds) if seconds and _reached(repeats) < len(repeats) else None


def _epochs(repeats: Sequence[TargetReached]) -> str | None:
    """Return the epoch, or the range of epochs, in which repeats reached the target."""
    epochs = sorted({repeat.epoch for repeat in repeats if repeat.epoch is not None})
    return " to ".join(map(str, dict.fromkeys((epochs[0], epochs[-1])))) if epochs else None


def _time_notes(times: Sequence[tuple[Row, list[TargetReached]]], metric: str) -> list[str]:
    notes = []
    bounded = [repeats for _, repeats in times if _more_than_seconds(repeats) is not None]
    if bounded:
        notes.append(
            "> : a repeat did not reach the target. It counts with its full training time, so the"
            " mean is longer than that."
        )
    unknown = [
        (f"Not known: {seconds.reason}", row.place)
        for row, repeats in times
        if isinstance(seconds := _seconds(repeats), Missing) and repeats not in bounded
    ]
    notes += by_reason(unknown, len(times))
    notes.append(
        "Time of training alone, warm-up included, to the end of the first epoch that reached the"
        " target, without interpolation between epochs."
    )
    if metric == "train_loss":
        notes.append("The loss of an epoch is the mean over its steps, not the loss at its end.")
    if any(len(repeats) > 1 for _, repeats in times):
        notes.append("Mean over the repeats, ± 95 % interval; best: of the repeat that did worst.")
    else:
        notes.append("One repeat: no interval.")
    return notes
