"""What speed the memory buys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shardmark.report.figures.chart import Figure, Panel, Series, byte_unit, figure
from shardmark.report.figures.entries import (
    Entry,
    Group,
    entries_in,
    estimates_series,
    having,
    intervals,
    not_equivalent,
)
from shardmark.report.figures.looks import REFERENCE

_RATE, _PEAK = "samples_per_second", "peak_memory_bytes"


def trade_off_figures(groups: Sequence[Group]) -> list[Figure]:
    """Throughput against peak memory, with the border of what no other row beats in both."""
    both = having(groups, lambda entry: entry.row.metrics[_RATE] and entry.row.metrics[_PEAK])
    drawn = [group for group in both if len(group.entries) > 1]
    entries = entries_in(drawn)
    unit, size = byte_unit(max((_value(entry, _PEAK) for entry in entries), default=0.0))
    return figure(
        "speed-and-memory",
        "Speed against memory",
        [_trade_off(group, unit, size) for group in drawn],
        "Throughput against the peak memory of the fullest rank; numbers are ranks. Better is up"
        " and to the left: nothing beats the dashed border in both.",
        intervals(entries),
        not_equivalent(entries),
    )


def _trade_off(group: Group, unit: str, size: float) -> Panel:
    peaks = [_value(entry, _PEAK) / size for entry in group.entries]
    rates = [_value(entry, _RATE) for entry in group.entries]
    border = _border(list(zip(peaks, rates, strict=True)))
    series = [
        Series(
            name="not beaten in both",
            x=tuple(x for x, _ in border),
            y=tuple(y for _, y in border),
            style=REFERENCE,
            dashed=True,
        )
    ]
    for entries in group.by_name():
        estimates = [rate for entry in entries if (rate := entry.row.metrics[_RATE])]
        points = estimates_series(entries, [_value(e, _PEAK) / size for e in entries], estimates)
        text = tuple(entry.ranks.partition(" ")[0] for entry in entries)
        series.append(replace(points, text=text))
    return Panel(
        title=group.title,
        kind="points",
        x_label=f"Peak memory ({unit})",
        y_label="Throughput (samples/s)",
        x_unit=unit,
        y_unit="samples/s",
        series=tuple(series),
        x_from_zero=min(peaks) < max(peaks) / 2,
    )


def _border(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Steps through the points that no other beats in both, from the left up."""
    corners: list[tuple[float, float]] = []
    for x, y in sorted(points, key=lambda point: (point[0], -point[1])):
        if not corners or y > corners[-1][1]:
            if corners:
                corners.append((x, corners[-1][1]))
            corners.append((x, y))
    return corners


def _value(entry: Entry, metric: str) -> float:
    estimate = entry.row.metrics[metric]
    assert estimate is not None, "only rows that have it are drawn"
    return estimate.value
