"""A figure as plain data; `plotly_drawing` and `images` draw the same thing from it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import exp, isfinite, log
from typing import Literal

HORIZONTAL = ("horizontal_bars", "stacked_horizontal")
"""Kinds whose categories go down the page."""
STACKED = ("stacked_bars", "stacked_horizontal")
LOG_TICKS, FINE_LOG_TICKS = (1.0, 2.0, 5.0), (1.0, 1.5, 2.0, 3.0, 5.0, 7.0)
"""Times a power of ten: ticks of a logarithmic axis of values, and of one of less than a decade."""
WHISKER_SHARE = 0.5
"""How far intervals may reach beyond the values, as a share of what the values span."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One line, set of points or set of bars, with one name in the legend."""

    name: str
    x: Sequence[float] | Sequence[str]
    """Categories for bars of every kind."""
    y: Sequence[float | None]
    low: Sequence[float | None] | None = None
    """Lower ends of the 95 % intervals, beside `y`; None where there is none."""
    high: Sequence[float | None] | None = None
    style: str = ""
    """What it stands for, usually a strategy: the same style has the same colour in every figure;
    empty means the name."""
    variant: int = 0
    """Which of several series of one style: the same colour, another dash, marker and hatch."""
    dashed: bool = False
    """A reference such as ideal scaling: a dashed line without markers, also among points."""
    text: Sequence[str] | None = None
    """What stands at each point, beside `y`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One pair of axes.  A horizontal kind keeps the meaning of x (categories) and y (values)."""

    title: str
    kind: Literal["line", "points", "bars", "stacked_bars", "horizontal_bars", "stacked_horizontal"]
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    x_unit: str = ""
    """Of the values, for the text that the pointer shows; the labels have it too."""
    y_unit: str = ""
    x_logarithmic: bool = False
    y_logarithmic: bool = False
    x_ticks: tuple[float, ...] = ()
    """Where the ticks are; empty leaves it to the library."""
    x_tick_labels: tuple[str, ...] = ()
    """What stands at the ticks, where that is not their numbers."""
    x_from_zero: bool = False
    y_from_zero: bool = True
    marked: bool = True
    """Whether the points of short lines have markers."""
    y_range: tuple[float, float] | None = None
    """Ends of the values' axis; None leaves them to the library."""
    category_order: tuple[str, ...] = ()

    @property
    def categories(self) -> tuple[str, ...]:
        """Of all series: in the given order, the rest by their first appearance."""
        present = dict.fromkeys(str(x) for series in self.series for x in series.x)
        ordered = [name for name in self.category_order if name in present]
        return tuple(dict.fromkeys((*ordered, *present)))

    @property
    def y_log_ticks(self) -> tuple[float, ...]:
        """Times a power of ten, where the values' axis is logarithmic."""
        if self.y_range is None or self.y_range[1] >= 10 * self.y_range[0]:
            return LOG_TICKS
        return FINE_LOG_TICKS

    @property
    def longest(self) -> int:
        """Points of the longest series: what is marked or not is the same for a whole panel."""
        return max((len(series.y) for series in self.series), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One or more panels that share a legend, in base units already scaled for reading."""

    name: str
    """Of its files and its anchor: lower case, words joined by `-`."""
    title: str
    caption: str
    """What one sees and how it was measured, in one or two sentences; plain text."""
    panels: tuple[Panel, ...]
    """In reading order: row by row."""
    columns: int = 1
    """Panels beside each other, where there is room."""
    shared_y: bool = False
    """Panels with the same label have the same range, so that they can be compared by eye."""


def with_ranges(figure: Figure) -> Figure:
    """The figure with `y_range` set where the panels share y, or have intervals.

    Few repeats on a busy machine have intervals many times as long as what the values differ by:
    whiskers end at the border then, so that the values are not squeezed together.
    """
    return replace(
        figure,
        panels=tuple(replace(panel, y_range=_range_of(figure, panel)) for panel in figure.panels),
    )


def _range_of(figure: Figure, panel: Panel) -> tuple[float, float] | None:
    if panel.kind in STACKED:
        return None
    alike = [one for one in figure.panels if one.y_label == panel.y_label]
    series = [line for one in (alike if figure.shared_y else [panel]) for line in one.series]
    if not figure.shared_y and not any(end is not None for one in series for end in one.high or ()):
        return None
    return _range(series, logarithmic=panel.y_logarithmic, from_zero=panel.y_from_zero)


def _range(
    series: Sequence[Series], *, logarithmic: bool, from_zero: bool
) -> tuple[float, float] | None:
    def usable(ends: Iterable[float | None]) -> list[float]:
        found = [end for end in ends if end is not None and isfinite(end)]
        return [log(end) for end in found if end > 0] if logarithmic else found

    values = usable(y for one in series for y in one.y)
    if not values:
        return None
    ends = usable(end for one in series for ends in (one.low, one.high) for end in ends or ())
    zero = from_zero and not logarithmic and min(values) >= 0
    base = 0.0 if zero else min(values)
    span = (max(values) - base) or (max(ends, default=base) - min(ends, default=base))
    if span <= 0:
        return None
    high = min(max([*values, *ends]), max(values) + WHISKER_SHARE * span) + 0.05 * span
    low = max(min([*values, *ends]), min(values) - WHISKER_SHARE * span) - 0.05 * span
    low = 0.0 if zero else low
    return (exp(low), exp(high)) if logarithmic else (low, high)
