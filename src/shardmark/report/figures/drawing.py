"""Draws each panel once, by Vega-Lite, as SVG: the page shows it, files put panels together.

Colours of text and rules are `currentColor`, so that one drawing serves light, dark and paper.  The
SVG has no script, no style, no identifier and no link.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from html import escape, unescape
from itertools import pairwise
from math import ceil, floor, isfinite, log
from pathlib import Path
from typing import Any, NamedTuple

from shardmark.report.figures.chart import Figure, Panel, Series, log_ticks
from shardmark.results.files import write_files

WIDTH, HEIGHT = 420, 290
"""Pixels of a panel: one fits a phone, two or three stand beside each other on a desk."""
BAR_PIXELS = 22
LABEL_PIXELS = 180
"""Of the longest name of a bar; the rest is left to the pointer."""
WIDE_LETTER_PIXELS = 7.6
FEW_TICKS = 12
"""Whole numbers between which the ticks are chosen here; of more the library chooses."""
MOST_MARKED = 20
"""Points of a panel's longest line that still get a marker each."""
MOST_WHISKERS = 12
"""Points of a line that get whiskers; more get a band."""
VEGA_LITE = "6.4"
PIXELS_A_PIXEL = 2
"""Of the PNG, so that it can be printed."""
REFERENCE = "reference"
"""Style of what nobody measured: ideal scaling, the border of a pareto front."""
_FONT = "Arial, 'Liberation Sans', Helvetica, sans-serif"
_FONT_SIZE, _TEXT_SIZE = 12, 11
_LETTER_PIXELS = 6.2
_PLOT = (WIDTH - 70, HEIGHT - 70)
"""About what axes leave of a panel; places of texts are chosen by it."""
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
Spec = dict[str, Any]


class Look(NamedTuple):
    """Colour is never the only channel: lines differ in dash and marker, bars have names."""

    colour: str
    """`#rrggbb`, with a contrast of at least 3:1 on white and on #111111."""
    dash: int
    """Index into `DASHES`."""
    marker: int
    """Index into `MARKERS`."""


DASHES = ((1, 0), (5, 2), (2, 2), (8, 2, 2, 2), (8, 2, 2, 2, 2, 2), (10, 3))
"""Pixels drawn and left out."""
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
"""Vega's name -> path about the origin, for legends."""
_COLOURS = ("#0072b2", "#d55e00", "#00a37a", "#cf66ae", "#b58900", "#7350d6", "#4d8b00", "#bc3f4c")
_STYLES = {
    "single": Look("#808080", 0, 0),
    "dp": Look("#b58900", 4, 5),
    "ddp": Look("#0072b2", 0, 1),
    "fsdp": Look("#d55e00", 0, 2),
    "fsdp-grad-op": Look("#bc3f4c", 1, 6),
    "fsdp-hybrid": Look("#9c6a2b", 3, 2),
    "zero-0": Look("#9c7bd0", 2, 1),
    "zero-1": Look("#a63a86", 3, 5),
    "zero-2": Look("#cf66ae", 1, 3),
    "zero-3": Look("#7350d6", 4, 6),
    "zro": Look("#2a8fbd", 5, 1),
    "fsdp1": Look("#c77f4a", 5, 2),
    "local-sgd": Look("#6b8e23", 0, 3),
    "diloco": Look("#8a8a00", 5, 3),
    "tp": Look("#d1477a", 2, 3),
    "fsdp-tp": Look("#a8703a", 4, 1),
    "pp": Look("#4f7cac", 1, 4),
    "ddp-pp": Look("#2f86c6", 3, 0),
    "fsdp-pp": Look("#cc6f2e", 2, 6),
    "fsdp-tp-pp": Look("#b0583f", 4, 3),
    "ulysses": Look("#3d8f8f", 5, 4),
    "fsdp-ulysses": Look("#a0522d", 5, 6),
    "ps-sync": Look("#007a5e", 3, 7),
    "ps-async": Look("#00a37a", 2, 4),
    "ps-bounded": Look("#4d8b00", 1, 7),
    # parts of a rank's memory
    "parameters": Look("#0072b2", 0, 0),
    "gradients": Look("#d55e00", 0, 0),
    "optimizer state": Look("#00a37a", 0, 0),
    "activations and other": Look("#808080", 0, 0),
    # parts of a step
    "data": Look("#b58900", 0, 0),
    "forward": Look("#0072b2", 0, 0),
    "backward": Look("#7350d6", 0, 0),
    "optimizer": Look("#00a37a", 0, 0),
    "exposed communication": Look("#d55e00", 0, 0),
    "rest": Look("#808080", 0, 0),
    REFERENCE: Look("#808080", 1, 0),
    # interfaces of all nodes, in order
    **{f"interface {n}": Look(colour, n % 6, n) for n, colour in enumerate(_COLOURS)},
}


