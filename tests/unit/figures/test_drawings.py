"""Both drawings show the figure's values, whatever its names are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matplotlib as mpl
import pytest
from matplotlib.colors import to_hex
from PIL import Image
from tests.golden.invented import invented_trial
from tests.unit.figures.runs import comparison_of, two_epochs

from shardmark.core.errors import InputError
from shardmark.report.figures import Figure, Panel, Series, figures_of
from shardmark.report.figures.figure import with_ranges
from shardmark.report.figures.images import draw, write_images
from shardmark.report.figures.looks import _COLOURS, _STYLES, look_of
from shardmark.report.figures.plotly_drawing import plotly_figure
from shardmark.strategies import STRATEGIES

HOSTILE = (
    "$x_{1$",
    "<script>alert(1)</script>",
    "a\\frac{1}{2}\\",
    "%{y} & <b>bold</b> &amp;",
    "名前 🚀 \u202e",
    "line\nbreak\tand \x00 control \ud800",
    "long " * 80,
    "_private",
)


def line_figure(*series: Series, **changes: Any) -> Figure:
    content: dict[str, Any] = {"title": "", "kind": "line", "x_label": "Epoch", "y_label": "Loss"}
    panel = Panel(**content | changes, series=series)
    return Figure(name="test", title="Test", caption="A test.", panels=(panel,))


def run_figures(path: Path) -> tuple[Figure, ...]:
    trials = [
        invented_trial(strategy, size, repeat, ranks=tuple(map(two_epochs, range(size))))
        for strategy, size in (("single", 1), ("ddp", 2), ("fsdp", 2), ("ddp", 4))
        for repeat in (0, 1)
    ]
    return figures_of(comparison_of(path, trials))


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> tuple[Figure, ...]:
    return run_figures(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def images(figures: tuple[Figure, ...], tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_images(figures, tmp_path_factory.mktemp("images"))


def test_both_drawings_hold_the_same_lines(figures: tuple[Figure, ...]) -> None:
    checked = 0
    for figure in figures:
        if figure.panels[0].kind != "line":
            continue
        spec = plotly_figure(figure)
        with mpl.rc_context():
            canvas = draw(figure)
        traces = [trace for trace in spec["data"] if trace.get("hoverinfo") != "skip"]
        expected = [one for panel in figure.panels for one in panel.series]
        drawn = [
            line
            for axes in canvas.axes
            for line in axes.get_lines()
            if line.get_linestyle() != "None"
        ]
        assert len(traces) == len(expected) == len(drawn)
        for one, trace, line in zip(expected, traces, drawn, strict=True):
            assert trace["x"] == pytest.approx(list(one.x))
            assert list(line.get_xdata()) == pytest.approx(list(one.x))  # type: ignore[arg-type]
            assert trace["y"] == pytest.approx(list(one.y))
            assert list(line.get_ydata()) == pytest.approx(list(one.y))  # type: ignore[arg-type]
            assert trace["line"]["color"] == to_hex(line.get_color())
            checked += 1
    assert checked > 20


def test_both_drawings_hold_the_same_bars(figures: tuple[Figure, ...]) -> None:
    checked = 0
    for figure in figures:
        if "horizontal" not in figure.panels[0].kind:
            continue
        (panel,) = figure.panels
        with mpl.rc_context():
            canvas = draw(figure)
        widths = [bar.get_width() for bar in canvas.axes[0].patches]  # type: ignore[attr-defined]
        values = [y for series in panel.series for y in series.y]
        assert [x for trace in plotly_figure(figure)["data"] for x in trace["x"]] == values
        assert widths == pytest.approx(values)
        checked += 1
    assert checked == 3


def test_whiskers_are_the_distances_to_the_ends() -> None:
    series = Series(name="ddp", x=(1.0, 2.0), y=(5.0, 4.0), low=(4.0, None), high=(7.0, None))
    (trace,) = plotly_figure(line_figure(series))["data"]
    assert (trace["error_y"]["array"], trace["error_y"]["arrayminus"]) == ([2.0, 0], [1.0, 0])


def test_many_points_have_a_band_instead() -> None:
    x = tuple(map(float, range(20)))
    series = Series(name="ddp", x=x, y=x, low=x, high=tuple(value + 1 for value in x))
    band, line = plotly_figure(line_figure(series))["data"]
    assert (band["fill"], band["showlegend"]) == ("toself", False)
    assert len(band["y"]) == 40
    assert "error_y" not in line


def test_names_stand_once_in_the_legend(figures: tuple[Figure, ...]) -> None:
    for figure in figures:
        shown = [trace["name"] for trace in plotly_figure(figure)["data"] if trace["showlegend"]]
        assert len(shown) == len(set(shown))
        assert set(shown) == {one.name for panel in figure.panels for one in panel.series}


def test_the_narrow_layout_has_the_same_data(figures: tuple[Figure, ...]) -> None:
    figure = next(one for one in figures if one.columns == 2)
    wide, narrow = plotly_figure(figure), plotly_figure(figure, columns=1)
    assert wide["data"] == narrow["data"]
    assert narrow["layout"]["height"] > wide["layout"]["height"]
    assert {key for key in narrow["layout"] if key.startswith("xaxis")} == {
        key for key in wide["layout"] if key.startswith("xaxis")
    }
    assert narrow["layout"]["xaxis2"]["domain"] == [0, 1]


def test_plotly_takes_every_figure(figures: tuple[Figure, ...]) -> None:
    """The real library validates every key and value."""
    graph_objects = pytest.importorskip("plotly.graph_objects")
    for figure in (*figures, hostile_figure("bars"), hostile_figure("points")):
        spec = json.loads(json.dumps(plotly_figure(figure), allow_nan=False))
        graph_objects.Figure(spec)


def hostile_figure(kind: str) -> Figure:
    series = [
        Series(name=name, x=(name,) if "bar" in kind else (1.0,), y=(2.0,), text=(name[:20],))
        for name in HOSTILE
    ]
    labels = {"x_label": HOSTILE[1], "y_label": HOSTILE[0], "title": HOSTILE[2]}
    return line_figure(*series, kind=kind, **labels)


@pytest.mark.parametrize("kind", ["line", "points", "bars", "horizontal_bars", "stacked_bars"])
def test_hostile_names_stay_text(kind: str, tmp_path: Path) -> None:
    figure = hostile_figure(kind)
    png, svg = write_images([figure], tmp_path)
    with Image.open(png) as image:
        image.verify()
    root = ElementTree.fromstring(svg.read_bytes())
    assert not [node for node in root.iter() if node.tag.endswith("script")]
    texts = " ".join("".join(node.itertext()) for node in root.iter() if node.tag.endswith("text"))
    assert "$x_{1$" in texts
    assert "<script>" in texts
    text = json.dumps(plotly_figure(figure), allow_nan=False)
    text.encode()
    assert "<script>" not in text
    assert "<b>bold" not in text
    assert "&lt;script&gt;" in text


def test_hostile_names_of_a_run_stay_apart(tmp_path: Path) -> None:
    trials = [
        invented_trial("fsdp", 2, id=f"fsdp-{number}", strategy_options={"wrap": name + " " * 3})
        for number, name in enumerate((*HOSTILE[:5], "w" * 300 + "a", "w" * 300 + "b"))
    ]
    figures = figures_of(comparison_of(tmp_path, trials))
    panel = next(one for one in figures if one.name == "throughput").panels[0]
    assert len(panel.categories) == len({one.name for one in panel.series}) == 7
    assert max(map(len, panel.categories)) < 60
    assert len(write_images(figures, tmp_path / "images")) == 2 * len(figures)


def test_the_same_figures_give_the_same_bytes(images: list[Path], tmp_path: Path) -> None:
    """Of the same run, read and drawn anew."""
    again = write_images(run_figures(tmp_path / "run"), tmp_path / "images")
    assert [path.name for path in images] == [path.name for path in again]
    assert all(a.read_bytes() == b.read_bytes() for a, b in zip(images, again, strict=True))
    svg = next(path for path in images if path.suffix == ".svg").read_text()
    assert "<text" in svg
    assert "<dc:date>" not in svg


def test_images_leave_the_librarys_settings_alone(
    figures: tuple[Figure, ...], tmp_path: Path
) -> None:
    before = dict(mpl.rcParams)
    write_images(figures[:1], tmp_path)
    assert dict(mpl.rcParams) == before


def test_pictures_are_large_enough_for_print(images: list[Path]) -> None:
    pictures = [path for path in images if path.suffix == ".png"]
    assert pictures
    for path in pictures:
        with Image.open(path) as image:
            assert 800 <= image.width <= 1600
            assert image.height <= 2400


def test_a_folder_that_cannot_be_is_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(InputError, match="cannot be written"):
        write_images([], file)


def test_no_figure_is_no_file(tmp_path: Path) -> None:
    assert write_images([], tmp_path / "images") == []


def test_missing_values_are_gaps_in_both(tmp_path: Path) -> None:
    series = Series(name="ddp", x=(1.0, 2.0, 3.0), y=(5.0, None, float("nan")))
    figure = line_figure(series)
    assert plotly_figure(figure)["data"][0]["y"] == [5.0, None, None]
    assert len(write_images([figure], tmp_path)) == 2


def test_wide_intervals_do_not_squeeze_the_values() -> None:
    series = Series(name="ddp", x=(1.0, 2.0), y=(5.0, 10.0), low=(4.0, -90), high=(6.0, 110.0))
    (panel,) = with_ranges(line_figure(series)).panels
    assert panel.y_range == pytest.approx((0.0, 15.5))
    assert with_ranges(line_figure(Series(name="a", x=(1.0,), y=(2.0,)))).panels[0].y_range is None


def test_panels_that_share_y_have_one_range() -> None:
    panels = [
        line_figure(Series(name="ddp", x=(1.0, 2.0), y=y), y_from_zero=False).panels[0]
        for y in ((1.0, 2.0), (4.0, 5.0))
    ]
    figure = Figure(name="a", title="", caption="", panels=tuple(panels), columns=2, shared_y=True)
    for panel in with_ranges(figure).panels:
        assert panel.y_range == pytest.approx((0.8, 5.2))


def luminance(colour: str) -> float:
    """Relative luminance, WCAG 2.2."""
    shares = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [s / 12.92 if s <= 0.04045 else ((s + 0.055) / 1.055) ** 2.4 for s in shares]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_colours_can_be_seen_on_light_and_dark() -> None:
    for colour in {*_COLOURS, *(look.colour for look in _STYLES.values())}:
        assert contrast(colour, "#ffffff") >= 3
        assert contrast(colour, "#111111") >= 3


def test_strategies_differ_in_more_than_colour() -> None:
    looks = [look_of(name) for name in STRATEGIES]
    assert len({look.colour for look in looks}) == len(looks)
    assert len({(look.dash, look.marker) for look in looks}) == len(looks)


def test_a_variant_keeps_the_colour() -> None:
    first, second = look_of("ddp"), look_of("ddp", 1)
    assert first.colour == second.colour
    assert (first.dash, first.marker) != (second.dash, second.marker)
    assert look_of("their-own") == look_of("their-own")
