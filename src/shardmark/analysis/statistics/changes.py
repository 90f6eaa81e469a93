"""Whether values change over time: rank tests, which no single disturbed value can fool."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import NormalDist, median

TREND_POINTS = 20
"""A longer series is taken together to at least so many and less than twice as many medians."""
JUMP_POINTS = 40
"""Medians in which a jump is looked for: more than for a trend, as it is larger than noise."""
SHORTEST_SHARE = 0.1
"""Of a series: what a jump must last, and have taken to come."""

Point = tuple[float, float]
"""Time and value."""


@dataclass(frozen=True, slots=True)
class Trend:
    """How values change over time, and how often chance alone would show as much."""

    slope: float
    """Median change a unit of time, over all pairs of one series."""
    p_value: float
    """Two-sided."""


@dataclass(frozen=True, slots=True)
class Jump:
    """A moment after which all values lie apart from all before."""

    time: float
    """Of the first value after it."""
    size: float
    """Median after it minus median before it."""
    p_value: float
    """How often values in random order have such a moment, with as many on the shorter side."""


def trend_of(series: Sequence[Sequence[Point]]) -> Trend | None:
    """One trend that several series share, each with a level of its own.

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


def jump_of(points: Sequence[Point]) -> Jump | None:
    """The jump that parts the series best; None where none does, with a tenth on either side.

    The gap between the two sides is at least half of the change, unlike in a steady drift.  The
    value during which the change happened may lie between them, and is then of neither side.  Of
    all orders of n values, 2 / C(n, k) have the k least or the k largest ones first; the p-value
    is the sum over all k on which neither side is shorter, with and without a value between.
    """
    ordered = sorted(points)
    values = [value for _, value in ordered]
    for between in (0, 1):
        split = _best_split(values, between)
        if split is not None:
            after = split + between
            size = median(values[after:]) - median(values[:split])
            p_value = _share_of_orders(len(values), min(split, len(values) - after))
            return Jump(ordered[after][0], size, p_value)
    return None


def medians(points: Sequence[Point], most_points: int = TREND_POINTS) -> list[Point]:
    """Medians of consecutive points, so that neighbours depend less on one another."""
    size = max(1, len(points) // most_points)
    blocks = [points[start : start + size] for start in range(0, len(points) - size + 1, size)]
    return [(median(t for t, _ in block), median(v for _, v in block)) for block in blocks]


def _best_split(values: Sequence[float], between: int) -> int | None:
    """How many values lie before the jump, if `between` values lie in it."""
    shortest = max(2, math.ceil(SHORTEST_SHARE * len(values)))
    gaps = {
        split: max(
            min(values[split + between :]) - max(values[:split]),
            min(values[:split]) - max(values[split + between :]),
        )
        for split in range(shortest, len(values) - between - shortest + 1)
    }
    if not gaps:
        return None
    best = max(gaps, key=lambda split: gaps[split])
    size = median(values[best + between :]) - median(values[:best])
    return best if gaps[best] > 0 and gaps[best] >= abs(size) / 2 else None


def _share_of_orders(count: int, side: int) -> float:
    """Of random orders, those that are parted with at least so many values on either side."""
    parted = math.fsum(
        2 / math.comb(n, split) for n in (count, count - 1) for split in range(side, n - side + 1)
    )
    return min(1.0, parted)