def look_of(style: str, variant: int = 0) -> Look:
    """That of the style; one that is not known gets one by its name, the same in every run."""
    known = _STYLES.get(style)
    if known is None:
        number = int.from_bytes(sha256(style.encode(errors="replace")).digest()[:4])
        known = Look(_COLOURS[number % len(_COLOURS)], number // 8, number // 64)
    colour, dash, marker = known
    return Look(colour, (dash + variant) % len(DASHES), (marker + variant) % len(MARKERS))


def plain_text(text: str) -> str:
    """On one line, and without the characters that vl-convert cannot take.

    It aborts the process at a NUL, and where it cuts a long label it may cut a pair of surrogates.
    """
    line = " ".join(text.split())
    return "".join(
        sign if sign.isprintable() and sign <= "\uffff" else "\N{REPLACEMENT CHARACTER}"
        for sign in line
    )


def short(text: str, longest: int) -> str:
    """The same, cut where it is long."""
    line = plain_text(text)
    return line if len(line) <= longest else f"{line[: longest - 1].rstrip()}…"


@dataclass(frozen=True, slots=True)
class Drawing:
    """A figure with the SVG of each of its panels."""

    figure: Figure
    panels: tuple[str, ...]


def draw(figures: Sequence[Figure]) -> list[Drawing]:
    """Every panel once, `WIDTH` pixels wide.  Nothing is loaded for it."""
    from vl_convert import vegalite_to_svg

    def svg(panel: Panel) -> str:
        spec = panel_spec(panel)
        return _tagged(vegalite_to_svg(spec, vl_version=VEGA_LITE, allowed_base_urls=[]), panel)

    return [Drawing(figure, tuple(map(svg, figure.panels))) for figure in figures]


def panel_spec(panel: Panel) -> Spec:
    """The panel in Vega-Lite's grammar (vega.github.io/vega-lite, version 6)."""
    bars = panel.kind in ("bars", "stacked")
    return {
        "width": WIDTH,
        "height": BAR_PIXELS * len(panel.categories) + 66 if bars else HEIGHT,
        "autosize": {"type": "fit", "contains": "padding"},
        "padding": {"left": 4, "right": 10, "top": 4, "bottom": 4},
        "layer": _bar_layers(panel) if bars else _line_layers(panel),
        "config": _CONFIG,
        **({} if bars else {"title": plain_text(panel.y_label)}),
    }


def _tagged(svg: str, panel: Panel) -> str:
    """With the series and the rows of each mark beside its label: the page's filters read them."""
    tags = {}
    for series in panel.series:
        name = plain_text(series.name)
        labels = [(record["label"], record["rows"]) for record in _records(panel, series)]
        if panel.kind == "line" or series.dashed:
            labels.append((name, series.rows))
        for label, rows in labels:
            known = " ".join(map(str, sorted(set(rows))))
            tags[label] = f' data-series="{escape(name)}" data-rows="{known}"'
    return re.sub(
        r'aria-label="([^"]*)"', lambda found: found[0] + tags.get(unescape(found[1]), ""), svg
    )


def _number(value: float | None) -> str:
    if value is None or not isfinite(value):
        return "not known"
    return f"{value:,.0f}" if 10_000 <= abs(value) < 1e15 else f"{value:.4g}"


def _records(panel: Panel, series: Series) -> list[Spec]:
    """One for each value; `y` is None where it cannot be drawn, intervals end at the range."""
    look = look_of(series.style or series.name, series.variant)
    bottom, top = panel.y_range or (float("-inf"), float("inf"))
    lows, highs = (ends or (None,) * len(series.y) for ends in (series.low, series.high))
    records = []
    for index, (x, y) in enumerate(zip(series.x, series.y, strict=True)):
        low, high = lows[index], highs[index]
        usable = y is not None and isfinite(y) and (not panel.y_logarithmic or y > 0)
        record: Spec = {
            "name": plain_text(series.name),
            "x": plain_text(x) if isinstance(x, str) else x,
            "y": y if usable else None,
            "label": _label(panel, series, index, low, high),
            "rows": series.rows[index : index + 1] if len(series.rows) > 1 else series.rows,
            "colour": look.colour,
            "shape": list(MARKERS)[look.marker],
            "dash": _dash(look, series),
            "opacity": _FAINT if any(series.faint[index : index + 1] or series.faint[:1]) else 1,
        }
        if usable and low is not None and high is not None and isfinite(high - low):
            record |= {"low": max(low, bottom), "high": min(high, top)}
        records.append(record)
    return records


def _label(panel: Panel, series: Series, index: int, low: float | None, high: float | None) -> str:
    """The value in words, such as `ddp, 2 ranks: 812 samples/s (790 to 830)`."""
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
    """A channel that takes the field as it is."""
    return {"field": name, "type": "nominal", "scale": None, "legend": None}


def _layer(records: Sequence[Spec], mark: Spec, **encoding: Spec) -> Spec:
    """Every mark has its label, by which the page names and filters it."""
    label = {"field": "label", "type": "nominal"}
    return {
        "data": {"values": records},
        "mark": mark,
        "encoding": {**encoding, "description": label},
    }


def _bar_layers(panel: Panel) -> list[Spec]:
    """Bars to the right, in the panel's order; single ones with interval and value."""
    records = [record for series in panel.series for record in _records(panel, series)]
    drawn = [record for record in records if record["y"] is not None]
    order = [plain_text(name) for name in panel.categories]
    # a reader's font may be wider than the one that Vega measures
    names_pixels = min(1.1 * LABEL_PIXELS, max(map(len, order), default=1) * WIDE_LETTER_PIXELS)
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
        return [_layer(stacked, bar, y=category, x=value, color=_field("colour"), order=order_by)]
    ends = [
        {**record, "end": max(record["y"], record.get("high", 0)), "text": _number(record["y"])}
        for record in drawn
    ]
    largest = max((record["end"] for record in ends), default=1.0)
    room = max((len(record["text"]) for record in ends), default=1) * _LETTER_PIXELS + 12
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
    """Lines with bands or whiskers, or points; what stands at a point is put beside it."""
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
    of_series: Spec = {"detail": {"field": "name"}, "color": _field("colour")}
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
            _layer(lines, line, x=x, y=y, strokeDash=_field("dash"), order=order, **of_series)
        )
    if panel.kind == "points" or panel.longest <= MOST_MARKED:
        point = {"type": "point", "filled": True, "size": 55, "opacity": 1}
        colours = {"color": _field("colour"), "stroke": _field("colour"), "fillOpacity": _OPACITY}
        layers.append(_layer(drawn, point, x=x, y=y, shape=_field("shape"), **colours))
    if any(series.text for series in measured):
        layers.append(_texts(panel, measured, x, y))
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
        if high - low <= FEW_TICKS:  # the library labels the half between two epochs, too
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
            axis |= {"values": log_ticks(*panel.y_range), "format": "~r"}
    return {"field": "y", "type": "quantitative", "axis": axis, "scale": scale}


