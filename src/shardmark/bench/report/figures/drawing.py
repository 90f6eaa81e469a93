"""Draws each panel with Vega-Lite as SVG, for the page and for image files.

Colours of text and rules are `currentColor`, so that one drawing suits light pages, dark pages and
paper.  The SVG has no script, no style, no identifier and no link.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape, unescape
from math import ceil, floor, isfinite
from pathlib import Path
from typing import Any, NamedTuple

from shardmark.base.results.files import write_files
from shardmark.base.system.extras import require
from shardmark.bench.report.figures.chart import Figure, Panel, Series, log_ticks

WIDTH, HEIGHT = 420, 290
"""Size of a panel in pixels: a phone shows one in a line, a desktop two or three."""
BAR_PIXELS, TWO_LINES_PIXELS = 22, 32
LABEL_PIXELS = 180
"""Width of the longest line of a bar's name; the pointer shows the full name."""
LONGEST_LINE = 22
"""Longest name of a bar, in characters, on one line; a longer one breaks at its last comma."""
WIDE_LETTER_PIXELS = 7.6
FEW_TICKS = 12
"""Largest number of whole-numbered ticks that are set here; the library chooses beyond."""
MOST_MARKED = 20
"""Longest line, in points, whose points have markers."""
MOST_WHISKERS = 12
"""Longest line, in points, that has whiskers; a longer one has a band."""
VEGA_LITE = "6.4"
PIXELS_A_PIXEL = 2
"""Resolution of the PNG, which is high enough for print."""
REFERENCE = "reference"
"""Style of lines that were not measured: ideal scaling, the Pareto front."""
_FONT = "Arial, 'Liberation Sans', Helvetica, sans-serif"
_FONT_SIZE, _TEXT_SIZE = 12, 11
_LETTER_PIXELS = 6.2
_FAINT = 0.25
_OPACITY = {"field": "opacity", "type": "quantitative", "scale": None, "legend": None}
_CONFIG = {
    "background": "transparent",
    "font": _FONT,
    "view": {"stroke": None},
    "axis": {
        **{f"{part}Color": "currentColor" for part in ("label", "title", "domain", "tick", "grid")},
        "gridOpacity": 0.14,
        "labelFontSize": _FONT_SIZE,
        "titleFontSize": _FONT_SIZE,
        "titleFontWeight": "normal",
        "labelOverlap": True,
        "labelSeparation": 8,  # the font of a reader may be wider than the one that Vega measures
        "labelLimit": LABEL_PIXELS,
    },
    "text": {"color": "currentColor", "fontSize": _TEXT_SIZE},
    "title": {
        "anchor": "start",
        "color": "currentColor",
        "fontSize": _FONT_SIZE,
        "fontWeight": "normal",
        "frame": "bounds",
        "offset": 8,
    },
}
_LONG_NUMBER = 1e6
"""An axis that ends here has powers of ten."""
_NUMBER_LETTERS = 6
"""Length of most numbers, so that the ends of a shared axis do not depend on them."""
_BESIDE_POINTS = {
    "type": "label",
    "size": {"signal": "[width, height]"},
    "anchor": [
        *("top-left", "left", "top", "right", "bottom", "bottom-right", "top-right", "bottom-left"),
        *("top", "bottom", "top", "bottom"),
    ],
    "offset": [3, 8, 8, 8, 8, 4, 4, 4, 22, 22, 38, 38],
}
"""Vega places a text so that it covers no point and no other text, or omits it."""
_BROKEN_NAME = (
    f"length(datum.label) > {LONGEST_LINE}"
    r" ? split(replace(datum.label, regexp(', ([^,]*)$'), ',\\n$1'), '\\n') : datum.label"
)
"""Vega's expression for a name in one or two lines."""
Spec = dict[str, Any]


class Look(NamedTuple):
    """The look of a series: lines differ in colour, dash and marker, bars in name and colour."""

    colour: str
    """`#rrggbb`, with a contrast of at least 3:1 on white and on #111111."""
    dash: int
    """Index into `DASHES`."""
    marker: int
    """Index into `MARKERS`."""


