"""Figure of predicted against measured speed and memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median

from shardmark.base.errors import ShardmarkError
from shardmark.base.metrics import METRICS
from shardmark.base.table.table import byte_unit
from shardmark.bench.analysis.compare.rows import Row
from shardmark.bench.report.figures.chart import Figure, Panel, Series, figure
from shardmark.bench.report.figures.drawing import REFERENCE
from shardmark.bench.report.figures.entries import (
    Entry,
    Group,
    entries_in,
    estimates_of,
    estimates_series,
    having,
    reliability,
)
from shardmark.predict.predicted.rows import Predictions

_RATE, _PEAK = "samples_per_second", "peak_memory_bytes"


def predicted_figures(groups: Sequence[Group], rows: Sequence[Row]) -> list[Figure]:
    """Draw speed and memory of each row that can be predicted; loads torch to trace the models."""
    predictions = Predictions(rows)
    measured = entries_in(having(groups, lambda entry: entry.row.metrics[_PEAK]))
    unit, size = byte_unit(max((peak.value for peak in estimates_of(measured, _PEAK)), default=0.0))
    rates = _values(groups, _RATE, predictions.samples_per_second)
    peaks = _values(groups, _PEAK, predictions.peak_memory_bytes)
    panels = [
        panel
        for group in groups
        for panel in (
            _panel(group, _RATE, rates, METRICS[_RATE].unit),
            _panel(group, _PEAK, peaks, unit, size),
        )
    ]
    return figure(
        "predicted",
        "Predicted and measured",
        panels,
        "On the dashed line both agree. Speed is predicted from the trial on fewest devices of the"
        " run, which is not shown.",
        _error_note("Speed", _RATE, rates),
        _error_note("Memory", _PEAK, peaks),
        reliability([*rates, *peaks]),
    )


def _values(
    groups: Sequence[Group], metric: str, predict: Callable[[Row], float]
) -> dict[Entry, float]:
    """Return predictions for the rows that have the metric and can be predicted."""
    predicted = {}
    for entry in entries_in(having(groups, lambda entry: entry.row.metrics[metric])):
        try:
            predicted[entry] = predict(entry.row)
        except ShardmarkError:
            continue  # The column `predicted` gives the reason.
    return predicted


def _panel(
    group: Group, metric: str, values: dict[Entry, float], unit: str, size: float = 1.0
) -> Panel:
    """Draw measured against predicted values; the panel is empty if nothing was predicted."""
    quantity = {_RATE: "throughput", _PEAK: "peak memory"}[metric]
    points: list[Series] = []
    for entries in group.by_name():
        entries_with_value = [entry for entry in entries if entry in values]
        if entries_with_value:
            predicted = [values[entry] / size for entry in entries_with_value]
            series = estimates_series(
                entries_with_value,
                predicted,
                estimates_of(entries_with_value, metric),
                1 / size,
                timed=METRICS[metric].is_timed,
            )
            places = tuple(entry.bar for entry in entries_with_value)
            points.append(
                replace(series, text=tuple(e.name for e in entries_with_value), places=places)
            )
    ends = [float(x) for series in points for x in series.x] + [
        y for series in points for y in series.y if y is not None
    ]
    agreeing = (min(ends), max(ends)) if ends else ()
    line = Series(name="agreement", x=agreeing, y=agreeing, style=REFERENCE, dashed=True)
    return Panel(
        title=group.title,
        kind="points",
        x_label=f"Predicted {quantity} ({unit})",
        y_label=f"Measured {quantity} ({unit})",
        x_unit=unit,
        y_unit=unit,
        series=(line, *points) if points else (),
        y_from_zero=False,
    )


def _error_note(name: str, metric: str, values: dict[Entry, float]) -> str:
    """Return a sentence about the median and the largest error of the predictions."""
    if not values:
        return ""
    errors = [
        abs(value / estimates_of([entry], metric)[0].value - 1) for entry, value in values.items()
    ]
    if len(errors) == 1:
        return f"{name} is off by {errors[0]:.0%}."
    return (
        f"{name} is off by {median(errors):.0%} (median of {len(errors)}),"
        f" {max(errors):.0%} at most."
    )