# Texts beside points: each where it covers nothing, or not at all; the pointer names every point.

_MOVES = ((8, 0, "left"), (-8, 0, "right"), (0, -11, "center"), (0, 12, "center"),
          (7, -10, "left"), (7, 10, "left"), (-7, -10, "right"), (-7, 10, "right"))  # fmt: skip
Box = tuple[float, float, float, float]


def _texts(panel: Panel, measured: Sequence[Series], x: Spec, y: Spec) -> Spec:
    records = [
        ({**record, "text": short(text, 24)}, _pixels(record, x, y, panel))
        for series in measured
        for record, text in zip(_records(panel, series), series.text or (), strict=False)
        if record["y"] is not None
    ]
    taken: list[Box] = [(left - 5, top - 5, left + 5, top + 5) for _, (left, top) in records]
    taken += [
        box for series in panel.series if series.dashed for box in _along(series, x, y, panel)
    ]
    written = []
    for record, (left, top) in records:
        width = len(record["text"]) * _LETTER_PIXELS
        for dx, dy, align in _MOVES:
            start = left + dx - width * {"left": 0.0, "center": 0.5, "right": 1.0}[align]
            box = (start, top + dy - 6, start + width, top + dy + 6)
            inside = box[0] >= 0 and box[2] <= _PLOT[0] and box[1] >= 0 and box[3] <= _PLOT[1]
            if inside and not any(_touch(box, other) for other in taken):
                taken.append(box)
                written.append({**record, "dx": dx, "dy": dy, "align": align})
                break
    moves = {key: {"expr": f"datum.{key}"} for key in ("dx", "dy", "align")}
    mark = {"type": "text", "baseline": "middle", **moves}
    return _layer(written, mark, x=x, y=y, text=_field("text"))


