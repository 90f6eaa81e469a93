"""Moderated variances: what a few repeats cannot tell of a comparison's noise, the others add.

Source: Smyth, Statistical Applications in Genetics and Molecular Biology 3 (2004), article 3,
sections 4 to 6.2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

_SHARED = 1 / 4
"""Squared correlation of the variances of two comparisons with one row, if all rows vary alike."""
_USED_UP = 3
"""Comparisons: two for the fit of the prior's variance and degrees, one for what does not fit."""
_LARGEST_HALF = 1e7
"""Half the prior's degrees, beyond which a prior is as good as exact."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Variance of one comparison's log ratios, with its degrees of freedom."""

    variance: float
    degrees: float


def moderated(own: Spread, prior: Spread | None) -> Spread:
    """The variance to test with, and how well it is known; cautious where the two disagree.

    Smyth's mean of both, weighted by their degrees, but never less than the comparison's own: one
    noisy row among quiet ones would else be called different much too often.
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
    known = [spread for spread in spreads if spread.variance > 0]
    count = len(known)
    if count <= _USED_UP:
        return None
    from scipy.special import digamma  # here and below: half a second that `compare` may not need

    halves = [spread.degrees / 2 for spread in known]
    logs = [
        math.log(spread.variance) - float(digamma(half)) + math.log(half)
        for spread, half in zip(known, halves, strict=True)
    ]
    middle = fmean(logs)
    expected = fmean(trigamma(half) for half in halves)
    variance = math.fsum((log - middle) ** 2 for log in logs) / (count - 1)
    beyond = variance / (1 - _SHARED) - expected
    mean_degrees = fmean(spread.degrees for spread in known)
    degrees = mean_degrees * (count / (1 + _SHARED * (count - 1)) - 1)
    if beyond > 1 / _LARGEST_HALF:
        half = trigamma_inverse(beyond)
        middle += float(digamma(half)) - math.log(half)
        degrees = min(2 * half, degrees)
    return Spread(math.exp(middle), degrees * (1 - _USED_UP / count))


def trigamma_inverse(value: float) -> float:
    """The x above 0 of which trigamma is the value; 1/x + 1/(2 x^2) < trigamma(x) < 1/x + 1/x^2."""
    from scipy.optimize import brentq

    low, high = ((1 + math.sqrt(1 + 4 * c * value)) / (2 * value) for c in (0.4, 1.1))
    return float(brentq(lambda x: trigamma(x) - value, low, high, rtol=1e-12))


def trigamma(x: float) -> float:
    from scipy.special import zeta  # many times as fast as `polygamma(1, x)`, which calls it

    return float(zeta(2, x))
