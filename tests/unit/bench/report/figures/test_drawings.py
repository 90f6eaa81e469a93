"""Panels drawn as SVG, and put together into files."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from PIL import Image

from shardmark.bench.report.figures import Figure, Panel, Series, figures_of
from shardmark.bench.report.figures.drawing import (
    _COLOURS,
    _GREY,
    WIDTH,
    Drawing,
    draw,
    figure_svg,
    look_of,
    panel_spec,
    write_images,
)
from tests.golden.invented import invented_trial, store_and_compare, two_epoch_rank

HOSTILE = (
    "<script>alert(1)</script>",
    "%{y} & <b>bold</b> &amp;",
    "名前 🚀 \u202e",
    "line\nbreak\tand \x00 control \ud800 \ufffe",
    "long " * 80,
    "javascript:alert(1)' \" datum.x",
)


def line_panel(*series: Series, **changes: Any) -> Panel:
    content: dict[str, Any] = {"title": "", "kind": "line", "x_label": "Epoch", "y_label": "Loss"}
    return Panel(**content | changes, series=series)


def figure_of(panel: Panel) -> Figure:
    return Figure(name="test", title="Test", caption="A test.", panels=(panel,))


def marks_in(svg: str) -> list[dict[str, str]]:
    """Attributes of all that the page can name and filter."""
    nodes = ElementTree.fromstring(svg).iter()
    return [node.attrib for node in nodes if "data-rows" in node.attrib]


DRAWN = ("speed-and-memory", "throughput", "scaling", "memory", "train-loss")
"""Points, bars, lines, stacked bars, and lines with whiskers."""


@pytest.fixture(scope="module")
def drawings(tmp_path_factory: pytest.TempPathFactory) -> list[Drawing]:
    trials = [
        invented_trial(strategy, size, repeat, ranks=tuple(map(two_epoch_rank, range(size))))
        for strategy, size in (("single", 1), ("ddp", 2), ("ddp", 4))
        for repeat in (0, 1)
    ]
    figures = figures_of(store_and_compare(tmp_path_factory.mktemp("run"), trials))
    return draw([figure for figure in figures if figure.name in DRAWN])


def test_every_mark_names_its_series_and_rows(drawings: list[Drawing]) -> None:
    assert {each.figure.name for each in drawings} == set(DRAWN)
    for drawing in drawings:
        for panel, svg in zip(drawing.figure.panels, drawing.panels, strict=True):
            marks = marks_in(svg)
            for series in panel.series:
                own = [mark for mark in marks if mark["data-series"] == series.name]
                rows = {row for mark in own for row in mark["data-rows"].split()}
                assert len(own) >= (1 if series.dashed else len(series.y))
                assert rows == set(map(str, series.rows))


def test_a_mark_says_value_unit_and_interval() -> None:
    series = Series(
        name="ddp", style=0, x=("ddp, 2 ranks",), y=(812.0,), low=(790.0,), high=(830.0,)
    )
    (drawing,) = draw([figure_of(line_panel(series, kind="bars", y_unit="samples/s"))])
    labels = {mark["aria-label"] for mark in marks_in(drawing.panels[0])}
    assert labels == {"ddp, 2 ranks: 812 samples/s (790 to 830)"}


def test_an_interval_outside_the_axis_does_not_move_the_panel() -> None:
    inside = Series(name="a", style=0, x=(1.0, 2.0), y=(1.0, 2.0))
    outside = Series(name="b", style=1, x=(1.0, 2.0), y=(9e4, 9e4))
    interval = replace(outside, low=(8e4, 8e4), high=(1e5, 1e5))
    origins = []
    for series in (outside, interval):
        (drawing,) = draw([figure_of(line_panel(inside, series, y_bounds=(0.0, 3.0)))])
        origins.append(re.findall(r"translate\(([^)]*)\)", drawing.panels[0])[0])
    assert origins[0] == origins[1]


def test_a_panel_can_stand_in_any_page(drawings: list[Drawing]) -> None:
    """No script, style, link or identifier; colours of text are the page's."""
    for drawing in drawings:
        for svg in drawing.panels:
            tags = {node.tag.rpartition("}")[2] for node in ElementTree.fromstring(svg).iter()}
            assert tags <= {"svg", "g", "path", "text", "line", "rect", "tspan"}
            assert not re.search(r'\s(id|style|href|xlink:href|on\w+)="', svg)
            assert 'fill="currentColor"' in svg
            assert f'viewBox="0 0 {WIDTH} ' in svg


@pytest.mark.parametrize("kind", ["line", "points", "bars", "stacked"])
def test_hostile_names_stay_text(kind: str, tmp_path: Path) -> None:
    series = [
        Series(name=name, style=0, x=(name,) if kind in ("bars", "stacked") else (1.0,), y=(2.0,),
               text=(name[:20],))
        for name in HOSTILE
    ]  # fmt: skip
    labels = {"x_label": HOSTILE[1], "y_label": HOSTILE[0], "title": HOSTILE[3]}
    (drawing,) = draw([figure_of(line_panel(*series, kind=kind, **labels))])
    nodes = list(ElementTree.fromstring(figure_svg(drawing)).iter())
    if kind == "line":
        with Image.open(write_images([drawing], tmp_path)[0]) as image:
            image.verify()
    assert not [node for node in nodes if node.tag.endswith(("script", "}a"))]
    assert any("<script>" in "".join(node.itertext()) for node in nodes)
    assert "<script" not in drawing.panels[0]
    assert {mark["data-series"] for mark in marks_in(drawing.panels[0])} >= set(HOSTILE[:2])


