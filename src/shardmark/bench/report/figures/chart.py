"""Describes a figure as plain data: its panels, series, units and ranges."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, floor, isfinite, log, log10
from typing import Literal

WHISKER_SHARE = 0.5
"""Length by which intervals may exceed the values, as a fraction of the values' range."""
MOST_PANELS = 12
_WIDEST_LINEAR = 10
"""Largest ratio of values that an ordinary axis still shows well."""
_FLATTENED = 3
"""Factor by which divergent series may extend an axis."""
_SAME = {"line": 0.008, "points": 0.02}
"""Difference that a line or a marker covers, as a fraction of the axis."""
_RATES = (("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3))


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """A line, a set of points or a set of bars, with a name in the legend."""

    name: str
    x: Sequence[float] | Sequence[str]
    """Values of the x axis; categories for bars."""
    y: Sequence[float | None]
    low: Sequence[float | None] | None = None
    """Lower ends of the 95 % intervals, one for each value of `y`; None without an interval."""
    high: Sequence[float | None] | None = None
    style: int | str
    """Number of the strategy in the comparison, so that it has the same colour in every figure; or
    the name of a reference or of a part of memory or time.  An interface has its own number."""
    dashed: bool = False
    """The series is a reference, such as ideal scaling: a dashed line without markers."""
    raw: bool = False
    """The series has the readings behind a running median of the same name: a faint line."""
    text: Sequence[str] | None = None
    """Texts beside the points, one for each value of `y`."""
    places: Sequence[str] = ()
    """Names of the points, one for each value of `y`; empty if name and `x` identify them."""
    faint: Sequence[bool] = ()
    """True for times and rates that other work disturbed; one for each value or one for all."""
    rows: Sequence[int] = ()
    """Row numbers in the comparison, one for each value or one for all, for the page's filters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """A pair of axes.  Bars are horizontal; their x is the category and their y the value."""

    title: str
    kind: Literal["line", "points", "bars", "stacked"]
    x_label: str = ""
    y_label: str
    series: tuple[Series, ...]
    x_unit: str = ""
    """Unit of x in the text that the pointer shows; `x_label` names it too."""
    y_unit: str = ""
    x_logarithmic: bool = False
    y_logarithmic: bool = False
    x_ticks: tuple[float, ...] = ()
    """Positions of the ticks; empty lets the library choose."""
    x_whole: bool = False
    """True for counts, such as epochs: ticks are whole numbers."""
    x_from_zero: bool = False
    y_from_zero: bool = True
    category_order: tuple[str, ...] = ()
    y_bounds: tuple[float, float] | None = None
    """Ends of the values' axis that several panels share; None for those of this panel."""

    @property
    def categories(self) -> tuple[str, ...]:
        """Categories of all series in the given order; others by their first appearance."""
        present = dict.fromkeys(str(x) for series in self.series for x in series.x)
        ordered = [name for name in self.category_order if name in present]
        return tuple(dict.fromkeys((*ordered, *present)))

    @property
    def y_range(self) -> tuple[float, float] | None:
        """Return the ends of the values' axis; None lets the library choose.

        With few repeats on a busy machine, intervals can be many times longer than the range of the
        values.  Whiskers are then cut at the border, so that the values stay readable.
        """

        def usable(ends: Iterable[float | None]) -> list[float]:
            numbers = [end for end in ends if end is not None and isfinite(end)]
            return [log(end) for end in numbers if end > 0] if self.y_logarithmic else numbers

        if self.y_bounds is not None:
            return self.y_bounds
        values = usable(y for series in self.series for y in series.y)
        if self.kind == "stacked" or not values:
            return None
        bounds = (ends for series in self.series for ends in (series.low, series.high) if ends)
        ends = usable(end for series_ends in bounds for end in series_ends)
        zero = self.y_from_zero and not self.y_logarithmic and min(values) >= 0
        base = 0.0 if zero else min(values)
        span = (max(values) - base) or (max(ends, default=base) - min(ends, default=base))
        if span <= 0:
            return None
        high = min(max([*values, *ends]), max(values) + WHISKER_SHARE * span) + 0.05 * span
        low = max(min([*values, *ends]), min(values) - WHISKER_SHARE * span) - 0.05 * span
        low = 0.0 if zero else low
        return (exp(low), exp(high)) if self.y_logarithmic else (low, high)

    @property
    def longest(self) -> int:
        """Return the length of the longest series, which decides on markers and whiskers."""
        return max((len(series.y) for series in self.series), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """Panels that share a legend, in units that are scaled for reading."""

    name: str
    """Name of the figure's files and anchor: lower case, words joined by `-`."""
    title: str
    caption: str
    """A plain text of one or two sentences: content, and how it was measured."""
    panels: tuple[Panel, ...]
    """Panels in reading order, row by row."""

    @property
    def warning(self) -> str:
        """Return a warning if other work disturbed a part of the figure; else an empty text."""
        disturbed = any(any(series.faint) for panel in self.panels for series in panel.series)
        text = (
            "Warning: other work disturbed times and rates (faint or hollow); do not compare them."
        )
        return text if disturbed else ""

    @property
    def legend(self) -> dict[str, Series]:
        """Return each name's first series; empty for bars, which have names."""
        if self.panels[0].kind == "bars":
            return {}
        first: dict[str, Series] = {}
        for panel in self.panels:
            for series in panel.series:
                first.setdefault(series.name, series)
        return first if len(first) > 1 else {}


def figure(name: str, title: str, panels: Iterable[Panel], *captions: str) -> list[Figure]:
    """Return a list of the figure, or an empty list if no panel has anything to draw."""
    drawn = [panel for panel in panels if panel.series]
    if not drawn:
        return []
    left_out = len(drawn) - MOST_PANELS
    more = f"{left_out} more panels are left out: the tables have all." if left_out > 0 else ""
    notes = (_beyond_note(drawn), _agreement_note(drawn), more)
    caption = " ".join(text for text in (*captions, *notes) if text)
    return [Figure(name=name, title=title, caption=caption, panels=tuple(drawn[:MOST_PANELS]))]


def _beyond_note(panels: Sequence[Panel]) -> str:
    """Return a sentence about series that are cut at the end of their axis, with their maxima."""
    tops = [
        (max(_finite(series)), series.name)
        for panel in panels
        for series in panel.series
        if panel.y_bounds and max(_finite(series), default=0.0) > panel.y_bounds[1]
    ]
    largest = {name: value for value, name in sorted(tops)}
    names = [f"{name} (up to {value:.3g})" for name, value in largest.items()]
    return f"Cut at the end of the axis: {', '.join(names)}." if names else ""


def _agreement_note(panels: Sequence[Panel]) -> str:
    """Return a sentence about lines and points that hide one another."""
    groups: dict[tuple[str, ...], int] = {}
    compared = [panel for panel in panels if panel.kind in ("line", "points")]
    for panel in compared:
        for names in _agreeing(panel):
            groups[names] = groups.get(names, 0) + 1
    texts = [
        f"{', '.join(names[:-1])} and {names[-1]}"
        + (f" (in {count} of {len(compared)} panels)" if count < len(compared) else "")
        for names, count in groups.items()
    ]
    noun = "Points" if panels[0].kind == "points" else "Lines"
    return f"{noun} on one another: {'; '.join(texts)}." if texts else ""


def _agreeing(panel: Panel) -> list[tuple[str, ...]]:
    """Return the names of series that have the same points as far as a reader can see."""
    lines = [one for one in panel.series if not (one.dashed or one.raw)]
    complete = [one for one in lines if len(_finite(one)) == len(one.y) > 0]
    xs = [float(x) for one in complete for x in one.x]
    ys = [y for one in complete for y in _finite(one)]
    if not ys:
        return []
    low, high = panel.y_range or (min(ys), max(ys))

    def fractions(values: Iterable[float], low: float, high: float, scaled: bool) -> list[float]:
        """Return places on an axis between 0 and 1."""
        first, last, *others = (log(v) if scaled and v > 0 else v for v in (low, high, *values))
        return [(value - first) / ((last - first) or 1.0) for value in others]

    groups: list[tuple[list[float], list[str]]] = []
    for one in complete:
        places = fractions([float(x) for x in one.x], min(xs), max(xs), panel.x_logarithmic)
        places += fractions(_finite(one), low, high, panel.y_logarithmic)
        for others, names in groups:
            distances = (abs(a - b) for a, b in zip(places, others, strict=False))
            if len(others) == len(places) and max(distances) <= _SAME[panel.kind]:
                names.append(one.name)
                break
        else:
            groups.append((places, [one.name]))
    return [tuple(names) for _, names in groups if len(names) > 1]


def stacked_panel(
    title: str,
    y_label: str,
    y_unit: str,
    bars: Sequence[tuple[str, int, Mapping[str, float | None]]],
    unit_size: float,
    *,
    faint: Collection[int] = (),
) -> Panel:
    """Return stacked bars; a bar has a name, a row, and values by part in base units.

    `faint` has the rows whose times other work disturbed.
    """
    kinds = dict.fromkeys(kind for *_, parts in bars for kind, value in parts.items() if value)
    series = []
    for kind in kinds:
        bars_with_part = [bar for bar in bars if bar[2].get(kind) is not None]
        series.append(
            Series(
                name=kind,
                style=kind,
                x=tuple(name for name, *_ in bars_with_part),
                y=tuple((parts[kind] or 0.0) / unit_size for *_, parts in bars_with_part),
                rows=tuple(row for _, row, _ in bars_with_part),
                faint=tuple(row in faint for _, row, _ in bars_with_part),
            )
        )
    return Panel(
        title=title,
        kind="stacked",
        y_label=f"{y_label} ({y_unit})",
        y_unit=y_unit,
        series=tuple(series),
        category_order=tuple(name for name, *_ in bars),
    )


def rate_unit(largest_bytes_per_second: float) -> tuple[str, float]:
    """Return the name and the size of a decimal unit that suits the largest network rate."""
    return next((unit for unit in _RATES if largest_bytes_per_second >= unit[1]), _RATES[-1])


def readable(panels: Iterable[Panel]) -> list[Panel]:
    """Make the y axes logarithmic if values differ much, so that no row hides the others.

    An axis does not extend to the few series that diverge: they are cut, and the caption has them.
    """
    drawn = list(panels)
    rest = [replace(panel, series=_without_divergent(panel)) for panel in drawn]
    values = [y for panel in rest for series in panel.series for y in series.y if y is not None]
    wide = bool(values) and min(values) > 0 and max(values) / min(values) >= _WIDEST_LINEAR
    rest = [replace(panel, y_logarithmic=wide) for panel in rest]
    return [
        replace(others, series=panel.series, y_bounds=others.y_range)
        if len(others.series) < len(panel.series)
        else others
        for panel, others in zip(drawn, rest, strict=True)
    ]


def _finite(series: Series) -> list[float]:
    return [y for y in series.y if y is not None and isfinite(y)]


def _without_divergent(panel: Panel) -> tuple[Series, ...]:
    """Return the series without those, a third at most, whose large values flatten the others."""
    tops = sorted(max(_finite(one), default=0.0) for one in panel.series)
    usual = tops[len(tops) - len(tops) // 3 - 1] if tops else 0.0
    values = [y for one in panel.series for y in _finite(one) if max(_finite(one)) <= usual]
    least = min(values, default=0.0)
    top = max(least + _FLATTENED * (usual - least), _FLATTENED / 2 * usual)
    return tuple(one for one in panel.series if max(_finite(one), default=0.0) <= top)


def with_shared_axis(panels: Iterable[Panel]) -> list[Panel]:
    """Give the panels of the same quantity one axis of values, so that they compare by eye."""
    drawn = list(panels)
    bounds: dict[tuple[str, bool], tuple[float, float]] = {}
    for panel in drawn:
        if panel.y_range is not None:
            key = panel.y_label, panel.y_logarithmic
            low, high = bounds.get(key, panel.y_range)
            bounds[key] = min(low, panel.y_range[0]), max(high, panel.y_range[1])
    return [
        replace(panel, y_bounds=bounds.get((panel.y_label, panel.y_logarithmic))) for panel in drawn
    ]


def log_ticks(low: float, high: float) -> list[float]:
    """Return round values in the range: few over several decades, more within one."""
    steps: tuple[float, ...] = (1, 2, 5) if high >= 10 * low else (1, 1.5, 2, 3, 5, 7)
    decades = range(floor(log10(low)), floor(log10(high)) + 1)
    if len(decades) > 4:
        steps = (1,)
    ticks = [step * 10.0**decade for decade in decades for step in steps]
    return [tick for tick in ticks if low <= tick <= high]
