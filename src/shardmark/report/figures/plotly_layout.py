"""Where plotly puts panels, titles and legend; heights in pixels, widths as the page gives them."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from math import ceil, log10
from typing import Any

from shardmark.report.figures.figure import HORIZONTAL, STACKED, Figure, Panel
from shardmark.report.figures.looks import plain_text

_PANEL_PIXELS = 270
_BAR_PIXELS = 24
_TITLE_PIXELS = 30
_AXIS_PIXELS = 56
_LEGEND_ROW_PIXELS = 22
_WIDTH_PIXELS = 760
"""Assumed only where the legend's number of lines is guessed."""
_MARGIN_PIXELS = {"l": 56, "r": 16}
_COLUMN_GAP = 0.11
_MOST_TICKS = 10


def layout_of(figure: Figure, columns: int, names: Sequence[str]) -> dict[str, Any]:
    rows = [figure.panels[i : i + columns] for i in range(0, len(figure.panels), columns)]
    heights = [max(map(_pixels, row)) for row in rows]
    titled = any(panel.title for panel in figure.panels)
    gap = _AXIS_PIXELS + (_TITLE_PIXELS if titled else 0)
    plotted = sum(heights) + gap * (len(rows) - 1)
    narrow = _WIDTH_PIXELS if columns > 1 or len(figure.panels) == 1 else _WIDTH_PIXELS / 2
    entries = sum(7 * len(name) + 60 for name in names)
    legend = _LEGEND_ROW_PIXELS * ceil(entries / narrow) + 8
    top, bottom = (_TITLE_PIXELS if titled else 10), _AXIS_PIXELS + legend
    layout: dict[str, Any] = {
        "autosize": True,
        "height": round(plotted + top + bottom),
        "margin": {**_MARGIN_PIXELS, "t": top, "b": bottom},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "hovermode": "closest",
        "barmode": _bar_mode(figure.panels),
        "bargap": 0.25,
        "legend": {
            "orientation": "h",
            "x": 0,
            "xanchor": "left",
            "y": -_AXIS_PIXELS / plotted,
            "yanchor": "top",
        },
        "annotations": [],
    }
    above = 0.0
    for row, height in zip(rows, heights, strict=True):
        domain = [max(0.0, 1 - (above + height) / plotted), 1 - above / plotted]
        for column, panel in enumerate(row):
            number = rows.index(row) * columns + column + 1
            across = _across(column, min(columns, len(figure.panels)))
            _place(layout, figure, number, across, domain)
            if panel.title:
                layout["annotations"].append(_title(panel.title, across[0], domain[1]))
        above += height + gap
    return layout


def _pixels(panel: Panel) -> int:
    if panel.kind not in HORIZONTAL:
        return _PANEL_PIXELS
    return _BAR_PIXELS * max(2, len(panel.categories)) + 20


def _across(column: int, columns: int) -> list[float]:
    width = (1 - _COLUMN_GAP * (columns - 1)) / columns
    start = column * (width + _COLUMN_GAP)
    return [start, min(1.0, start + width)]


def _bar_mode(panels: Sequence[Panel]) -> str:
    kinds = {panel.kind for panel in panels}
    if kinds & set(STACKED):
        return "stack"
    return "group" if "bars" in kinds else "overlay"


def _place(
    layout: dict[str, Any],
    figure: Figure,
    number: int,
    across: list[float],
    down: list[float],
) -> None:
    """Add the axes of one panel."""
    panel = figure.panels[number - 1]
    end = "" if number == 1 else str(number)
    across_axis, down_axis = _x_axis(panel), _y_axis(panel)
    if panel.kind in HORIZONTAL:
        across_axis, down_axis = down_axis, across_axis
        down_axis["autorange"] = "reversed"
    first = _first_alike(figure, panel)
    if figure.shared_y and first != number and panel.kind not in HORIZONTAL:
        down_axis["matches"] = f"y{'' if first == 1 else first}"
    layout[f"xaxis{end}"] = {**across_axis, "domain": across, "anchor": f"y{end}"}
    layout[f"yaxis{end}"] = {**down_axis, "domain": down, "anchor": f"x{end}"}


def _first_alike(figure: Figure, panel: Panel) -> int:
    labels = [one.y_label for one in figure.panels]
    return labels.index(panel.y_label) + 1


def _x_axis(panel: Panel) -> dict[str, Any]:
    axis = _axis(panel.x_label, logarithmic=panel.x_logarithmic, from_zero=panel.x_from_zero)
    if panel.kind not in ("line", "points"):
        categories = [shown_text(name) for name in panel.categories]
        axis |= {"type": "category", "categoryorder": "array", "categoryarray": categories}
        axis |= {"showgrid": False, "ticks": "outside", "ticklen": 5, "tickcolor": "rgba(0,0,0,0)"}
    if panel.x_ticks:
        axis |= {"tickmode": "array", "tickvals": list(panel.x_ticks)}
        axis["ticktext"] = [
            *(shown_text(label) for label in panel.x_tick_labels),
        ] or [f"{tick:g}" for tick in panel.x_ticks]
    return axis


def _y_axis(panel: Panel) -> dict[str, Any]:
    axis = _axis(panel.y_label, logarithmic=panel.y_logarithmic, from_zero=panel.y_from_zero)
    if panel.y_range is not None:
        ends = [log10(end) for end in panel.y_range] if panel.y_logarithmic else [*panel.y_range]
        axis["range"] = ends
        if panel.y_logarithmic:
            ticks = [sign * 10**power for power in range(-12, 13) for sign in panel.y_log_ticks]
            shown = [tick for tick in ticks if panel.y_range[0] <= tick <= panel.y_range[1]]
            if 2 <= len(shown) <= _MOST_TICKS:
                axis |= {"tickmode": "array", "tickvals": shown}
                axis["ticktext"] = [f"{tick:g}" for tick in shown]
    return axis


def _axis(label: str, *, logarithmic: bool, from_zero: bool) -> dict[str, Any]:
    axis: dict[str, Any] = {
        "type": "log" if logarithmic else "linear",
        "automargin": True,
        "zeroline": False,
        "rangemode": "tozero" if from_zero and not logarithmic else "normal",
    }
    if label:
        axis["title"] = {"text": shown_text(label), "standoff": 8}
    return axis


def _title(text: str, x: float, y: float) -> dict[str, Any]:
    return {
        "text": f"<b>{shown_text(text)}</b>",
        "xref": "paper",
        "yref": "paper",
        "x": x,
        "y": y,
        "xanchor": "left",
        "yanchor": "bottom",
        "showarrow": False,
    }


def shown_text(text: str) -> str:
    """Plotly reads some tags and all entities: neither may come from a name."""
    return escape(plain_text(text), quote=False)