def test_long_names_of_a_run_stay_distinct(tmp_path: Path) -> None:
    names = (*HOSTILE[:3], "w" * 300 + "a", "w" * 300 + "b")
    trials = [
        invented_trial("fsdp", 2, id=f"fsdp-{number}", strategy_options={"wrap": name + " " * 3})
        for number, name in enumerate(names)
    ]
    figures = {figure.name: figure for figure in figures_of(store_and_compare(tmp_path, trials))}
    panel = figures["throughput"].panels[0]
    assert len(panel.categories) == len({series.name for series in panel.series}) == len(names)
    assert max(map(len, panel.categories)) < 60


def test_images_are_one_drawing_in_two_forms(drawings: list[Drawing], tmp_path: Path) -> None:
    paths = write_images(drawings[1:2], tmp_path / "one")
    again = write_images(drawings[1:2], tmp_path / "two")
    assert [path.read_bytes() for path in paths] == [path.read_bytes() for path in again]
    for drawing in drawings[1:2]:
        svg = ElementTree.parse(tmp_path / "one" / f"{drawing.figure.name}.svg").getroot()
        with Image.open(tmp_path / "one" / f"{drawing.figure.name}.png") as image:
            assert image.size == (2 * int(svg.attrib["width"]), 2 * int(svg.attrib["height"]))
            assert image.convert("RGB").getpixel((0, 0)) == (255, 255, 255)
        texts = {"".join(node.itertext()) for node in svg.iter() if node.tag.endswith("text")}
        assert set(drawing.figure.legend) <= texts


def test_missing_values_are_gaps() -> None:
    series = Series(name="ddp", style=0, x=(1.0, 2.0, 3.0, 4.0), y=(5.0, None, float("nan"), 4.0))
    figure = figure_of(line_panel(series))
    json.dumps(panel_spec(figure.panels[0]), allow_nan=False)
    marks = marks_in(draw([figure])[0].panels[0])
    assert sum(mark["aria-label"].startswith("ddp, ") for mark in marks) == 2


def test_texts_beside_points_do_not_cover_one_another() -> None:
    """A text that fits nowhere is invisible: the pointer shows it."""
    series = [
        Series(
            name=f"s{n}",
            style=n,
            x=(100.0 + n % 5, 300.0),
            y=(50.0 + n / 9, 80.0),
            text=("label", "2"),
        )
        for n in range(12)
    ]
    (drawing,) = draw([figure_of(line_panel(*series, kind="points"))])
    texts = re.findall(
        r"<text aria[^>]*translate\(([^)]*)\)[^>]*opacity=\"(\d)\"", drawing.panels[0]
    )
    places = [place for place, opacity in texts if opacity == "1"]
    assert len(texts) == 24
    assert 4 <= len(set(places)) == len(places) < 24


@pytest.mark.parametrize("count", [4, 8, 15])
def test_texts_beside_points_do_not_move_the_title_out_of_the_panel(count: int) -> None:
    generator = random.Random(count)
    series = [
        Series(
            name=f"s{n}",
            style=n,
            x=(60 + 500 * generator.random(),),
            y=(500 + 500 * generator.random(),),
            text=(f"a strategy with an option {n}",),
        )
        for n in range(count)
    ]
    (drawing,) = draw([figure_of(line_panel(*series, kind="points"))])
    (svg,) = drawing.panels
    _, _, title = svg.partition('role-title"')
    top, offset = (
        float(found[1])
        for text in (svg, title)
        if (found := re.search(r"translate\([-\d.]+,([-\d.]+)\)", text)) is not None
    )
    assert 0 <= top + offset < 10


def test_wide_intervals_do_not_squeeze_the_values() -> None:
    series = Series(
        name="ddp", style=0, x=(1.0, 2.0), y=(5.0, 10.0), low=(4.0, -90), high=(6.0, 110.0)
    )
    assert line_panel(series).y_range == pytest.approx((0.0, 15.5))


def luminance(colour: str) -> float:
    """Relative luminance, WCAG 2.2."""
    shares = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [s / 12.92 if s <= 0.04045 else ((s + 0.055) / 1.055) ** 2.4 for s in shares]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("paper", ["#ffffff", "#111111"])
def test_colours_can_be_seen_on_light_and_dark(paper: str) -> None:
    for colour in (*_COLOURS, _GREY):
        low, high = sorted((luminance(colour), luminance(paper)))
        assert (high + 0.05) / (low + 0.05) >= 3


def test_series_differ_in_more_than_colour() -> None:
    looks = list(map(look_of, range(len(_COLOURS))))
    assert len({look.colour for look in looks}) == len(looks)
    assert len({(look.dash, look.marker) for look in looks}) == len(looks)
    many = list(map(look_of, range(6 * len(_COLOURS))))
    assert len({(look.colour, look.marker) for look in many}) == len(many)


def test_a_long_name_of_a_bar_has_two_lines() -> None:
    """The end of the name tells the rows of a strategy apart."""
    names = ("ps-bounded (staleness=3), 2+1 ranks: server", "ddp, 2 ranks")
    bars = [Series(name=name, style=0, x=(name,), y=(2.0,)) for name in names]
    (drawing,) = draw([figure_of(line_panel(*bars, kind="bars"))])
    nodes = ElementTree.fromstring(drawing.panels[0]).iter()
    texts = {"".join(node.itertext()) for node in nodes if node.tag.endswith(("text", "tspan"))}
    assert {"ps-bounded (staleness=3),", "2+1 ranks: server", "ddp, 2 ranks"} <= texts
