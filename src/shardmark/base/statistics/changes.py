"""Rank tests for changes of values over time, which are robust against single outliers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import NormalDist, median

TREND_POINTS = 20
"""Minimum number of medians to which a longer series is reduced; it has less than twice as many."""
JUMP_POINTS = 40
"""The same number for jumps: more than for trends, because jumps are larger than the noise."""
MIN_SIDE_FRACTION = 0.1
"""Minimum fraction of the series on either side of a jump."""

Point = tuple[float, float]
"""Time and value."""


@dataclass(frozen=True, slots=True)
class Trend:
    """A monotonic trend of values over time."""

    slope: float
    """Median change per unit of time, over all pairs of values of a series."""
    p_value: float
    """Two-sided p-value."""


@dataclass(frozen=True, slots=True)
class Jump:
    """A time that separates all earlier values from all later values."""

    time: float
    """Time of the first value after the jump."""
    size: float
    """Median after the jump minus the median before it."""
    p_value: float
    """Probability of such a separation, with as long a shorter side, in random order."""


def trend_of(series: Sequence[Sequence[Point]]) -> Trend | None:
    """Return the common trend of several series with different levels.

    Kendall's test, summed over the series as over seasons, and Sen's slope.  Assumes independent
    values; slightly conservative for few values.  None if no series has two times.  Sources: Mann,
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
    # The continuity correction: the score is an integer.
    deviation = max(0, abs(score) - 1) / math.sqrt(variance)
    return Trend(median(slopes), 2 * NormalDist().cdf(-deviation))


def jump_of(points: Sequence[Point]) -> Jump | None:
    """Return the jump that separates the series best, or None if there is none.

    The gap between the sides is at least half of the change, unlike in a steady drift, and either
    side has at least a tenth of the values.  A value during the change belongs to neither side.  Of
    all orders of n values, 2 / C(n, k) begin with the k smallest or largest values; the p-value is
    the sum over all k for which neither side is shorter, with and without a value between.
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
    """Return medians of consecutive points, which are less correlated than the points."""
    size = max(1, len(points) // most_points)
    blocks = [points[start : start + size] for start in range(0, len(points) - size + 1, size)]
    return [(median(t for t, _ in block), median(v for _, v in block)) for block in blocks]


def _best_split(values: Sequence[float], between: int) -> int | None:
    """Return the number of values before the jump, if `between` values lie in it."""
    shortest = max(2, math.ceil(MIN_SIDE_FRACTION * len(values)))
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
    """Return the fraction of random orders that separate with this many values on either side."""
    fraction = math.fsum(
        2 / math.comb(n, split) for n in (count, count - 1) for split in range(side, n - side + 1)
    )
    return min(1.0, fraction)