DASHES = ((1, 0), (5, 2), (2, 2), (8, 2, 2, 2), (8, 2, 2, 2, 2, 2), (10, 3))
"""Lengths of dashes and gaps in pixels."""
MARKERS = {
    "circle": "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0",
    "square": "M-3.5-3.5h7v7h-7Z",
    "diamond": "M0-5L4 0L0 5L-4 0Z",
    "triangle-up": "M0-4.5L4.5 3.5H-4.5Z",
    "triangle-down": "M0 4.5L4.5-3.5H-4.5Z",
    "cross": "M-1.5-4.5h3v3h3v3h-3v3h-3v-3h-3v-3h3Z",
    "triangle-right": "M4.5 0L-3.5 4.5V-4.5Z",
    "triangle-left": "M-4.5 0L3.5 4.5V-4.5Z",
}
"""Vega's name of each marker, and its path about the origin for legends."""
_COLOURS = ("#0072b2", "#d55e00", "#00a37a", "#cf66ae", "#b58900", "#7350d6", "#4d8b00", "#bc3f4c")
_GREY = "#808080"
_PARTS = {
    **dict.fromkeys(("parameters", "computing"), _COLOURS[0]),
    **dict.fromkeys(("gradients", "communication"), _COLOURS[1]),
    **dict.fromkeys(("optimizer state", "update"), _COLOURS[2]),
    "own code": _COLOURS[3],
    "input": _COLOURS[4],
    "late rank": _COLOURS[5],
    **dict.fromkeys(("pipeline", "logging"), _COLOURS[6]),
    "checkpoint": _COLOURS[7],
    **dict.fromkeys(("activations and other", "slow steps", "evaluation"), _GREY),
}
"""Colour of each part of a rank's memory or of a step."""


