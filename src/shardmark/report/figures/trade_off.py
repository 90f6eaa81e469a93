"""What speed the memory buys."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from shardmark.analysis.compare.rows import main_rate
from shardmark.core.metrics import METRICS
from shardmark.report.figures.chart import Figure, Panel, Series, byte_unit, figure
from shardmark.report.figures.entries import (
    Entry,
    Group,
    entries_in,
    estimates_of,
    estimates_series,
    having,
    reliability,
)
from shardmark.report.figures.looks import REFERENCE

_RATE, _PEAK = "samples_per_second", "peak_memory_bytes"
_MOST_NAMED = 12
"""Cells of a panel that have their strategy's name beside them; more have their ranks alone."""


def trade_off_figures(groups: Sequence[Group]) -> list[Figure]:
    """Throughput against peak memory: one mark a cell, and the frontier."""
    both = having(groups, lambda entry: entry.row.metrics[_RATE] and entry.row.metrics[_PEAK])
    drawn = [group for group in both if len(group.entries) > 1]
    entries = entries_in(drawn)
    peaks = [peak.value for peak in estimates_of(entries, _PEAK)]
    unit, size = byte_unit(max(peaks, default=0.0))
    different = any(e.row.equivalent is False or e.row.guarantee for e in entries)
    return figure(
        "speed-and-memory",
        "Speed against memory",
        [_trade_off(group, unit, size) for group in drawn],
        "Throughput against the peak memory of the fullest rank. Better is up and to the left:"
        " nothing measured beats the dashed frontier in both.",
        "What trains something else is not on it." if different else "",
        reliability(entries),
    )


def _trade_off(group: Group, unit: str, size: float) -> Panel:
    cells, same_training = [], []
    metric = main_rate([entry.row for entry in group.entries])
    for entries in group.by_name():
        rates = estimates_of(entries, metric)
        peaks = [peak.value / size for peak in estimates_of(entries, _PEAK)]
        points = estimates_series(entries, peaks, rates)
        texts = tuple(_text(entry, group) for entry in entries)
        places = tuple(entry.bar for entry in entries)
        cells.append(replace(points, text=texts, places=places))
        same_training += [
            (peak, rate.value)
            for entry, peak, rate in zip(entries, peaks, rates, strict=True)
            if entry.row.equivalent is not False and entry.row.guarantee is None
        ]
    return trade_off_panel(group.title, cells, same_training, unit, METRICS[metric].unit)


def trade_off_panel(
    title: str,
    cells: Sequence[Series],
    candidates: Iterable[tuple[float, float]],
    unit: str,
    rate_unit: str = METRICS[_RATE].unit,
) -> Panel:
    """Throughput over memory in `unit`; the frontier is that of the `candidates`, in the same."""
    peaks = [float(x) for series in cells for x in series.x]
    corners = _frontier(candidates)
    if corners:  # it ends where the cells end, so that a single corner is seen, too
        lowest = min(y for series in cells for y in series.y if y is not None)
        corners = [(corners[0][0], lowest), *corners, (max(peaks), corners[-1][1])]
    frontier = Series(
        name="frontier",
        x=tuple(x for x, _ in corners),
        y=tuple(y for _, y in corners),
        style=REFERENCE,
        dashed=True,
    )
    return Panel(
        title=title,
        kind="points",
        x_label=f"Peak memory ({unit})",
        y_label=f"Throughput ({rate_unit})",
        x_unit=unit,
        y_unit=rate_unit,
        series=(frontier, *cells),
        x_from_zero=min(peaks) < max(peaks) / 2,
    )


def _text(entry: Entry, group: Group) -> str:
    ranks = entry.ranks.partition(" ")[0]
    if len(group.entries) > _MOST_NAMED:
        return ranks
    several = sum(other.name == entry.name for other in group.entries) > 1
    return f"{entry.name}, {ranks}" if several else entry.name


def _frontier(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Steps through the points that no other beats in both, from the left up."""
    corners: list[tuple[float, float]] = []
    for x, y in sorted(points, key=lambda point: (point[0], -point[1])):
        if not corners or y > corners[-1][1]:
            if corners:
                corners.append((x, corners[-1][1]))
            corners.append((x, y))
    return corners
