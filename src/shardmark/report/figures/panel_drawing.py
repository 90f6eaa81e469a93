"""Draws one panel with matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, isfinite, nan
from typing import TYPE_CHECKING, Any

from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedFormatter, FixedLocator, FuncFormatter, LogLocator, NullLocator

from shardmark.report.figures.figure import HORIZONTAL, STACKED, Panel, Series
from shardmark.report.figures.looks import (
    DASHES,
    HATCHES,
    LONGEST_SHOWN,
    LONGEST_TICK,
    MARKERS,
    MOST_MARKED,
    MOST_WHISKERS,
    Look,
    look_of,
    short,
)

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

_SIGNS = dict(zip(MARKERS, ("o", "s", "D", "^", "v", "P", "X", "*"), strict=True))
_HATCHES = {
    "": "",
    "/": "////",
    "\\": "\\\\\\\\",
    "x": "xxx",
    "-": "---",
    "|": "|||",
    "+": "+++",
    ".": "...",
}
_GRID = "#dddddd"
_INK = "#333333"
_TEXT_POINTS = 6.5


def draw_panel(axes: Axes, panel: Panel, title_letters: int) -> list[tuple[str, Artist]]:
    """Draw the series and set up the axes; return each series' name and sign for the legend."""
    if panel.title:
        axes.set_title(short(panel.title, title_letters), loc="left", fontweight="bold")
    if panel.kind in ("line", "points"):
        handles = [_draw_line(axes, panel, series) for series in panel.series]
        _numeric_axes(axes, panel)
        if panel.y_range is not None:
            axes.set_ylim(panel.y_range)
    else:
        handles = _draw_bars(axes, panel)
    return [(series.name, handle) for series, handle in zip(panel.series, handles, strict=True)]


def _draw_line(axes: Axes, panel: Panel, series: Series) -> Artist:
    look = look_of(series.style or series.name, series.variant)
    x, y = [float(one) for one in series.x], _numbers(series.y)
    alone = panel.kind == "points" and not series.dashed
    many = not panel.marked or panel.longest > MOST_MARKED
    marked = alone or not (many or series.dashed)
    (line,) = axes.plot(
        x,
        y,
        color=look.colour,
        linewidth=1.0 if series.dashed or many else 1.3,
        linestyle="none" if alone else _dash(look, dashed=series.dashed),
        marker=_SIGNS[MARKERS[look.marker]] if marked else "none",
        markersize=5 if alone else 3.6,
        markeredgewidth=0,
        zorder=2 if series.dashed else 3,
    )
    if any(high is not None for high in series.high or ()):
        low, high = _numbers(series.low or ()), _numbers(series.high or ())
        if len(y) > MOST_WHISKERS:
            axes.fill_between(x, low, high, color=look.colour, alpha=0.18, linewidth=0)
        else:
            axes.errorbar(x, y, yerr=_arms(y, low, high), **_whiskers(look))
    return Line2D(
        [],
        [],
        color=line.get_color(),
        linestyle=line.get_linestyle() if alone else _dash(look, dashed=series.dashed),
        marker=line.get_marker(),
        markersize=line.get_markersize(),
        linewidth=line.get_linewidth(),
        markeredgewidth=0,
    )


def _draw_bars(axes: Axes, panel: Panel) -> list[Artist]:
    across = panel.kind in HORIZONTAL
    places = {name: place for place, name in enumerate(panel.categories)}
    grouped = panel.kind == "bars"
    width = 0.8 / max(1, len(panel.series)) if grouped else 0.7
    filled = dict.fromkeys(places, 0.0)  # up to where each bar is drawn
    handles: list[Artist] = []
    for index, series in enumerate(panel.series):
        look = look_of(series.style or series.name, series.variant)
        shift = width * (index - (len(panel.series) - 1) / 2) if grouped else 0.0
        names = [str(x) for x in series.x]
        at = [places[name] + shift for name in names]
        values = [0.0 if y is None or not isfinite(y) else y for y in series.y]
        base = [filled[name] if panel.kind in STACKED else 0.0 for name in names]
        style: dict[str, Any] = {
            "facecolor": look.colour,
            "hatch": _HATCHES[HATCHES[look.hatch]],
            "edgecolor": (1, 1, 1, 0.6),
            "linewidth": 0.5,
        }
        if across:
            axes.barh(at, values, width, left=base, **style)
        else:
            axes.bar(at, values, width, bottom=base, **style)
        _bar_whiskers(axes, series, at, across=across)
        for name, value in zip(names, values, strict=True):
            filled[name] = filled[name] + value if panel.kind in STACKED else value
        handles.append(Patch(**style))
    _bar_axes(axes, panel, filled)
    return handles


