"""Intervals and tests over repeats.  Plain Python, because `compare` must answer at once.

What is estimated is the middle of the law that the repeats come from: their mean for fewer than
`ROBUST_FROM` values, and from there on their mean without the outer tenth at either end, so that
repeats on a disturbed machine do not move it.  `docs/method/statistics.md` has the evidence.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist, fmean

CONFIDENCE = 0.95
ROBUST_FROM = 10
"""So many values are enough to leave one in ten out at each end: with fewer, the interval would
grow too wide."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A value over repeats and where the true one lies with 95 % confidence."""

    value: float
    low: float | None
    """None where one repeat, or unpaired ones, allow no interval."""
    high: float | None
    n: int

    @property
    def half_width(self) -> float | None:
        """The longer of the two sides: a ratio's interval is a little longer above."""
        if self.low is None or self.high is None:
            return None
        return max(self.high - self.value, self.value - self.low)


@dataclass(frozen=True, slots=True)
class Middle:
    """Where the middle of values lies, and how sure that is."""

    value: float
    standard_error: float
    degrees: int
    spread: float
    """Estimates the standard deviation; of the undisturbed values where some are left out."""

    @property
    def half_width(self) -> float:
        return t_quantile(self.degrees) * self.standard_error


def estimate_mean(values: Sequence[float]) -> Estimate:
    """The middle of the values, with Student's t interval of it, 95 % two-sided.

    Assumes independent repeats; below ten of them, also that they are about normal.  With n = 2
    the interval is wide (12.7 standard errors), and rightly so.  It is not clipped to what is
    possible.  Raises `ValueError` for no value.
    """
    if not values:
        raise ValueError("an estimate needs at least one value")
    count = len(values)
    if count == 1:
        return Estimate(value=fmean(values), low=None, high=None, n=1)
    middle = middle_of(values)
    half = middle.half_width
    return Estimate(value=middle.value, low=middle.value - half, high=middle.value + half, n=count)


def estimate_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Estimate:
    """Ratio of paired values with its 95 % interval; denominators above zero.

    From the pairs' log ratios, so that what disturbs or slows both values of a pair by the same
    factor cancels: below ten pairs, the ratio of the geometric means.  Where a numerator is not
    above zero, the ratio of the means.  Raises `ValueError` for no value or unequal numbers.
    """
    if not numerators or len(numerators) != len(denominators):
        raise ValueError("a ratio of pairs needs as many numerators as denominators, at least one")
    if len(numerators) == 1:
        return Estimate(value=numerators[0] / denominators[0], low=None, high=None, n=1)
    if min(numerators) <= 0:
        return _ratio_of_means(numerators, denominators)
    return ratio_of(middle_of(log_ratios(numerators, denominators)), len(numerators))


def two_sided_p_value(statistic: float, degrees: int) -> float:
    """P(|T| > |statistic|) for Student's T with whole degrees of freedom; absolute error 1e-15."""
    central = _central_probability(math.atan(abs(statistic) / math.sqrt(degrees)), degrees)
    return min(1.0, max(0.0, 1 - central))


@cache
def t_quantile(degrees: int, probability: float = 0.5 + CONFIDENCE / 2) -> float:
    """Quantile of Student's t for whole degrees of freedom, `probability` from 0.5 to below 1.

    Bisects the closed form; the same as `scipy.special.stdtrit` to 1e-9, which takes a second to
    import.  Raises `ValueError` for less than one degree.
    """
    if degrees < 1:
        raise ValueError(f"degrees of freedom must be at least 1, got {degrees}")
    central = 2 * probability - 1
    low, high = 0.0, math.pi / 2
    while True:
        angle = (low + high) / 2
        if angle in (low, high):
            return math.tan(angle) * math.sqrt(degrees)
        if _central_probability(angle, degrees) < central:
            low = angle
        else:
            high = angle


def middle_of(values: Sequence[float]) -> Middle:
    """Of at least two values: the mean, or the trimmed mean with Winsorised standard error.

    The trimmed mean's error is taken 1 / 4n longer, which makes the tails of normal values right
    within a tenth from 5 % down to 0.4 %.  Source: Tukey and McLaughlin,
    Sankhya A 25 (1963), 331-352.
    """
    count = len(values)
    left_out = _left_out(count)
    kept = sorted(values)[left_out : count - left_out]
    winsorised = _deviation([kept[0]] * left_out + kept + [kept[-1]] * left_out)
    degrees = degrees_of(count)
    error = winsorised * math.sqrt((count - 1) / ((degrees + 1) * degrees))
    if left_out == 0:
        return Middle(fmean(kept), error, degrees, winsorised)
    spread = winsorised / _winsorised_spread(left_out / count)
    return Middle(fmean(kept), error * (1 + 1 / (4 * count)), degrees, spread)


def degrees_of(count: int) -> int:
    """Degrees of freedom of an estimate from so many values: those that count, less one."""
    return count - 2 * _left_out(count) - 1


def _left_out(count: int) -> int:
    """Values at each end."""
    return count // ROBUST_FROM


@cache
def _winsorised_spread(share: float) -> float:
    """Standard deviation of a standard normal law whose ends are drawn in to their edges."""
    edge = NormalDist().inv_cdf(1 - share)
    drawn_in = 2 * share * edge**2 - 2 * edge * NormalDist().pdf(edge)
    return math.sqrt(1 - 2 * share + drawn_in)


def _deviation(values: Sequence[float]) -> float:
    """Standard deviation; zero where only rounding tells the values apart."""
    mean = fmean(values)
    found = math.hypot(*(value - mean for value in values)) / math.sqrt(len(values) - 1)
    return found if found > 1e-12 * abs(mean) else 0.0


def ratio_of(middle: Middle, count: int) -> Estimate:
    """From the middle of log ratios."""
    low, high = middle.value - middle.half_width, middle.value + middle.half_width
    return Estimate(value=_exp(middle.value), low=_exp(low), high=_exp(high), n=count)


def log_ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    return [math.log(y / x) for y, x in zip(numerators, denominators, strict=True)]


def _exp(value: float) -> float:
    """Two pairs that differ wildly have an interval beyond every float."""
    return math.exp(value) if value < 700 else sys.float_info.max


def _ratio_of_means(numerators: Sequence[float], denominators: Sequence[float]) -> Estimate:
    """Its variance from the residuals y_i - R x_i, with n - 1 degrees of freedom.

    Source: Cochran, Sampling Techniques, 3rd ed. (1977), section 6.4.
    """
    count = len(numerators)
    base = fmean(denominators)
    ratio = fmean(numerators) / base
    residuals = [y - ratio * x for y, x in zip(numerators, denominators, strict=True)]
    squares = math.fsum(residual**2 for residual in residuals)
    half = t_quantile(count - 1) * math.sqrt(squares / (count - 1) / count) / base
    return Estimate(value=ratio, low=ratio - half, high=ratio + half, n=count)


def _central_probability(angle: float, degrees: int) -> float:
    """P(|T| < t) for t = tan(angle) sqrt(degrees).

    Source: Abramowitz and Stegun, Handbook of Mathematical Functions (1964), 26.7.3 and 26.7.4.
    """
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = degrees % 2 == 1
    term = cosine if odd else 1.0
    total = 0.0
    for index in range(1 if odd else 0, degrees - 1, 2):
        total += term
        term *= cosine**2 * (index + 1) / (index + 2)
    if odd:
        return 2 / math.pi * (angle + sine * total)
    return sine * total
