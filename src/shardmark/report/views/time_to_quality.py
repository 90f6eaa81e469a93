"""Training seconds until a target is reached, as a table and for programs."""

from __future__ import annotations

from collections.abc import Sequence

from shardmark.analysis.compare.comparison import Comparison
from shardmark.analysis.compare.rows import Row
from shardmark.analysis.compare.time_to_quality import (
    TARGET_METRICS,
    TimeTo,
    time_to_quality,
    worst_of,
)
from shardmark.core.errors import InputError
from shardmark.core.metrics import METRICS
from shardmark.report.table.data import estimate_of, flat, format_csv, identity_of
from shardmark.report.table.quantities import quantity
from shardmark.report.table.sections import Section, View
from shardmark.report.table.tables import Column, Table, number, row_names
from shardmark.report.views.epochs import left_out, where

OPTION = "--time-to"
FRACTION = 1.0


def time_to_view(comparison: Comparison, text: str) -> View:
    """`text` is `METRIC=VALUE`, or `METRIC` for the best value that every row reached.

    Raises `InputError` for a metric that is no quality, a value that is no number or that no such
    metric can have, and a metric that no row recorded.
    """
    metric, target, note = parse_target(comparison, text)
    found = [time_to_quality(row, metric, target) for row in comparison.rows if row.ok_trials]
    return View(
        key="time_to",
        sections=lambda: (time_to_section(comparison, found, metric, target, note),),
        data=lambda: time_to_json(found, metric, target),
        csv=lambda: time_to_csv(comparison, found),
    )


def parse_target(comparison: Comparison, text: str) -> tuple[str, float, str | None]:
    """Metric, target, and where a computed target comes from."""
    metric, equals, given = text.partition("=")
    metric = metric.strip()
    allowed = f"allowed are {', '.join(TARGET_METRICS)}"
    if metric not in TARGET_METRICS:
        raise InputError(OPTION, f"{metric!r} is no loss or quality", allowed)
    if equals:
        return metric, _value(metric, given), None
    worst = worst_of(comparison.rows, metric)
    if worst is None:
        raise InputError(OPTION, f"no trial has {metric} by epoch", _recorded(comparison.rows))
    row, target = worst
    note = f"Target: the best value that every row reached; {row.place} bounds it."
    weaker = any(one.equivalent is None and one.guarantee is not None for one in comparison.rows)
    if weaker:
        note += (
            " Rows that promise less than equivalence count here, and not in the recommendation,"
            " whose target can be another one."
        )
    return metric, target, note


def _value(metric: str, given: str) -> float:
    fraction = METRICS[metric].unit == "fraction"
    try:
        value = float(given)
    except ValueError:
        value = float("nan")
    if 0 <= value <= (FRACTION if fraction else float("inf")) and value != float("inf"):
        return value
    allowed = "a fraction from 0 to 1" if fraction else "a number from 0"
    raise InputError(f"{OPTION} {metric}", f"{given.strip()!r}", f"must be {allowed}")


def _recorded(rows: Sequence[Row]) -> str:
    found = [name for name in TARGET_METRICS if worst_of(rows, name) is not None]
    return f"recorded by epoch: {', '.join(found) or 'none'}"


def time_to_section(
    comparison: Comparison,
    found: Sequence[TimeTo],
    metric: str,
    target: float,
    note: str | None = None,
) -> Section:
    """One line for each row that has a trial that ended ok."""
    rows = [one.row for one in found]
    sign = "≥" if METRICS[metric].better == "higher" else "≤"
    columns = (
        *row_names(rows),
        Column(title="time to\ns", cells=tuple(_seconds(one) for one in found)),
        Column(title="after\nepoch", cells=tuple(_epochs(one) for one in found)),
        Column(title="reached", cells=tuple(_reached(one) for one in found)),
        Column(title="best", cells=tuple(_best(one) for one in found)),
    )
    title = f"Training time to {metric} {sign} {target:g}"
    notes = (*([] if note is None else [note]), *_notes(found), *left_out(comparison.rows))
    return Section(title=title, table=Table(columns=columns if rows else (), notes=notes))


