"""A figure as PNG and SVG for papers, by matplotlib, without any global state."""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure as Canvas
from matplotlib.layout_engine import ConstrainedLayoutEngine

from shardmark.core.errors import InputError
from shardmark.report.figures.figure import HORIZONTAL, Figure, Panel
from shardmark.report.figures.looks import LONGEST_SHOWN, short
from shardmark.report.figures.panel_drawing import draw_panel
from shardmark.report.figures.point_texts import place_texts

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

DOTS_PER_INCH = 200
_STYLE: Any = {
    "font.family": ["DejaVu Sans"],
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.unicode_minus": True,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "legend.fontsize": 7.5,
    "legend.frameon": False,
    "hatch.linewidth": 0.7,
    "text.parse_math": False,  # a `$` in a name is a `$`
    "text.usetex": False,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "shardmark",
    "path.simplify": True,
}
_COLUMN_INCHES = {1: 4.4, 2: 3.5, 3: 2.4}
_TITLE_LETTERS = {1: 60, 2: 44, 3: 29}
"""That fit above a panel, by panels in a row."""
_ROW_INCHES = 1.9
_BAR_INCHES = 0.21
_LEGEND_ROW_INCHES = 0.17
_LETTERS_AN_INCH = 15


def write_images(figures: Sequence[Figure], folder: Path) -> list[Path]:
    """NAME.png and NAME.svg of each figure; the same figures give the same bytes.

    Titles are left to the caption below, as papers do.  Raises `InputError` where the folder cannot
    be written.
    """
    written: list[Path] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for figure in figures:
            for path, content in _images(figure, folder):
                path.write_bytes(content)
                written.append(path)
    except OSError as error:
        raise InputError(
            str(folder), f"cannot be written: {error.strerror}", "name another folder"
        ) from None
    return written


def _images(figure: Figure, folder: Path) -> list[tuple[Path, bytes]]:
    with mpl.rc_context(_STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")  # a box stands for it
        warnings.filterwarnings("ignore", message="constrained_layout not applied")  # long names
        canvas = draw(figure)
        return [
            (folder / f"{figure.name}.png", _png(canvas)),
            (folder / f"{figure.name}.svg", _svg(canvas)),
        ]


def _png(canvas: Canvas) -> bytes:
    """Not by `savefig`, which draws everything twice."""
    content = io.BytesIO()
    FigureCanvasAgg(canvas).print_png(content, metadata={"Software": None})  # type: ignore[no-untyped-call]
    return content.getvalue()


def _svg(canvas: Canvas) -> bytes:
    content = io.BytesIO()
    FigureCanvasSVG(canvas).print_svg(content, metadata={"Date": None})  # type: ignore[no-untyped-call]
    return content.getvalue()


def draw(figure: Figure) -> Canvas:
    """The figure laid out and ready to be saved; call it with the style set."""
    columns = min(max(1, figure.columns), len(figure.panels), 3)
    if columns == 3 and max(len(panel.title) for panel in figure.panels) > _TITLE_LETTERS[3]:
        columns = 2
    rows = -(-len(figure.panels) // columns)
    lines = [figure.panels[first * columns : (first + 1) * columns] for first in range(rows)]
    heights = [max(_inches(panel) for panel in line) for line in lines]
    width = 6.2 if figure.panels[0].kind in HORIZONTAL else columns * _COLUMN_INCHES[columns]
    canvas = Canvas(figsize=(width, sum(heights)), dpi=DOTS_PER_INCH)
    FigureCanvasAgg(canvas)
    canvas.set_layout_engine(
        ConstrainedLayoutEngine(w_pad=0.06, h_pad=0.05, hspace=0.04, wspace=0.03)
    )
    grid = canvas.add_gridspec(rows, columns, height_ratios=heights)
    named: dict[str, Artist] = {}
    drawn: list[Axes] = []
    for number, panel in enumerate(figure.panels):
        axes = canvas.add_subplot(grid[divmod(number, columns)])
        for name, handle in draw_panel(axes, panel, _TITLE_LETTERS[columns]):
            named.setdefault(name, handle)
        drawn.append(axes)
    if figure.shared_y:
        _share(figure, drawn, columns)
    if len(named) > 1 and figure.panels[0].kind != "horizontal_bars":
        canvas.set_figheight(sum(heights) + _legend(canvas, named, width))
    canvas.draw_without_rendering()
    canvas.set_layout_engine("none")
    for panel, axes in zip(figure.panels, drawn, strict=True):
        if panel.kind in ("line", "points"):
            place_texts(axes, panel, canvas.dpi)
    return canvas


def _inches(panel: Panel) -> float:
    if panel.kind not in HORIZONTAL:
        return _ROW_INCHES + (0.2 if panel.title else 0)
    return _BAR_INCHES * len(panel.categories) + (0.9 if panel.title else 0.75)


def _share(figure: Figure, drawn: Sequence[Axes], columns: int) -> None:
    """One range for the panels that show the same, and each label once a row and a column."""
    for label in {panel.y_label for panel in figure.panels}:
        alike = [
            axes for panel, axes in zip(figure.panels, drawn, strict=True) if panel.y_label == label
        ]
        ends = [axes.get_ylim() for axes in alike]
        for axes in alike:
            axes.set_ylim(min(low for low, _ in ends), max(high for _, high in ends))
    for number, (panel, axes) in enumerate(zip(figure.panels, drawn, strict=True)):
        if number % columns and figure.panels[number - 1].y_label == panel.y_label:
            axes.set_ylabel("")
            axes.tick_params(axis="y", labelleft=False)
        below = number + columns
        if below < len(drawn) and figure.panels[below].x_label == panel.x_label:
            axes.set_xlabel("")


def _legend(canvas: Canvas, named: dict[str, Artist], width_inches: float) -> float:
    """Inches that its lines take, in as many columns as there is room for, read line by line."""
    names = [short(name, LONGEST_SHOWN) for name in named]
    handles = list(named.values())
    columns = len(names)
    while columns > 1 and _letters(names, columns) > width_inches * _LETTERS_AN_INCH:
        columns -= 1
    rows = -(-len(names) // columns)
    order = [i for column in range(columns) for i in range(column, len(names), columns)]
    canvas.legend(
        [handles[i] for i in order],
        [names[i] for i in order],
        loc="outside lower center",
        ncols=columns,
        handlelength=2.6,
        columnspacing=1.4,
    )
    return rows * _LEGEND_ROW_INCHES


def _letters(names: Sequence[str], columns: int) -> int:
    """Width of a legend, signs and gaps counted as letters."""
    return sum(max(map(len, names[column::columns])) + 8 for column in range(columns))
