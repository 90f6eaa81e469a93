"""Confidence intervals over repeats.

The estimate is the mean of the repeats, or from `ROBUST_FROM` values on their trimmed mean without
the outer tenth at either end, so that disturbed repeats have little effect.
`docs/method/statistics.md` has the evidence.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean

CONFIDENCE = 0.95
ROBUST_FROM = 10
"""Minimum number of values for a trimmed mean: with fewer, the interval would be too wide."""
TOO_NOISY_FACTOR = 100.0
"""Maximum ratio of the ends of a positive quantity's interval; wider intervals are omitted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """An estimate over repeats, with its 95 % confidence interval."""

    value: float
    low: float | None
    """None if a single repeat, unpaired repeats or too much noise allow no interval."""
    high: float | None
    n: int
    too_noisy: bool = False
    """True if the interval would span orders of magnitude."""

    @property
    def half_width(self) -> float | None:
        """The longer side of the interval, which is not symmetric for a positive quantity."""
        if self.low is None or self.high is None:
            return None
        return max(self.high - self.value, self.value - self.low)


@dataclass(frozen=True, slots=True)
class TrimmedMean:
    """The mean or trimmed mean of values, with its standard error."""

    value: float
    standard_error: float
    degrees: int

    @property
    def half_width(self) -> float:
        return t_quantile(self.degrees) * self.standard_error

    @property
    def p_value(self) -> float:
        """P-value of Student's t test of the hypothesis that the mean is zero."""
        if self.standard_error == 0:
            return float(self.value == 0)
        return t_probability(self.value / self.standard_error, self.degrees)


def estimate_mean(values: Sequence[float]) -> Estimate:
    """Estimate the mean of values with Student's t interval, 95 % and two-sided.

    For positive values it is the interval of the logarithm (to first order), which does not extend
    below zero; for non-negative values it is cut at zero.  Assumes independent repeats, and below
    ten also approximate normality.  For n = 2 it is 12.7 standard errors wide on either side.
    Raises `ValueError` for no values.
    """
    plain = estimate_difference(values)
    smallest = min(values)
    if plain.low is None or plain.high is None or smallest < 0:
        return plain
    if smallest == 0:
        return Estimate(value=plain.value, low=max(0.0, plain.low), high=plain.high, n=plain.n)
    return _positive(plain.value, (plain.high - plain.value) / plain.value, plain.n)


def estimate_difference(values: Sequence[float]) -> Estimate:
    """Estimate the mean of values of either sign, with Student's t interval."""
    if not values:
        raise ValueError("an estimate needs at least one value")
    if len(values) == 1:
        return Estimate(value=values[0], low=None, high=None, n=1)
    mean = trimmed_mean(values)
    low, high = mean.value - mean.half_width, mean.value + mean.half_width
    return Estimate(value=mean.value, low=low, high=high, n=len(values))


def estimate_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Estimate:
    """Estimate the ratio of paired values; denominators must be positive.

    Uses the log ratios of the pairs, in which a disturbance that slows both values by the same
    factor cancels: below ten pairs it is the ratio of the geometric means.  If a numerator is not
    positive, it is the ratio of the means, without an interval.  Raises `ValueError` for no values
    or unequal numbers of values.
    """
    if not numerators or len(numerators) != len(denominators):
        raise ValueError("a ratio of pairs needs as many numerators as denominators, at least one")
    count = len(numerators)
    if count == 1 or min(numerators) <= 0:
        ratio = fmean(numerators) / fmean(denominators)
        return Estimate(value=ratio, low=None, high=None, n=count)
    return ratio_of(trimmed_mean(log_ratios(numerators, denominators)), count)


def ratio_of(mean: TrimmedMean, count: int) -> Estimate:
    """Return the ratio whose logarithm has this mean."""
    return _positive(math.exp(mean.value), mean.half_width, count)


def log_ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    return [math.log(y / x) for y, x in zip(numerators, denominators, strict=True)]


def _positive(value: float, half_width: float, count: int) -> Estimate:
    """Return an estimate with a half width on the log scale; too noisy ones have no interval."""
    if 2 * half_width > math.log(TOO_NOISY_FACTOR):
        return Estimate(value=value, low=None, high=None, n=count, too_noisy=True)
    factor = math.exp(half_width)
    return Estimate(value=value, low=value / factor, high=value * factor, n=count)


def trimmed_mean(values: Sequence[float]) -> TrimmedMean:
    """Return the mean or trimmed mean of at least two values, with its standard error.

    The standard error of a trimmed mean is Winsorised, and enlarged by 1 / 4n, which makes the tail
    probabilities for normal values correct within a tenth from 5 % down to 0.4 %.  Source: Tukey
    and McLaughlin, Sankhya A 25 (1963), 331-352.
    """
    count = len(values)
    trimmed = count // ROBUST_FROM  # at either end
    inner = sorted(values)[trimmed : count - trimmed]
    winsorised = _deviation([inner[0]] * trimmed + inner + [inner[-1]] * trimmed)
    degrees = count - 2 * trimmed - 1
    error = winsorised * math.sqrt((count - 1) / ((degrees + 1) * degrees))
    enlargement = 1 + 1 / (4 * count) if trimmed else 1.0
    return TrimmedMean(fmean(inner), error * enlargement, degrees)


@cache
def t_quantile(degrees: float) -> float:
    """Return half the width of a 95 % interval of Student's t, in standard errors."""
    from scipy.special import stdtrit  # the import is too slow for `shardmark --help`

    return float(stdtrit(degrees, 0.5 + CONFIDENCE / 2))


def t_probability(statistic: float, degrees: float) -> float:
    """Return P(|T| > |statistic|) for Student's t distribution."""
    from scipy.special import stdtr

    return float(2 * stdtr(degrees, -abs(statistic)))


def _deviation(values: Sequence[float]) -> float:
    """Return the standard deviation; zero if the values differ only by rounding."""
    mean = fmean(values)
    deviation = math.hypot(*(value - mean for value in values)) / math.sqrt(len(values) - 1)
    return deviation if deviation > 1e-12 * abs(mean) else 0.0
