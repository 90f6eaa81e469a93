"""Whether steps changed for good at some moment: a link became slower, a neighbour moved in."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from shardmark.analysis.statistics.trends import thinned

LEAST_FACTOR = 1.5
"""Between the steps before and after."""
MOST_POINTS = 40
"""Medians in which it is looked for: more than for a drift, as it is larger than noise."""
SHORTEST_SHARE = 0.1
"""Of a series: what a change must last, and have taken to come."""


def lasting_change(points: Sequence[tuple[float, float]], most_p_value: float) -> Change | None:
    """Of (step, logarithm of its seconds); None where it is small, or could be chance."""
    found = change_of(thinned(points, MOST_POINTS))
    if found is None or abs(found.size) < math.log(LEAST_FACTOR):
        return None
    return found if found.p_value <= most_p_value else None


@dataclass(frozen=True, slots=True)
class Change:
    """A moment at which values jump to another level: all after it lie apart from all before."""

    time: float
    """Of the first value after it."""
    size: float
    """Median after it minus median before it."""
    p_value: float
    """How often values in random order have such a moment, with as many on the shorter side."""

    @property
    def text(self) -> str:
        """Of logarithms of steps' times."""
        direction = "longer" if self.size > 0 else "shorter"
        times = f"{math.exp(abs(self.size)):.1f} times {direction}"
        return f"steps became {times}, and stayed so, from about step {self.time:.0f} on"


def change_of(points: Sequence[tuple[float, float]]) -> Change | None:
    """The jump that parts the series best; None where none does, with a tenth on either side.

    The gap between the two sides is at least half of the change, unlike in a steady drift.  The
    value during which the change happened may lie between them, and is then of neither side.  Of
    all orders of n values, 2 / C(n, k) have the k least or the k largest ones first; the p-value
    is the sum over all k on which neither side is shorter, with and without a value between.
    """
    ordered = sorted(points)
    values = [value for _, value in ordered]
    for between in (0, 1):
        found = _parted(values, between)
        if found is not None:
            before, after = found
            size = median(values[after:]) - median(values[:before])
            p_value = _share_of_orders(len(values), min(before, len(values) - after))
            return Change(ordered[after][0], size, p_value)
    return None


def _parted(values: Sequence[float], between: int) -> tuple[int, int] | None:
    """How many values lie before the change, and at which one they have changed."""
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
    if gaps[best] <= 0 or gaps[best] < abs(size) / 2:
        return None
    return best, best + between


def _share_of_orders(count: int, side: int) -> float:
    """Of random orders, those that are parted with at least so many values on either side."""
    parted = math.fsum(
        2 / math.comb(n, split) for n in (count, count - 1) for split in range(side, n - side + 1)
    )
    return min(1.0, parted)