def look_of(style: int | str) -> Look:
    """Return the look of a strategy, by its number, or of a reference or a part, by its name."""
    if isinstance(style, int):
        # A second row of the same colours has other dashes, and takes its markers from elsewhere.
        marker = style + 3 * (style // len(_COLOURS))
        return Look(_COLOURS[style % len(_COLOURS)], style % len(DASHES), marker % len(MARKERS))
    return Look(_GREY, 1, 0) if style == REFERENCE else Look(_PARTS[style], 0, 0)


def plain_text(text: str) -> str:
    """Return the text on one line, without the characters that vl-convert cannot take.

    A NUL makes it abort the process, and it may cut a long label within a pair of surrogates.
    """
    line = " ".join(text.split())
    return "".join(
        sign if sign.isprintable() and sign <= "\uffff" else "\N{REPLACEMENT CHARACTER}"
        for sign in line
    )


def short(text: str, longest: int) -> str:
    """Return the text on one line, cut to `longest` characters."""
    line = plain_text(text)
    return line if len(line) <= longest else f"{line[: longest - 1].rstrip()}…"


@dataclass(frozen=True, slots=True)
class Drawing:
    """A figure with the SVG of each of its panels."""

    figure: Figure
    panels: tuple[str, ...]


def draw(figures: Sequence[Figure]) -> list[Drawing]:
    """Draw every panel once, `WIDTH` pixels wide.  The SVG loads no other file."""
    require("vl_convert", needed_for="figures")
    from vl_convert import vega_to_svg, vegalite_to_vega

    def svg(panel: Panel) -> str:
        vega = vegalite_to_vega(panel_spec(panel), vl_version=VEGA_LITE)
        for mark in vega["marks"]:
            if mark["type"] == "text" and panel.kind == "points":
                mark |= {"transform": [_BESIDE_POINTS], "clip": True}  # none moves the title
        text = vega_to_svg(vega, allowed_base_urls=[])
        return _tagged(re.sub(r'<defs>.*?</defs>| clip-path="[^"]*"', "", text), panel)

    return [Drawing(figure, tuple(map(svg, figure.panels))) for figure in figures]


def panel_spec(panel: Panel) -> Spec:
    """Return the panel's specification for Vega-Lite 6 (vega.github.io/vega-lite)."""
    bars = panel.kind in ("bars", "stacked")
    breaks = any(len(name) > LONGEST_LINE for name in panel.categories)
    bar_pixels = TWO_LINES_PIXELS if breaks else BAR_PIXELS
    return {
        "width": WIDTH,
        "height": bar_pixels * len(panel.categories) + 66 if bars else HEIGHT,
        "autosize": {"type": "fit", "contains": "padding"},
        "padding": {"left": 4, "right": 10, "top": 4, "bottom": 4},
        "layer": _bar_layers(panel) if bars else _line_layers(panel),
        "config": _CONFIG,
        **({} if bars else {"title": plain_text(panel.y_label)}),
    }


def _tagged(svg: str, panel: Panel) -> str:
    """Add series and rows to each mark, beside its label, for the page's filters."""
    tags = {}
    for series in panel.series:
        name = plain_text(series.name)
        labels = [(record["label"], record["rows"]) for record in _records(panel, series)]
        if panel.kind == "line" or series.dashed:
            labels.append((name, series.rows))
        for label, rows in labels:
            row_numbers = " ".join(map(str, sorted(set(rows))))
            tags[label] = f' data-series="{escape(name)}" data-rows="{row_numbers}"'
    return re.sub(
        r'aria-label="([^"]*)"', lambda match: match[0] + tags.get(unescape(match[1]), ""), svg
    )


def _number(value: float | None) -> str:
    if value is None or not isfinite(value):
        return "not known"
    return f"{value:,.0f}" if 10_000 <= abs(value) < 1e15 else f"{value:.4g}"


def _records(panel: Panel, series: Series) -> list[Spec]:
    """Return a record for each value, cut at the ends of the axis; an undrawable `y` is None."""
    look = look_of(series.style)
    bottom, top = panel.y_range or (float("-inf"), float("inf"))
    lows, highs = (ends or (None,) * len(series.y) for ends in (series.low, series.high))
    records = []
    for index, (x, y) in enumerate(zip(series.x, series.y, strict=True)):
        low, high = lows[index], highs[index]
        usable = y is not None and isfinite(y) and (not panel.y_logarithmic or y > 0)
        record: Spec = {
            "name": plain_text(series.name),
            "x": plain_text(x) if isinstance(x, str) else x,
            "y": min(y, top) if usable and y is not None else None,
            "label": _label(panel, series, index, low, high),
            "rows": series.rows[index : index + 1] if len(series.rows) > 1 else series.rows,
            "colour": look.colour,
            "shape": list(MARKERS)[look.marker],
            "dash": _dash(look, series),
            "line": plain_text(f"{series.name}, readings" if series.raw else series.name),
            "line_opacity": _FAINT if series.raw else 1,
            "opacity": _FAINT if any(series.faint[index : index + 1] or series.faint[:1]) else 1,
        }
        if usable and low is not None and high is not None and isfinite(high - low):
            ends = (min(max(end, bottom), top) for end in (low, high))
            record |= dict(zip(("low", "high"), ends, strict=True))
        records.append(record)
    return records


def _label(panel: Panel, series: Series, index: int, low: float | None, high: float | None) -> str:
    """Write a value in words, such as `ddp, 2 ranks: 812 samples/s (790 to 830)`."""
    x = series.x[index]
    if isinstance(x, str):
        place = f"{x}, {series.name}" if panel.kind == "stacked" else x
    else:
        name = series.places[index] if series.places else series.name
        at = f"{_number(float(x))} {panel.x_unit}"
        place = f"{name}, {at if panel.x_unit else f'{panel.x_label.lower()} {at.rstrip()}'}"
    interval = "" if low is None or high is None else f" ({_number(low)} to {_number(high)})"
    value = f"{_number(series.y[index])} {panel.y_unit}".rstrip()
    return plain_text(f"{place}: {value}{interval}")


def _dash(look: Look, series: Series) -> tuple[int, ...]:
    return (5, 4) if series.dashed else DASHES[look.dash]


def _field(name: str) -> Spec:
    """Return a channel that uses the field's values unchanged."""
    return {"field": name, "type": "nominal", "scale": None, "legend": None}


def _layer(records: Sequence[Spec], mark: Spec, **encoding: Spec) -> Spec:
    """Return a layer whose marks have labels, by which the page names and filters them."""
    label = {"field": "label", "type": "nominal"}
    return {
        "data": {"values": records},
        "mark": mark,
        "encoding": {**encoding, "description": label},
    }


def _bar_layers(panel: Panel) -> list[Spec]:
    """Return horizontal bars in the panel's order; single ones have interval and value."""
    records = [record for series in panel.series for record in _records(panel, series)]
    drawn = [record for record in records if record["y"] is not None]
    order = [plain_text(name) for name in panel.categories]
    # The font of a reader may be wider than the font that Vega measures.
    lines = [name.rsplit(", ", 1) if len(name) > LONGEST_LINE else [name] for name in order]
    longest = max((len(line) for name in lines for line in name), default=1)
    names_pixels = min(1.1 * LABEL_PIXELS, longest * WIDE_LETTER_PIXELS)
    category = {
        "field": "x",
        "type": "nominal",
        "sort": order,
        "axis": {
            "title": None,
            "ticks": False,
            "domain": False,
            "labelPadding": 6,
            "minExtent": names_pixels,
            "labelExpr": _BROKEN_NAME,
            "labelLineHeight": 13,
            "labelLimit": LABEL_PIXELS / 1.1,
        },
        "scale": {"paddingInner": 0.3, "paddingOuter": 0.15},
    }
    value: Spec = {
        "field": "y",
        "type": "quantitative",
        "axis": {"title": plain_text(panel.y_label), "tickCount": 5, "domain": False},
    }
    bar = {"type": "bar", "stroke": None}
    if panel.kind == "stacked":
        places = {plain_text(series.name): place for place, series in enumerate(panel.series)}
        stacked = [{**record, "order": places[record["name"]]} for record in drawn]
        order_by = {"field": "order", "type": "quantitative"}
        value["stack"] = "zero"
        looks = {"color": _field("colour"), "fillOpacity": _OPACITY}
        return [_layer(stacked, bar, y=category, x=value, order=order_by, **looks)]
    ends = [
        {
            **record,
            "end": max(record["y"], record.get("high", 0)),
            "text": _number(float(f"{record['y']:.3g}")),
        }
        for record in drawn
    ]
    shared = panel.y_bounds[1:] if panel.y_bounds else ()
    largest = max((*(record["end"] for record in ends), *shared), default=1.0)
    letters = max((len(record["text"]) for record in ends), default=1)
    room = max(letters, _NUMBER_LETTERS if shared else 1) * _LETTER_PIXELS + 12
    value["scale"] = {
        "domain": [0, largest * (1 + room / max(60.0, WIDTH - names_pixels - 30 - room))]
    }
    text = {"type": "text", "align": "left", "baseline": "middle", "dx": 5}
    return [
        _layer(drawn, bar, y=category, x=value, color=_field("colour"), fillOpacity=_OPACITY),
        *_whiskers(drawn, {"y": category}, "x", value),
        _layer(ends, text, y=category, x={**value, "field": "end"}, text=_field("text")),
    ]


def _whiskers(records: Sequence[Spec], place: Spec, axis: str, value: Spec) -> list[Spec]:
    ends = [record for record in records if "low" in record]
    channels = {axis: {**value, "field": "low"}, f"{axis}2": {"field": "high"}}
    mark = {"type": "rule", "strokeWidth": 1.5, "color": "currentColor", "opacity": 0.75}
    return [_layer(ends, {**mark, "aria": True}, **place, **channels)] if ends else []


def _line_layers(panel: Panel) -> list[Spec]:
    """Return lines with bands or whiskers, or points with their texts."""
    measured = [series for series in panel.series if not series.dashed]
    x, y = _x_channel(panel), _y_channel(panel)
    points = [record for series in measured for record in _records(panel, series)]
    drawn = [record for record in points if record["y"] is not None]
    lines = [
        {**record, "label": record["name"], "index": index}
        for series in panel.series
        if panel.kind == "line" or series.dashed
        for index, record in enumerate(_records(panel, series))
    ]
    of_series: Spec = {"detail": {"field": "line"}, "color": _field("colour")}
    if panel.kind == "line" and panel.longest > MOST_WHISKERS:
        named = [{**record, "label": record["name"]} for record in points]
        band = {"y": {**y, "field": "low"}, "y2": {"field": "high"}}
        layers = [_layer(named, {"type": "area", "opacity": 0.18}, x=x, **band, **of_series)]
    else:
        layers = _whiskers(drawn, {"x": x}, "y", y)
    if lines:
        order = {"field": "index", "type": "quantitative"}
        line = {"type": "line", "strokeWidth": 2}
        layers.append(
            _layer(
                lines,
                line,
                x=x,
                y=y,
                strokeDash=_field("dash"),
                opacity={**_OPACITY, "field": "line_opacity"},
                order=order,
                **of_series,
            )
        )
    if panel.kind == "points" or panel.longest <= MOST_MARKED:
        point = {"type": "point", "filled": True, "size": 55, "opacity": 1}
        colours = {"color": _field("colour"), "stroke": _field("colour"), "fillOpacity": _OPACITY}
        layers.append(_layer(drawn, point, x=x, y=y, shape=_field("shape"), **colours))
    if any(series.text for series in measured):
        written = [
            {**record, "text": short(text, 24)}
            for series in measured
            for record, text in zip(_records(panel, series), series.text or (), strict=False)
            if record["y"] is not None
        ]
        layers.append(_layer(written, {"type": "text"}, x=x, y=y, text=_field("text")))
    return layers


def _x_channel(panel: Panel) -> Spec:
    numbers = [float(x) for series in panel.series for x in series.x]
    axis: Spec = {"title": plain_text(panel.x_label), "tickCount": 6, "grid": False}
    scale: Spec = {"zero": panel.x_from_zero, "nice": panel.x_from_zero}
    low, high = min(numbers, default=0.0), max(numbers, default=1.0)
    if panel.x_logarithmic:
        scale = {"type": "log", "domain": [low / 1.15, high * 1.15], "nice": False}
        axis["values"] = log_ticks(low, high)
    elif not panel.x_from_zero:
        margin = 0.04 * (high - low) or 0.5
        scale["domain"] = [low - margin, high + margin]
    if panel.kind == "points" and panel.x_from_zero:
        scale["domain"] = [0, high * 1.08]
    if panel.x_whole:
        axis |= {"tickMinStep": 1, "format": "d"}
        if high - low <= FEW_TICKS:  # The library would label half epochs, too.
            axis["values"] = [*range(ceil(low), floor(high) + 1, ceil((high - low) / 6) or 1)]
    if panel.x_ticks:
        axis["values"] = list(panel.x_ticks)
    return {"field": "x", "type": "quantitative", "axis": axis, "scale": scale}


def _y_channel(panel: Panel) -> Spec:
    axis: Spec = {"title": None, "tickCount": 5, "domain": False, "ticks": False}
    scale: Spec = {"zero": panel.y_from_zero, "nice": panel.y_range is None}
    if panel.y_range is not None:
        scale |= {"domain": list(panel.y_range), "zero": False}
    if panel.y_logarithmic:
        scale |= {"type": "log", "zero": False}
        if panel.y_range is not None:
            form = "~e" if panel.y_range[1] >= _LONG_NUMBER else "~r"
            axis |= {"values": log_ticks(*panel.y_range), "format": form}
    return {"field": "y", "type": "quantitative", "axis": axis, "scale": scale}


# Files: the panels of a figure on white paper, with title, warning, one legend and caption.

_GAP, _TITLE, _LEGEND_LINE = 16, 22, 20
_WARNING = "#a4262c"


def figure_svg(drawing: Drawing) -> str:
    """Return title, warning, all panels, the legend and the caption in one drawing."""
    figure = drawing.figure
    columns = min(len(figure.panels), 2)
    width = _GAP + columns * (WIDTH + _GAP)
    title = _TITLE if any(panel.title for panel in figure.panels) else 0
    pairs = list(zip(figure.panels, drawing.panels, strict=True))
    parts, y = [_text(_GAP, _GAP + 12, plain_text(figure.title), weight=700)], _GAP + _TITLE
    for line in _wrapped(figure.warning, width):
        parts.append(_text(_GAP, y + 12, line, weight=700, colour=_WARNING))
        y += _LEGEND_LINE
    for first in range(0, len(pairs), columns):
        row = pairs[first : first + columns]
        for column, (panel, svg) in enumerate(row):
            x = _GAP + column * (WIDTH + _GAP)
            parts.append(_text(x, y + 12, short(panel.title, 60), weight=600))
            parts.append(svg.replace("<svg ", f'<svg x="{x}" y="{y + title}" ', 1))
        y += max(_height_of(svg) for _, svg in row) + _GAP + title
    x = _GAP
    for name, series in figure.legend.items():
        text = short(name, 60)
        entry_width = round(len(text) * _LETTER_PIXELS) + 44
        if x > _GAP and x + entry_width > width:
            x, y = _GAP, y + _LEGEND_LINE
        parts.append(f'<g transform="translate({x},{y})">{swatch(series, figure)}</g>')
        parts.append(_text(x + 30, y + 10, text))
        x += entry_width
    y += (_LEGEND_LINE if figure.legend else 0) + 4
    for line in _wrapped(figure.caption, width):
        parts.append(_text(_GAP, y + 12, line))
        y += _LEGEND_LINE
    height = y + 4
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
        f' width="{width}" height="{height}" viewBox="0 0 {width} {height}" color="#1b1c1e">'
        f'<rect width="100%" height="100%" fill="#fff"/>{"".join(parts)}</svg>\n'
    )


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(plain_text(text), round((width - 2 * _GAP) / _LETTER_PIXELS))


