"""Whether steps changed for good at some moment: a link became slower, a neighbour moved in."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from shardmark.analysis.trends import thinned

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

    The gap between the two sides is at least half of the change, unlike in a steady drift.  Of all
    orders of n values, 2 / C(n, k) have the k least or the k largest ones first; the p-value
    is the sum over all k on which neither side is shorter.
    """
    ordered = sorted(points)
    values = [value for _, value in ordered]
    count = len(values)
    shortest = max(2, math.ceil(SHORTEST_SHARE * count))
    gaps = {
        split: max(
            min(values[split:]) - max(values[:split]), min(values[:split]) - max(values[split:])
        )
        for split in range(shortest, count - shortest + 1)
    }
    if not gaps:
        return None
    best = max(gaps, key=lambda split: gaps[split])
    size = median(values[best:]) - median(values[:best])
    if gaps[best] <= 0 or gaps[best] < abs(size) / 2:
        return None
    side = min(best, count - best)
    orders = math.fsum(2 / math.comb(count, split) for split in range(side, count - side + 1))
    return Change(ordered[best][0], size, min(1.0, orders))
