"""Intervals over repeats.  Plain Python, because `compare` must answer at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean, stdev

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean over repeats and where the true mean lies with 95 % confidence."""

    value: float
    low: float | None
    """None where one repeat, or unpaired ones, allow no interval."""
    high: float | None
    n: int

    @property
    def half_width(self) -> float | None:
        return None if self.high is None else self.high - self.value


def estimate_mean(values: Sequence[float]) -> Estimate:
    """The mean and Student's t interval of it, 95 % two-sided.

    Assumes repeats that are independent and about normal; with n = 2 the interval is wide (12.7
    standard errors), and rightly so.  It is not clipped to what is possible.  Raises `ValueError`
    for no value.
    """
    if not values:
        raise ValueError("an estimate needs at least one value")
    mean = fmean(values)
    count = len(values)
    if count == 1:
        return Estimate(value=mean, low=None, high=None, n=1)
    half = t_quantile(count - 1) * stdev(values, mean) / math.sqrt(count)
    return Estimate(value=mean, low=mean - half, high=mean + half, n=count)


def estimate_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Estimate:
    """Ratio of the means of paired values, with its 95 % interval; denominators above zero.

    The ratio estimator: with residuals d_i = y_i - R x_i, the variance of R is
    s_d^2 / (n mean(x)^2); Student's t with n - 1 degrees of freedom.  Pairs share a repeat, so what
    disturbs both cancels.  Source: Cochran, Sampling Techniques, 3rd ed. (1977), section 6.4.
    Raises `ValueError` for no value or unequal numbers.
    """
    if not numerators or len(numerators) != len(denominators):
        raise ValueError("a ratio of pairs needs as many numerators as denominators, at least one")
    base = fmean(denominators)
    ratio = fmean(numerators) / base
    count = len(numerators)
    if count == 1:
        return Estimate(value=ratio, low=None, high=None, n=1)
    residuals = [y - ratio * x for y, x in zip(numerators, denominators, strict=True)]
    squares = math.fsum(residual**2 for residual in residuals)
    half = t_quantile(count - 1) * math.sqrt(squares / (count - 1) / count) / base
    return Estimate(value=ratio, low=ratio - half, high=ratio + half, n=count)


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
