"""Interval of a paired difference that holds at every time of looking: the rule of a race.

The interval is the set of means that a test martingale does not reject: the Bayes factor of the t
statistic, with a normal prior on the effect, in units of the standard deviation.  Its chance of
ever leaving out the true mean is at most `ERROR_RATE`, however often one looks and whenever one
stops.  Sources: Gönen and others, The American Statistician 59 (2005), 252-257 (the factor);
Hendriksen, de Heide and Grünwald, Bayesian Analysis 16 (2021), 961-989, and Wang and Ramdas,
Sequential Analysis 44 (2025), 56-110 (its validity).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean, stdev

ERROR_RATE = 0.05
"""Largest chance that a race of two equal candidates ever names a faster one."""
EFFECT = 1.0
"""Standard deviation of the prior of the effect, in standard deviations of a pair."""
MOST_PAIRS = 1000
LARGEST_LOG = 50.0
"""Half width of an interval that tells nothing, as a natural logarithm."""


class Decision(StrEnum):
    FASTER = "faster"
    SLOWER = "slower"
    NO_DIFFERENCE = "no difference"
    """The ratio is within the margin."""
    UNDECIDED = "undecided"


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """The result of the pairs of a candidate and a reference so far."""

    ratio: float
    """Speed of the candidate in units of the reference's: geometric mean over the pairs."""
    low: float
    high: float
    pairs: int

    @property
    def is_bounded(self) -> bool:
        """False while so few pairs exclude no ratio."""
        return self.high / self.low < math.exp(LARGEST_LOG)

    def decision(self, margin: float) -> Decision:
        """Decide; `margin` is the relative difference below which both count as alike."""
        if 1 - margin < self.low and self.high < 1 + margin:
            return Decision.NO_DIFFERENCE
        if self.low > 1:
            return Decision.FASTER
        return Decision.SLOWER if self.high < 1 else Decision.UNDECIDED

    def pairs_to_decide(self, margin: float) -> int | None:
        """Estimate the pairs that would decide if ratio and scatter are what they seem.

        `MOST_PAIRS` stands for that many or more; None if it is unknown.
        """
        if self.pairs < 3 or not self.is_bounded:
            return None
        half = math.log(self.high / self.low) / 2
        offset = abs(math.log(self.ratio))
        wanted = max(offset, math.log1p(margin) - offset)
        deviation = half / half_width(self.pairs, 1.0, ERROR_RATE)
        for count in range(self.pairs + 1, MOST_PAIRS):
            if half_width(count, deviation, ERROR_RATE) <= wanted:
                return count
        return MOST_PAIRS


def standing(
    candidate: Sequence[float], reference: Sequence[float], *, comparisons: int = 1
) -> Standing:
    """Compare speeds that were measured in pairs; `comparisons` share the error rate.

    Raises `ValueError` for speeds that are not positive.
    """
    logs = [math.log(a / b) for a, b in zip(candidate, reference, strict=True)]
    count = len(logs)
    mean = fmean(logs) if logs else 0.0
    half = LARGEST_LOG
    if count > 1:
        half = min(half, half_width(count, stdev(logs), ERROR_RATE / comparisons))
    return Standing(
        ratio=math.exp(mean), low=math.exp(mean - half), high=math.exp(mean + half), pairs=count
    )


def half_width(count: int, deviation: float, rate: float) -> float:
    """Half the width of the interval of the mean of `count` values with a standard deviation.

    The factor for a mean m is (1 + n g)^(-1/2) [(1 + t^2 / v) / (1 + t^2 / (v (1 + n g)))]^(n / 2)
    with t = sqrt(n) (mean - m) / s, v = n - 1 and g the prior's variance; m is in the interval
    while the factor is below 1 / rate.
    """
    spread = 1 + count * EFFECT**2
    bound = (math.sqrt(spread) / rate) ** (2 / count)
    if bound >= spread:
        return math.inf  # so few values exclude no mean
    squared = (count - 1) * (bound - 1) / (1 - bound / spread)
    return math.sqrt(squared / count) * deviation