def _pixels(record: Spec, x: Spec, y: Spec, panel: Panel) -> tuple[float, float]:

    def share(axis: str, scale: Spec) -> float:
        values = [
            float(v) for s in panel.series for v in (s.x if axis == "x" else s.y) if v is not None
        ]
        low, high = scale.get("domain") or (0.0 if scale.get("zero") else min(values), max(values))
        value = record[axis]
        if scale.get("type") == "log":
            low, high, value = log(low), log(high), log(value)
        return (value - low) / (high - low) if high > low else 0.5

    return share("x", x["scale"]) * _PLOT[0], (1 - share("y", y["scale"])) * _PLOT[1]


def _along(line: Series, x: Spec, y: Spec, panel: Panel) -> list[Box]:
    """Boxes about a line that goes along the axes, as a frontier does."""
    spots = [_pixels(record, x, y, panel) for record in _records(panel, line)]
    return [
        (min(a, c) - 1, min(b, d) - 1, max(a, c) + 1, max(b, d) + 1)
        for (a, b), (c, d) in pairwise(spots)
    ]


def _touch(box: Box, other: Box) -> bool:
    return (box[0] < other[2] and other[0] < box[2]) and (box[1] < other[3] and other[1] < box[3])


# Files: the panels of a figure on white paper, with their titles and one legend.

_GAP, _TITLE, _LEGEND_LINE = 16, 22, 20


def figure_svg(drawing: Drawing) -> str:
    """All panels and the legend in one drawing; the title is left to the caption, as papers do."""
    figure = drawing.figure
    columns = min(len(figure.panels), 2)
    title = _TITLE if any(panel.title for panel in figure.panels) else 0
    pairs = list(zip(figure.panels, drawing.panels, strict=True))
    parts, y = [], _GAP
    for first in range(0, len(pairs), columns):
        line = pairs[first : first + columns]
        for column, (panel, svg) in enumerate(line):
            x = _GAP + column * (WIDTH + _GAP)
            parts.append(_text(x, y + 12, short(panel.title, 60), weight=600))
            parts.append(svg.replace("<svg ", f'<svg x="{x}" y="{y + title}" ', 1))
        y += max(_height_of(svg) for _, svg in line) + _GAP + title
    width = _GAP + columns * (WIDTH + _GAP)
    x = _GAP
    for name, series in figure.legend.items():
        text = short(name, 60)
        needed = round(len(text) * _LETTER_PIXELS) + 44
        if x > _GAP and x + needed > width:
            x, y = _GAP, y + _LEGEND_LINE
        parts.append(f'<g transform="translate({x},{y})">{swatch(series, figure)}</g>')
        parts.append(_text(x + 30, y + 10, text))
        x += needed
    height = y + (_LEGEND_LINE if figure.legend else 0) + 4
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
        f' width="{width}" height="{height}" viewBox="0 0 {width} {height}" color="#1b1c1e">'
        f'<rect width="100%" height="100%" fill="#fff"/>{"".join(parts)}</svg>\n'
    )


def _height_of(svg: str) -> int:
    known = re.search(r'^<svg [^>]*?height="([\d.]+)"', svg)
    assert known is not None, "Vega states the height"
    return round(float(known[1]))


def swatch(series: Series, figure: Figure) -> str:
    """The series' sign in a legend, 24 x 14 pixels."""
    look = look_of(series.style or series.name, series.variant)
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


def _text(x: float, y: float, text: str, weight: int = 400) -> str:
    return (
        f'<text x="{x}" y="{y}" font-family="{escape(_FONT)}" font-size="{_FONT_SIZE}px"'
        f' font-weight="{weight}" fill="currentColor">{escape(text)}</text>'
    )


def write_images(drawings: Sequence[Drawing], folder: Path) -> list[Path]:
    """NAME.png and NAME.svg of each figure; the same figures give the same bytes.

    Raises `StorageError` where the folder cannot be written.
    """
    from vl_convert import svg_to_png

    contents: dict[Path, bytes] = {}
    for drawing in drawings:
        svg = figure_svg(drawing)
        contents[folder / f"{drawing.figure.name}.png"] = svg_to_png(svg, scale=PIXELS_A_PIXEL)
        contents[folder / f"{drawing.figure.name}.svg"] = svg.encode()
    write_files(contents)
    return [*contents]