def _seconds(one: TimeTo) -> str:
    if one.estimate is not None:
        return quantity("elapsed_seconds").show(one.estimate)
    least = one.at_least_seconds
    return "" if least is None else f"> {number(least)}"


def _epochs(one: TimeTo) -> str:
    """Of the repeats that reached it; several where they differ."""
    epochs = sorted({reach.epoch for reach in one.repeats if reach.epoch is not None})
    if not epochs:
        return ""
    return str(epochs[0]) if len(epochs) == 1 else f"{epochs[0]} to {epochs[-1]}"


def _reached(one: TimeTo) -> str:
    return f"{one.reached} of {len(one.repeats)}"


def _best(one: TimeTo) -> str:
    """Over all epochs, of the repeat that did worst."""
    values = [reach.best for reach in one.repeats if reach.best is not None]
    if not values:
        return ""
    worst = min(values) if METRICS[one.metric].better == "higher" else max(values)
    return number(worst, decimals=4)


def _notes(found: Sequence[TimeTo]) -> list[str]:
    notes = []
    missed = [one for one in found if one.at_least_seconds is not None]
    if missed:
        notes.append(
            "> : some repeat never reached the target. It counts with all of its training, so that"
            " the mean is longer than that; a mean over the others alone would be too short."
        )
    reasons: dict[str, list[str]] = {}
    for one in found:
        if one.estimate is None and one.at_least_seconds is None and one.reason is not None:
            reasons.setdefault(one.reason, []).append(one.row.place)
    notes += [
        f"Not known: {reason}{where(places, len(found))}." for reason, places in reasons.items()
    ]
    notes.append(
        "Time of training alone, warm-up included, evaluations left out, to the end of the first"
        " epoch that reached the target; nothing is interpolated between epochs."
    )
    if found and found[0].metric == "train_loss":
        notes.append("The loss of an epoch is the mean over its steps, not the loss at its end.")
    if any(len(one.repeats) > 1 for one in found):
        notes.append(
            "Mean over the repeats, ± 95 % interval; best: of the repeat that did worst. Repeats"
            " share a seed: the interval is the machine's noise, and says nothing of another seed."
        )
    else:
        notes.append("One repeat: no interval.")
    return notes


def time_to_json(found: Sequence[TimeTo], metric: str, target: float) -> dict[str, object]:
    """The target, then one mapping a row; `seconds` is null unless every repeat reached it."""
    return {
        "metric": metric,
        "target": target,
        "better": METRICS[metric].better,
        "rows": [
            identity_of(one.row)
            | {
                "seconds": None
                if one.estimate is None
                else estimate_of(one.estimate, "total_seconds"),
                "more_than_seconds": one.at_least_seconds,
                "reached": one.reached,
                "repeats": [
                    {
                        "repeat": reach.repeat,
                        "epoch": reach.epoch,
                        "seconds": reach.seconds,
                        "best": reach.best,
                        "reason": reach.reason,
                    }
                    for reach in one.repeats
                ],
                "reason": one.reason,
            }
            for one in found
        ],
    }


def time_to_csv(comparison: Comparison, found: Sequence[TimeTo]) -> str:
    """One line for each row; `seconds` is blank unless every repeat reached the target."""
    lines = [
        identity_of(one.row)
        | {"metric": one.metric, "target": one.target}
        | dict(flat("seconds", one.estimate))
        | {
            "more_than_seconds": one.at_least_seconds,
            "reached": one.reached,
            "repeats": len(one.repeats),
            "reason": one.reason,
        }
        for one in found
    ]
    keys = dict.fromkeys(key for row in comparison.rows for key in identity_of(row))
    columns = ("metric", "target", "seconds", "seconds_low", "seconds_high")
    return format_csv(lines, [*keys, *columns, "more_than_seconds", "reached", "repeats", "reason"])