def _bar_whiskers(axes: Axes, series: Series, at: Sequence[float], *, across: bool) -> None:
    if not any(high is not None for high in series.high or ()):
        return
    values = _numbers(series.y)
    arms = _arms(values, _numbers(series.low or ()), _numbers(series.high or ()))
    axes.errorbar(
        values if across else at,
        at if across else values,
        xerr=arms if across else None,
        yerr=None if across else arms,
        fmt="none",
        ecolor=_INK,
        capsize=2,
        elinewidth=0.8,
    )


def _bar_axes(axes: Axes, panel: Panel, ends: dict[str, float]) -> None:
    across = panel.kind in HORIZONTAL
    names = [short(name, LONGEST_SHOWN if across else LONGEST_TICK) for name in panel.categories]
    if not across:
        every = -(-len(names) // 12)
        axes.set_xticks(range(0, len(names), every), names[::every])
        axes.set_xlabel(short(panel.x_label, LONGEST_SHOWN))
        axes.set_ylabel(short(panel.y_label, LONGEST_SHOWN))
        axes.grid(axis="y", color=_GRID, linewidth=0.6)
        return
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.45, -0.55)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(short(panel.y_label, LONGEST_SHOWN))
    axes.set_ylabel(short(panel.x_label, LONGEST_SHOWN))
    axes.grid(axis="x", color=_GRID, linewidth=0.6)
    highs = _highs(panel, ends, inf if panel.y_range is None else panel.y_range[1])
    largest = max(highs.values(), default=0.0)
    if largest > 0:
        axes.set_xlim(0, largest * 1.13)
    for place, (name, end) in enumerate(ends.items()):
        axes.annotate(
            _short(end),
            (highs[name], place),
            xytext=(3, 0),
            textcoords="offset points",
            va="center",
            fontsize=_TEXT_POINTS,
            color=_INK,
        )


def _highs(panel: Panel, ends: dict[str, float], cut: float) -> dict[str, float]:
    """Where each bar ends with its whisker, which may be cut."""
    highs = dict(ends)
    for series in panel.series:
        for name, high in zip(series.x, series.high or (), strict=False):
            if high is not None and isfinite(high):
                highs[str(name)] = max(highs[str(name)], min(high, cut))
    return highs


def _numeric_axes(axes: Axes, panel: Panel) -> None:
    axes.set_xlabel(short(panel.x_label, LONGEST_SHOWN))
    axes.set_ylabel(short(panel.y_label, LONGEST_SHOWN))
    axes.grid(color=_GRID, linewidth=0.6)
    if panel.kind == "points":
        axes.margins(x=0.1, y=0.12)
    plain = FuncFormatter(lambda value, _: f"{value:g}")
    if panel.x_logarithmic:
        axes.set_xscale("log")
    if panel.y_logarithmic:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(plain)
        axes.yaxis.set_major_locator(LogLocator(subs=panel.y_log_ticks))
        axes.yaxis.set_minor_locator(NullLocator())
    if panel.x_ticks:
        axes.xaxis.set_major_locator(FixedLocator(panel.x_ticks))
        axes.xaxis.set_minor_locator(NullLocator())
    if panel.x_tick_labels:
        axes.xaxis.set_major_formatter(FixedFormatter(panel.x_tick_labels))
    elif panel.x_ticks or panel.x_logarithmic:
        axes.xaxis.set_major_formatter(plain)
    if panel.x_from_zero and not panel.x_logarithmic and axes.get_xlim()[1] > 0:
        axes.set_xlim(left=0)
    values = [y for series in panel.series for y in series.y if y is not None and isfinite(y)]
    if panel.y_from_zero and not panel.y_logarithmic and values and min(values) >= 0:
        axes.set_ylim(0, max(axes.get_ylim()[1], 1.08 * max(values)) or 1)


def _short(value: float) -> str:
    """Three significant digits, without an exponent for everyday sizes."""
    for limit, decimals in ((100, 0), (10, 1), (1, 2)):
        if abs(value) >= limit:
            return f"{value:.{decimals}f}"
    return f"{value:.3g}"


def _numbers(values: Sequence[float | None]) -> list[float]:
    return [nan if value is None or not isfinite(value) else value for value in values]


def _arms(y: Sequence[float], low: Sequence[float], high: Sequence[float]) -> list[list[float]]:
    """Lengths of the whiskers; none where there is no interval."""
    down = [max(0.0, one - end) if isfinite(end) else 0.0 for one, end in zip(y, low, strict=True)]
    up = [max(0.0, end - one) if isfinite(end) else 0.0 for one, end in zip(y, high, strict=True)]
    return [down, up]


def _whiskers(look: Look) -> dict[str, Any]:
    return {
        "ecolor": look.colour,
        "fmt": "none",
        "capsize": 1.8,
        "elinewidth": 0.7,
        "capthick": 0.7,
    }


def _dash(look: Look, *, dashed: bool) -> Any:
    if dashed:
        return (0, (4, 3))
    if DASHES[look.dash] == "solid":
        return "solid"
    return (0, tuple(float(part.removesuffix("px")) for part in DASHES[look.dash].split(",")))
