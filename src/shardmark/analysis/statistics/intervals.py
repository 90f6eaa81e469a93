"""Intervals over repeats.

What is estimated is the middle of the law that the repeats come from: their mean for fewer than
`ROBUST_FROM` values, and from there on their mean without the outer tenth at either end, so that
repeats on a disturbed machine do not move it.  `docs/method/statistics.md` has the evidence.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean

CONFIDENCE = 0.95
ROBUST_FROM = 10
"""So many values are enough to leave one in ten out at each end: with fewer, the interval would
grow too wide."""
TOO_NOISY_FACTOR = 100.0
"""An interval of a positive quantity whose ends differ by more says nothing, and is not given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A value over repeats and where the true one lies with 95 % confidence."""

    value: float
    low: float | None
    """None where one repeat, unpaired repeats or too much noise allow no interval."""
    high: float | None
    n: int
    too_noisy: bool = False
    """The interval would span orders of magnitude."""

    @property
    def half_width(self) -> float | None:
        """The longer of the two sides: the interval of a positive quantity is longer above."""
        if self.low is None or self.high is None:
            return None
        return max(self.high - self.value, self.value - self.low)


@dataclass(frozen=True, slots=True)
class Middle:
    """Where the middle of values lies, and how sure that is."""

    value: float
    standard_error: float
    degrees: int

    @property
    def half_width(self) -> float:
        return t_quantile(self.degrees) * self.standard_error

    @property
    def p_value(self) -> float:
        """Of Student's t test that it is zero."""
        if self.standard_error == 0:
            return float(self.value == 0)
        return t_probability(self.value / self.standard_error, self.degrees)


def estimate_mean(values: Sequence[float]) -> Estimate:
    """The middle of a quantity's values, with Student's t interval, 95 % two-sided.

    Of values above zero the interval is that of the logarithm (to first order), so that it has no
    end below zero; of others above or at zero it ends there.  Assumes independent repeats; below
    ten of them, also that they are about normal.  With n = 2 it is wide (12.7 standard errors), and
    rightly so.  Raises `ValueError` for no value.
    """
    plain = estimate_difference(values)
    least = min(values)
    if plain.low is None or plain.high is None or least < 0:
        return plain
    if least == 0:
        return Estimate(value=plain.value, low=max(0.0, plain.low), high=plain.high, n=plain.n)
    return _positive(plain.value, (plain.high - plain.value) / plain.value, plain.n)


def estimate_difference(values: Sequence[float]) -> Estimate:
    """The middle of differences, which may be of either sign, with Student's t interval."""
    if not values:
        raise ValueError("an estimate needs at least one value")
    if len(values) == 1:
        return Estimate(value=values[0], low=None, high=None, n=1)
    middle = middle_of(values)
    low, high = middle.value - middle.half_width, middle.value + middle.half_width
    return Estimate(value=middle.value, low=low, high=high, n=len(values))


def estimate_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Estimate:
    """Ratio of paired values with its 95 % interval; denominators above zero.

    From the pairs' log ratios, so that what disturbs or slows both values of a pair by the same
    factor cancels: below ten pairs, the ratio of the geometric means.  Where a numerator is not
    above zero, the ratio of the means, without interval.  Raises `ValueError` for no value or
    unequal numbers.
    """
    if not numerators or len(numerators) != len(denominators):
        raise ValueError("a ratio of pairs needs as many numerators as denominators, at least one")
    count = len(numerators)
    if count == 1 or min(numerators) <= 0:
        ratio = fmean(numerators) / fmean(denominators)
        return Estimate(value=ratio, low=None, high=None, n=count)
    return ratio_of(middle_of(log_ratios(numerators, denominators)), count)


def ratio_of(middle: Middle, count: int) -> Estimate:
    """From the middle of log ratios."""
    return _positive(math.exp(middle.value), middle.half_width, count)


def log_ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    return [math.log(y / x) for y, x in zip(numerators, denominators, strict=True)]


def _positive(value: float, half_width: float, count: int) -> Estimate:
    """With an interval that is so wide on the log scale; none where that is too noisy."""
    if 2 * half_width > math.log(TOO_NOISY_FACTOR):
        return Estimate(value=value, low=None, high=None, n=count, too_noisy=True)
    factor = math.exp(half_width)
    return Estimate(value=value, low=value / factor, high=value * factor, n=count)


def middle_of(values: Sequence[float]) -> Middle:
    """Of at least two values: the mean, or the trimmed mean with Winsorised standard error.

    The trimmed mean's error is taken 1 / 4n longer, which makes the tails of normal values right
    within a tenth from 5 % down to 0.4 %.  Source: Tukey and McLaughlin,
    Sankhya A 25 (1963), 331-352.
    """
    count = len(values)
    left_out = count // ROBUST_FROM  # at each end
    kept = sorted(values)[left_out : count - left_out]
    winsorised = _deviation([kept[0]] * left_out + kept + [kept[-1]] * left_out)
    degrees = count - 2 * left_out - 1
    error = winsorised * math.sqrt((count - 1) / ((degrees + 1) * degrees))
    longer = 1 + 1 / (4 * count) if left_out else 1.0
    return Middle(fmean(kept), error * longer, degrees)


@cache
def t_quantile(degrees: float) -> float:
    """Half a 95 % interval of Student's t, in standard errors; every metric of a row asks again."""
    from scipy.special import stdtrit  # here and below: too slow an import for `shardmark --help`

    return float(stdtrit(degrees, 0.5 + CONFIDENCE / 2))


def t_probability(statistic: float, degrees: float) -> float:
    """P(|T| > |statistic|) for Student's T."""
    from scipy.special import stdtr

    return float(2 * stdtr(degrees, -abs(statistic)))


def _deviation(values: Sequence[float]) -> float:
    """Standard deviation; zero where only rounding tells the values apart."""
    mean = fmean(values)
    deviation = math.hypot(*(value - mean for value in values)) / math.sqrt(len(values) - 1)
    return deviation if deviation > 1e-12 * abs(mean) else 0.0
