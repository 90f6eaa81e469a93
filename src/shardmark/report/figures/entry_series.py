"""The line, points or bars of one row, and which rows and axes a figure has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from shardmark.analysis.statistics.intervals import Estimate
from shardmark.report.figures.figure import Panel, Series
from shardmark.report.figures.grouping import Entry, Group, facets_of

_WIDEST_LINEAR = 10
"""Largest ratio of values that an ordinary axis still shows well."""


def estimates_series(
    entry: Entry, x: Sequence[float] | Sequence[str], found: Sequence[Estimate], scale: float
) -> Series:
    """The entry's line, points or bars with intervals."""
    return Series(
        name=entry.name,
        x=tuple(x),  # type: ignore[arg-type]  # a tuple of one of the two kinds
        y=tuple(one.value * scale for one in found),
        low=tuple(None if one.low is None else one.low * scale for one in found),
        high=tuple(None if one.high is None else one.high * scale for one in found),
        style=entry.style,
        variant=entry.variant,
    )


def series_of(entry: Entry, x: Sequence[float], y: Sequence[float]) -> Series:
    """The entry's line without intervals."""
    return Series(name=entry.name, x=tuple(x), y=tuple(y), style=entry.style, variant=entry.variant)


def having(groups: Sequence[Group], has: Callable[[Entry], bool]) -> list[Group]:
    """The facets, of the entries that have something to draw."""
    kept = [
        replace(group, entries=tuple(entry for entry in group.entries if has(entry)))
        for group in groups
    ]
    return list(facets_of([group for group in kept if group.entries]))


def readable(panels: Sequence[Panel]) -> tuple[Panel, ...]:
    """Logarithmic where values differ by much: a row that diverges must not hide the rest."""
    values = [y for panel in panels for series in panel.series for y in series.y if y is not None]
    if min(values) <= 0 or max(values) / min(values) < _WIDEST_LINEAR:
        return tuple(panels)
    return tuple(replace(panel, y_logarithmic=True) for panel in panels)
