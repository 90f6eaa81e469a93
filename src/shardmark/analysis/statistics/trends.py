"""Whether values change over time: rank tests, which no single disturbed value can fool."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import NormalDist, median

MOST_POINTS = 20
"""A longer series is taken together to at least so many and less than twice as many medians."""


@dataclass(frozen=True, slots=True)
class Trend:
    """How values change over time, and how often chance alone would show as much."""

    slope: float
    """Median change a unit of time, over all pairs of one series."""
    p_value: float
    """Two-sided."""


def trend_of(series: Sequence[Sequence[tuple[float, float]]]) -> Trend | None:
    """One trend that several series of (time, value) share, each with a level of its own.

    Kendall's test, summed over series as over seasons; Sen's slope.  Takes the values of a series
    as independent; slightly cautious with few.  None where no series has two times.  Sources: Mann,
    Econometrica 13 (1945), 245-259; Sen, J. American Statistical Association 63 (1968), 1379-1389;
    Hirsch, Slack and Smith, Water Resources Research 18 (1982), 107-121.
    """
    score, variance = 0, 0.0
    slopes: list[float] = []
    for points in series:
        count = len(points)
        for (early, before), (late, after) in combinations(sorted(points), 2):
            if late > early:
                slopes.append((after - before) / (late - early))
                score += (after > before) - (after < before)
        variance += count * (count - 1) * (2 * count + 5) / 18
    if not slopes:
        return None
    # One off, because the score is a whole number: the correction for continuity.
    deviation = max(0, abs(score) - 1) / math.sqrt(variance)
    return Trend(median(slopes), 2 * NormalDist().cdf(-deviation))


def thinned(
    points: Sequence[tuple[float, float]], most_points: int = MOST_POINTS
) -> list[tuple[float, float]]:
    """Medians of consecutive points, so that neighbours depend less on one another."""
    size = max(1, len(points) // most_points)
    blocks = [points[start : start + size] for start in range(0, len(points) - size + 1, size)]
    return [(median(t for t, _ in block), median(v for _, v in block)) for block in blocks]