def _height_of(svg: str) -> int:
    height = re.search(r'^<svg [^>]*?height="([\d.]+)"', svg)
    assert height is not None, "Vega states the height"
    return round(float(height[1]))


def swatch(series: Series, figure: Figure) -> str:
    """Return the series' symbol in a legend, 24 x 14 pixels."""
    look = look_of(series.style)
    kind = figure.panels[0].kind
    if kind == "stacked":
        return f'<rect x="6" y="1" width="12" height="12" fill="{look.colour}"/>'
    path = list(MARKERS.values())[look.marker]
    sign = f'<path transform="translate(12 7)" d="{path}" fill="{look.colour}"/>'
    if kind == "points" and not series.dashed:
        return sign
    dash = " ".join(map(str, _dash(look, series)))
    line = f'<path d="M0 7H24" stroke="{look.colour}" stroke-width="2" stroke-dasharray="{dash}"/>'
    return line if series.dashed else line + sign


def _text(x: float, y: float, text: str, weight: int = 400, colour: str = "currentColor") -> str:
    return (
        f'<text x="{x}" y="{y}" font-family="{escape(_FONT)}" font-size="{_FONT_SIZE}px"'
        f' font-weight="{weight}" fill="{colour}">{escape(text)}</text>'
    )


def write_images(drawings: Sequence[Drawing], folder: Path) -> list[Path]:
    """Write NAME.png and NAME.svg of each figure; the same figures give the same bytes.

    Raises `StorageError` if the folder cannot be written.
    """
    from vl_convert import svg_to_png

    contents: dict[Path, bytes] = {}
    for drawing in drawings:
        svg = figure_svg(drawing)
        contents[folder / f"{drawing.figure.name}.png"] = svg_to_png(svg, scale=PIXELS_A_PIXEL)
        contents[folder / f"{drawing.figure.name}.svg"] = svg.encode()
    write_files(contents)
    return [*contents]
