"""Moderated variances: what a few repeats cannot tell of a comparison's noise, the others add.

Source: Smyth, Statistical Applications in Genetics and Molecular Biology 3 (2004), article 3,
sections 4 to 6.2.  Plain Python, because scipy takes a second to import.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

_LARGE = 1e8
"""Beyond it the trigamma function is 1/x to every digit."""
_SHARED = 1 / 4
"""Squared correlation of the variances of two comparisons with one row, if all rows vary alike."""
_USED_UP = 3
"""Comparisons: two for the fit of the prior's variance and degrees, one for what does not fit."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Variance of one comparison's log ratios, with its degrees of freedom."""

    variance: float
    degrees: float


def moderated(own: Spread, prior: Spread | None) -> Spread:
    """The variance to test with, and how well it is known; cautious where the two disagree.

    Smyth's mean of both, weighted by their degrees, but never less than the comparison's own: one
    noisy row among calm ones would else be called different much too often.
    """
    if prior is None:
        return own
    degrees = own.degrees + prior.degrees
    mean = (own.degrees * own.variance + prior.degrees * prior.variance) / degrees
    return Spread(max(mean, own.variance), degrees)


def prior_of(spreads: Sequence[Spread]) -> Spread | None:
    """What comparisons that share a row say together of the variance of one; None for up to three.

    From the variances' logarithms: how far they differ beyond what their degrees explain.  Where
    that is not at all, the prior's degrees would be infinite; they end at those that the mean
    variance has.  With n comparisons these are 4 n / (n + 3) times those of one, because the shared
    row's noise is in all of them, and not n times.  Three of n comparisons count as used up by the
    fit.
    """
    known = [one for one in spreads if one.variance > 0]
    count = len(known)
    if count <= _USED_UP:
        return None
    halves = [one.degrees / 2 for one in known]
    logs = [
        math.log(one.variance) - digamma(half) + math.log(half)
        for one, half in zip(known, halves, strict=True)
    ]
    expected = fmean(trigamma(half) for half in halves)
    middle = fmean(logs)
    variance = math.fsum((one - middle) ** 2 for one in logs) / (count - 1)
    beyond = variance / (1 - _SHARED) - expected
    others = fmean(one.degrees for one in known) * (count / (1 + _SHARED * (count - 1)) - 1)
    degrees = others
    if beyond > 1 / _LARGE:
        half = trigamma_inverse(beyond)
        middle += digamma(half) - math.log(half)
        degrees = min(2 * half, others)
    return Spread(math.exp(middle), degrees * (1 - _USED_UP / count))


def t_probability(statistic: float, degrees: float) -> float:
    """P(|T| > |statistic|) for Student's T, also for degrees that are not whole; error 1e-12.

    Source: Abramowitz and Stegun, Handbook of Mathematical Functions (1964), 26.7.1 and 26.5.8.
    """
    square = min(abs(statistic), 1e100) ** 2
    if square == 0:
        return 1.0
    return _incomplete_beta(degrees / (degrees + square), square / (degrees + square), degrees / 2)


def _incomplete_beta(x: float, rest: float, a: float) -> float:
    """I_x(a, 1/2), with 1 - x given so that no digit is lost."""
    b = 0.5
    front = math.exp(
        math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log(rest)
    )
    if x < (a + 1) / (a + b + 2):
        return front / a * _fraction(x, a, b)
    return 1 - front / b * _fraction(rest, b, a)


def _fraction(x: float, a: float, b: float) -> float:
    """The continued fraction by Lentz's steps.

    Source: Thompson and Barnett, J. Computational Physics 64 (1986), 490-509.
    """
    tiny = 1e-300
    below, above = 1 / max(1 - (a + b) * x / (a + 1), tiny), 1.0
    found = below
    for m in range(1, 1000):
        for part in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            below = 1 / (1 + part * below or tiny)
            above = 1 + part / above or tiny
            found *= below * above
        if abs(below * above - 1) < 1e-15:
            break
    return found


def digamma(x: float) -> float:
    """Derivative of log gamma for x above 0; absolute error 1e-12 of values about 1.

    Source: Abramowitz and Stegun, Handbook of Mathematical Functions (1964), 6.3.5 and 6.3.18.
    """
    found = 0.0
    while x < 10:
        found -= 1 / x
        x += 1
    square = 1 / x**2
    series = square * (
        1 / 12 - square * (1 / 120 - square * (1 / 252 - square * (1 / 240 - square / 132)))
    )
    return found + math.log(x) - 1 / (2 * x) - series


def trigamma(x: float) -> float:
    """Second derivative of log gamma for x above 0; relative error 1e-12.

    Source: Abramowitz and Stegun (1964), 6.4.6 and 6.4.12.
    """
    found = 0.0
    while x < 10:
        found += 1 / x**2
        x += 1
    square = 1 / x**2
    series = square * (
        1 / 6 - square * (1 / 30 - square * (1 / 42 - square * (1 / 30 - square * 5 / 66)))
    )
    return found + (1 + 1 / (2 * x) + series) / x


def trigamma_inverse(value: float) -> float:
    """The x of which `trigamma(x)` is the value, above 0: Newton's steps on 1 / trigamma.

    That is convex and nearly straight, so that the steps converge from one side.
    Source: Smyth (2004), appendix.
    """
    if value > 1e7:
        return 1 / math.sqrt(value)
    if value < 1 / _LARGE:
        return 1 / value
    x = 0.5 + 1 / value
    for _ in range(50):
        current = trigamma(x)
        step = current * (1 - current / value) / _tetragamma(x)
        x += step
        if abs(step) < 1e-12 * x:
            break
    return x


def _tetragamma(x: float) -> float:
    """Third derivative of log gamma for x above 0.  Source: Abramowitz and Stegun, 6.4.13."""
    found = 0.0
    while x < 10:
        found -= 2 / x**3
        x += 1
    square = 1 / x**2
    series = square * (1 / 2 - square * (1 / 6 - square * (1 / 6 - square * 3 / 10)))
    return found - square * (1 + 1 / x + series)
