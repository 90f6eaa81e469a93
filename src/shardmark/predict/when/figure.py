"""Figure of the best strategy along the axes of a matrix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardmark.base.metrics import METRICS
from shardmark.bench.analysis.compare.comparison import ratio_between
from shardmark.bench.analysis.compare.rows import Row
from shardmark.bench.report.figures.chart import Figure, Panel, Series, figure
from shardmark.bench.report.figures.drawing import REFERENCE
from shardmark.bench.report.figures.entries import Entry, Group, entries_in, estimates_series
from shardmark.predict.when.crossings import RangeLine
from shardmark.predict.when.view import TITLES, axis_title, measured_lines

_WIDEST_LINEAR = 8
"""Largest ratio of values that an ordinary axis still shows well."""


def when_figures(groups: Sequence[Group]) -> list[Figure]:
    """Draw throughput and memory over each axis, relative to the best strategy at each value."""
    entries = entries_in(groups)
    by_row = {id(entry.row): entry for entry in entries}
    all_lines = measured_lines([entry.row for entry in entries])
    # Strategies of one value each would be a column of points, which bars show better.
    lines = [line for line in all_lines if any(len(values) > 1 for values in line.rows.values())]

    def panel(line: RangeLine) -> Panel:
        best = {
            value: row
            for part in line.ranges
            for value in part.best_at
            if (row := line.rows[part.strategy].get(value)) is not None
        }
        series = [
            drawn
            for by_value in line.rows.values()
            if (drawn := _relative(by_value, best, line, by_row)) is not None
        ]
        ys = [y for one in series for y in one.y if y is not None]
        crossings = [part.begins.value for part in line.ranges if part.begins is not None]
        marks = [
            Series(name="crossing", x=(at, at), y=(min(ys), max(ys)), style=REFERENCE, dashed=True)
            for at in crossings
        ]
        positive = min(line.values) > 0
        title = ", ".join(f"{key.rpartition('.')[2]} {v}" for key, v in line.conditions.items())
        return Panel(
            title=title,
            kind="line",
            x_label=axis_title(line.axis).replace("_", " ").capitalize(),
            y_label=f"{TITLES[line.metric]}, % of the best",
            y_unit="%",
            series=(*series, *marks),
            x_logarithmic=positive and max(line.values) / min(line.values) > _WIDEST_LINEAR,
            x_whole=line.axis != "parameters" and all(v.is_integer() for v in line.values),
            x_ticks=() if line.axis == "parameters" else tuple(line.values),
            y_from_zero=False,
        )

    return figure(
        "best-by-axis",
        "Which strategy is best, over the axes of the matrix",
        map(panel, lines),
        "Each value is relative to that of the best strategy at the same value of the axis. Dashed:"
        " the crossing of two strategies, interpolated. Bands or whiskers: 95 % intervals of the"
        " ratio. `shardmark compare --view when` has the numbers.",
    )


def _relative(
    by_value: Mapping[float, Row],
    best: Mapping[float, Row],
    line: RangeLine,
    entries: Mapping[int, Entry],
) -> Series | None:
    """Return a strategy's values in percent of the best; the best itself is 100 %."""
    ratios = {
        value: ratio
        for value, row in sorted(by_value.items())
        if value in best and (ratio := ratio_between(row, best[value], line.metric)) is not None
    }
    if not ratios:
        return None
    drawn = [entries[id(by_value[value])] for value in ratios]
    return estimates_series(
        drawn, list(ratios), list(ratios.values()), 100, timed=METRICS[line.metric].is_timed
    )
