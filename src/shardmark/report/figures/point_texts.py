"""Writes texts beside points so that they cover as little as possible."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import TYPE_CHECKING

from shardmark.report.figures.figure import Panel
from shardmark.report.figures.looks import LONGEST_TICK, look_of, short

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_TEXT_POINTS = 6.5
_LETTER_POINTS = 0.6 * _TEXT_POINTS
_MOVES = ((5, 5), (6, 0), (-5, 5), (-6, 0), (5, -5), (-5, -5), (0, 8), (0, -8))
"""From the point, in points of 1/72 inch, the best first."""

Place = tuple[float, float]
"""In points from the corner of the page."""


def place_texts(axes: Axes, panel: Panel, dots_per_inch: float) -> None:
    """Write the texts of all series, whose x are numbers.  Call it when the layout is final."""
    found: list[tuple[Place, Place, str, str]] = []
    for series in panel.series:
        colour = look_of(series.style or series.name, series.variant).colour
        across = [] if series.text is None else [float(x) for x in series.x]
        for x, y, text in zip(across, series.y, series.text or (), strict=False):
            if y is not None and isfinite(y):
                place = _place(axes, (x, y), dots_per_inch)
                found.append(((x, y), place, short(text, LONGEST_TICK), colour))
    points = [place for _, place, _, _ in found]
    taken: list[tuple[Place, float]] = [(place, 3.0) for place in points]
    for value, place, text, colour in found:
        half = len(text) * _LETTER_POINTS / 2
        crowds = [_crowd(_centre(place, one, half), half, taken) for one in _MOVES]
        move = _MOVES[crowds.index(min(crowds))]
        taken.append((_centre(place, move, half), half))
        axes.annotate(
            text,
            value,
            xytext=move,
            textcoords="offset points",
            ha="left" if move[0] > 0 else "right" if move[0] < 0 else "center",
            va="center",
            fontsize=_TEXT_POINTS,
            color=colour,
        )


def _place(axes: Axes, value: tuple[float, float], dots_per_inch: float) -> Place:
    x, y = axes.transData.transform(value)
    return x * 72 / dots_per_inch, y * 72 / dots_per_inch


def _centre(place: Place, move: tuple[int, int], half: float) -> Place:
    reach = half * ((move[0] > 0) - (move[0] < 0))
    return place[0] + move[0] + reach, place[1] + move[1]


def _crowd(centre: Place, half: float, taken: Sequence[tuple[Place, float]]) -> int:
    """How many points and texts a text there would touch."""
    return sum(
        abs(centre[0] - x) < half + reach and abs(centre[1] - y) < _TEXT_POINTS
        for (x, y), reach in taken
    )
