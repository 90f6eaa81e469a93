"""A figure as plotly's JSON, written as plain data: importing plotly takes a second.

Nothing in it depends on the theme: backgrounds are transparent, and the page sets the colours of
text and grid (`font.color`, `xaxis*.gridcolor`, `yaxis*.gridcolor`).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import Any

from shardmark.report.figures.figure import HORIZONTAL, Figure, Panel, Series
from shardmark.report.figures.looks import (
    DASHES,
    HATCHES,
    MARKERS,
    MOST_MARKED,
    MOST_WHISKERS,
    Look,
    look_of,
)
from shardmark.report.figures.plotly_layout import layout_of, shown_text

_TEXT_PLACES = ("top right", "bottom right", "top left", "bottom left")
"""Of the texts beside points, by marker, so that near points' texts part."""


def plotly_figure(figure: Figure, *, columns: int | None = None) -> dict[str, Any]:
    """`{"data": [...], "layout": {...}}`, strict JSON; responsive in width, fixed in height.

    The page gives the element the layout's height.  `columns` overrides how many panels stand
    beside each other: the layout of one column, with the same data, is for a narrow screen.
    """
    rows_of_columns = max(1, columns or figure.columns)
    data: list[dict[str, Any]] = []
    named: set[str] = set()
    for number, panel in enumerate(figure.panels, start=1):
        for trace in _traces(panel, "" if number == 1 else str(number)):
            if trace.get("showlegend") is None:
                trace["showlegend"] = trace["legendgroup"] not in named
                named.add(trace["legendgroup"])
            data.append(trace)
    return {"data": data, "layout": layout_of(figure, rows_of_columns, sorted(named))}


def _traces(panel: Panel, end: str) -> list[dict[str, Any]]:
    traces = []
    for series in panel.series:
        look = look_of(series.style or series.name, series.variant)
        bars = panel.kind not in ("line", "points")
        trace = _bars(panel, series, look) if bars else _line(panel, series, look)
        name = shown_text(series.name)
        common = {"name": name, "legendgroup": name, "xaxis": f"x{end}", "yaxis": f"y{end}"}
        if panel.kind == "line" and len(series.y) > MOST_WHISKERS and _has_interval(series):
            traces.append({**_band(series, look), **common})
        traces.append({**trace, **common})
    return traces


def _line(panel: Panel, series: Series, look: Look) -> dict[str, Any]:
    marked = panel.marked and panel.longest <= MOST_MARKED and not series.dashed
    mode = "lines+markers" if marked else "lines"
    if panel.kind == "points" and not series.dashed:
        mode = "markers" if series.text is None else "markers+text"
    trace: dict[str, Any] = {
        "type": "scatter",
        "mode": mode,
        "x": list(series.x),
        "y": _values(series.y),
        "line": {
            "color": look.colour,
            "width": 1.5 if series.dashed else 2,
            "dash": "dash" if series.dashed else DASHES[look.dash],
        },
        "marker": {"color": look.colour, "symbol": MARKERS[look.marker], "size": 8},
        **_hover(panel, series),
    }
    if series.text is not None:
        trace |= {
            "text": [shown_text(one) for one in series.text],
            "textposition": _TEXT_PLACES[look.marker % len(_TEXT_PLACES)],
        }
    if len(series.y) <= MOST_WHISKERS and _has_interval(series):
        trace["error_y"] = _whiskers(series, look)
    return trace


def _bars(panel: Panel, series: Series, look: Look) -> dict[str, Any]:
    categories, values = [shown_text(str(x)) for x in series.x], _values(series.y)
    across = panel.kind in HORIZONTAL
    trace: dict[str, Any] = {
        "type": "bar",
        "orientation": "h" if across else "v",
        "x": values if across else categories,
        "y": categories if across else values,
        "marker": _fill(look, translucent=_has_interval(series)),
        **_hover(panel, series),
    }
    if _has_interval(series):
        trace["error_x" if across else "error_y"] = _whiskers(series, look)
    return trace


def _fill(look: Look, *, translucent: bool) -> dict[str, Any]:
    """A bar with whiskers has a strong border instead, so that they can be seen within it."""
    pattern = {
        "shape": HATCHES[look.hatch],
        "fillmode": "overlay",
        "fgcolor": look.colour if translucent else "#ffffff",
        "fgopacity": 0.55,
        "size": 7,
        "solidity": 0.2,
    }
    if translucent:
        border = {"color": look.colour, "width": 1.5}
        return {"color": _faint(look, 0.4), "line": border, "pattern": pattern}
    return {"color": look.colour, "pattern": pattern}


def _faint(look: Look, opacity: float) -> str:
    red, green, blue = (int(look.colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{opacity:g})"


def _band(series: Series, look: Look) -> dict[str, Any]:
    """The area between the ends of the intervals."""
    ends = [
        (x, low, high)
        for x, low, high in zip(series.x, series.low or (), series.high or (), strict=True)
        if low is not None and high is not None
    ]
    return {
        "type": "scatter",
        "mode": "lines",
        "x": [x for x, _, _ in ends] + [x for x, _, _ in reversed(ends)],
        "y": [high for _, _, high in ends] + [low for _, low, _ in reversed(ends)],
        "fill": "toself",
        "fillcolor": _faint(look, 0.18),
        "line": {"width": 0},
        "hoverinfo": "skip",
        "showlegend": False,
    }


def _whiskers(series: Series, look: Look) -> dict[str, Any]:
    assert series.low is not None, "only a series with intervals has whiskers"
    assert series.high is not None, "only a series with intervals has whiskers"
    rows = list(zip(series.y, series.low, series.high, strict=True))
    return {
        "type": "data",
        "symmetric": False,
        "array": [0 if y is None or high is None else high - y for y, _, high in rows],
        "arrayminus": [0 if y is None or low is None else y - low for y, low, _ in rows],
        "color": look.colour,
        "thickness": 1.3,
        "width": 3,
    }


def _hover(panel: Panel, series: Series) -> dict[str, Any]:
    """Name, place, value with its unit, and the interval where every point has one."""
    across = panel.kind in HORIZONTAL
    x_sign, y_sign = ("y", "x") if across else ("x", "y")
    numeric = panel.kind in ("line", "points")
    place = f"%{{{x_sign}{':.5~r' if numeric else ''}}}"
    if numeric:
        place = f"{shown_text(panel.x_label)}: {place}"
    lines = [
        "<b>%{fullData.name}</b>",
        place,
        f"%{{{y_sign}:.4~r}} {shown_text(panel.y_unit)}".rstrip(),
    ]
    found: dict[str, Any] = {}
    if _has_interval(series) and None not in (*(series.low or ()), *(series.high or ())):
        found["customdata"] = list(map(list, zip(series.low or (), series.high or (), strict=True)))
        lines.append("95 %: %{customdata[0]:.4~r} to %{customdata[1]:.4~r}")
    if series.text is not None:
        lines.insert(1, "%{text}")
    return found | {"hovertemplate": "<br>".join(lines) + "<extra></extra>"}


def _has_interval(series: Series) -> bool:
    return any(high is not None for high in series.high or ())


def _values(values: Sequence[float | None]) -> list[float | None]:
    return [None if value is None or not isfinite(value) else value for value in values]
