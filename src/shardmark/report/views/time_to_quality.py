"""Training seconds until a target is reached."""

from __future__ import annotations

from collections.abc import Sequence

from shardmark.analysis.compare.comparison import Comparison
from shardmark.analysis.compare.rows import Row
from shardmark.analysis.compare.time_to_quality import (
    TARGET_METRICS,
    TimeTo,
    time_to_quality,
    worst_of,
    worst_value,
)
from shardmark.core.errors import InputError
from shardmark.core.metrics import METRICS
from shardmark.report.table.columns import for_items, metric_column, row_columns
from shardmark.report.table.gaps import by_reason, left_out
from shardmark.report.table.table import Column, Missing, Table, Value, number, table_of

OPTION = "--time-to"


def time_to_tables(comparison: Comparison, text: str) -> list[Table]:
    """One line for each row that has a trial that ended ok.

    `text` is `METRIC=VALUE`, or `METRIC` for the best value that every row reached.  Raises
    `InputError` for a metric that is no quality, a value that is no number or that no such metric
    can have, and a metric that no row recorded.
    """
    metric, target, note = parse_target(comparison, text)
    times = [time_to_quality(row, metric, target) for row in comparison.rows if row.ok_trials]
    sign = "≥" if METRICS[metric].better == "higher" else "≤"
    table = table_of(
        f"Training time to {metric} {sign} {target:g}",
        times,
        [
            *for_items(row_columns([time.row for time in times]), _row_of),
            (_programs("metric"), lambda time: time.metric),
            (_programs("target"), lambda time: time.target),
            (
                metric_column("total_seconds", key="seconds", shown_to="programs"),
                lambda time: time.estimate or Missing(time.reason or ""),
            ),
            (_programs("more_than_seconds"), lambda time: time.at_least_seconds),
            (_people("time to", "s"), _seconds),
            (_people("after", "epoch"), _epochs),
            (_people("reached"), lambda time: f"{time.reached} of {len(time.repeats)}"),
            (_programs("reached"), lambda time: time.reached),
            (Column(key="best", title="best", decimals=4), _best),
            (_programs("repeats"), _repeats),
        ],
        [*note, *_notes(times), *left_out(comparison.rows)],
    )
    return [table]


def parse_target(comparison: Comparison, text: str) -> tuple[str, float, list[str]]:
    """Metric, target, and where a computed target comes from."""
    metric, equals, given = text.partition("=")
    metric = metric.strip()
    if metric not in TARGET_METRICS:
        allowed = f"allowed are {', '.join(TARGET_METRICS)}"
        raise InputError(OPTION, f"{metric!r} is no loss or quality", allowed)
    if equals:
        return metric, _value(metric, given), []
    worst = worst_of(comparison.rows, metric)
    if worst is None:
        recorded = [name for name in TARGET_METRICS if worst_of(comparison.rows, name) is not None]
        known = f"recorded by epoch: {', '.join(recorded) or 'none'}"
        raise InputError(OPTION, f"no trial has {metric} by epoch", known)
    row, target = worst
    note = f"Target: the best value that every row reached; {row.place} bounds it."
    return metric, target, [note]


def _value(metric: str, given: str) -> float:
    fraction = METRICS[metric].unit == "fraction"
    try:
        value = float(given)
    except ValueError:
        value = float("nan")
    if 0 <= value <= (1 if fraction else float("inf")) and value != float("inf"):
        return value
    allowed = "a fraction from 0 to 1" if fraction else "a number from 0"
    raise InputError(f"{OPTION} {metric}", f"{given.strip()!r}", f"must be {allowed}")


def _people(title: str, unit: str = "") -> Column:
    return Column(key=title, title=title, unit=unit, shown_to="people")


def _programs(key: str) -> Column:
    return Column(key=key, title=key, shown_to="programs")


def _row_of(time: TimeTo) -> Row:
    return time.row


def _seconds(time: TimeTo) -> str | None:
    """`> 22.00` where some repeat missed the target."""
    if time.estimate is not None:
        return metric_column("elapsed_seconds", interval="±").show(time.estimate)
    least = time.at_least_seconds
    return None if least is None else f"> {number(least)}"


def _epochs(time: TimeTo) -> str | None:
    """Of the repeats that reached it; several where they differ."""
    epochs = sorted({reach.epoch for reach in time.repeats if reach.epoch is not None})
    if not epochs:
        return None
    return str(epochs[0]) if len(epochs) == 1 else f"{epochs[0]} to {epochs[-1]}"


def _best(time: TimeTo) -> float | None:
    """Over all epochs, of the repeat that did worst."""
    values = [reach.best for reach in time.repeats if reach.best is not None]
    return worst_value(time.metric, values) if values else None


def _repeats(time: TimeTo) -> Value:
    names = ("repeat", "epoch", "seconds", "best", "reason")
    return [{name: getattr(reach, name) for name in names} for reach in time.repeats]


def _notes(times: Sequence[TimeTo]) -> list[str]:
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
    if times and times[0].metric == "train_loss":
        notes.append("The loss of an epoch is the mean over its steps, not the loss at its end.")
    if any(len(time.repeats) > 1 for time in times):
        notes.append(
            "Mean over the repeats, ± 95 % interval; best: of the repeat that did worst. Repeats"
            " share a seed: the interval says nothing of another one."
        )
    else:
        notes.append("One repeat: no interval.")
    return notes
