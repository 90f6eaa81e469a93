"""Paired differences: how large, how sure, and how sure where many are looked at together."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from statistics import fmean
from typing import NamedTuple

from shardmark.analysis.statistics.intervals import (
    Estimate,
    log_ratios,
    middle_of,
    ratio_of,
    t_probability,
)

ALONE = 2
"""The ordinary test of the pair alone must show the difference, too, at half the family's level."""
_SHARED = 1 / 4
"""Squared correlation of the variances of two comparisons with one row, if all rows vary alike."""
_USED_UP = 3
"""Comparisons: two for the fit of the prior's variance and degrees, one for what does not fit."""
_LARGEST_HALF = 1e7
"""Half the prior's degrees, beyond which a prior is as good as exact."""


class Spread(NamedTuple):
    """Variance of one comparison's log ratios, with its degrees of freedom."""

    variance: float
    degrees: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """A paired difference of one metric: how large, and how sure."""

    ratio: Estimate
    """With a single 95 % interval, not corrected for the number of comparisons."""
    p_value: float
    """Two-sided, of this comparison alone, with no more than its own repeats."""
    p_moderated: float | None = None
    """With what comparisons with the same row say of the noise; None where there are none."""
    p_corrected: float
    """Corrected for all verdicts of the comparison: what decides."""
    spread: Spread | None = None
    """Of the log ratios, as far as their middle depends on it; None where they do not vary."""

    @property
    def percent(self) -> float:
        return 100 * (self.ratio.value - 1)


def paired_effect(
    numerators: Sequence[float], denominators: Sequence[float], *, exact: bool = True
) -> Effect | None:
    """How the first values differ from the second ones of the same pairs; all above zero.

    Student's t test of the log ratios, Yuen's from ten pairs on.  None for fewer than two pairs and
    for values that are not above zero.  A difference that is the same in all pairs is sure where
    the quantity is `exact`, as a number of bytes is; of a quality it says only that the repeats
    share a seed.  Source: Yuen, Biometrika 61 (1974), 165-170, for pairs as in Wilcox, Introduction
    to Robust Estimation and Hypothesis Testing, 3rd ed. (2012), section 4.3.
    """
    count = len(numerators)
    if count < 2 or min(*numerators, *denominators) <= 0:
        return None
    middle = middle_of(log_ratios(numerators, denominators))
    noisy = middle.standard_error > 0
    spread = Spread(count * middle.standard_error**2, middle.degrees) if noisy else None
    p_value = middle.p_value if noisy or exact else 1.0
    ratio = ratio_of(middle, count)
    return Effect(ratio=ratio, p_value=p_value, p_corrected=p_value, spread=spread)


def with_one_row(effects: Sequence[Effect]) -> tuple[Effect, ...]:
    """The effects of comparisons that share a row, each with the noise that they see together."""
    prior = prior_of([effect.spread for effect in effects if effect.spread is not None])
    return tuple(replace(effect, p_moderated=_moderated(effect, prior)) for effect in effects)


def _moderated(effect: Effect, prior: Spread | None) -> float:
    """The p value with the variance of `moderated`."""
    if effect.spread is None or prior is None:
        return effect.p_value
    spread = moderated(effect.spread, prior)
    error = math.sqrt(spread.variance / effect.ratio.n)
    return t_probability(math.log(effect.ratio.value) / error, spread.degrees)


def moderated(own: Spread, prior: Spread) -> Spread:
    """The variance to test with, and how well it is known; cautious where the two disagree.

    Smyth's mean of both, weighted by their degrees, but never less than the comparison's own: one
    noisy row among quiet ones would else be called different much too often.
    """
    degrees = own.degrees + prior.degrees
    mean = (own.degrees * own.variance + prior.degrees * prior.variance) / degrees
    return Spread(max(mean, own.variance), degrees)


def prior_of(spreads: Sequence[Spread]) -> Spread | None:
    """What comparisons that share a row say together of the variance of one; None for up to three.

    From the variances' logarithms: how far they differ beyond what their degrees explain.  Where
    that is not at all, the prior's degrees would be infinite; they end at those that the mean
    variance has.  With n comparisons these are 4 n / (n + 3) times those of one, because the shared
    row's noise is in all of them, and not n times.  Three of n comparisons count as used up by the
    fit.  Source: Smyth, Statistical Applications in Genetics and Molecular Biology 3 (2004),
    article 3, sections 4 to 6.2.
    """
    known = [spread for spread in spreads if spread.variance > 0]
    count = len(known)
    if count <= _USED_UP:
        return None
    # Slow to import.  zeta(2, x) is many times as fast as polygamma(1, x), which calls it.
    from scipy.special import digamma, zeta

    def bias(half: float) -> float:
        """Of the logarithm of a variance with twice so many degrees."""
        return float(digamma(half)) - math.log(half)

    halves = [spread.degrees / 2 for spread in known]
    logs = [math.log(s.variance) - bias(half) for s, half in zip(known, halves, strict=True)]
    middle = fmean(logs)
    variance = math.fsum((log - middle) ** 2 for log in logs) / (count - 1)
    beyond = variance / (1 - _SHARED) - fmean(float(zeta(2, half)) for half in halves)
    mean_degrees = fmean(spread.degrees for spread in known)
    degrees = mean_degrees * (count / (1 + _SHARED * (count - 1)) - 1)
    if beyond > 1 / _LARGEST_HALF:
        from scipy.optimize import brentq

        # 1/x + 1/(2 x^2) < zeta(2, x) < 1/x + 1/x^2
        low, high = ((1 + math.sqrt(1 + 4 * c * beyond)) / (2 * beyond) for c in (0.4, 1.1))
        half = float(brentq(lambda x: zeta(2, x) - beyond, low, high, rtol=1e-12))
        middle += bias(half)
        degrees = min(2 * half, degrees)
    return Spread(math.exp(middle), degrees * (1 - _USED_UP / count))


def between_all(
    values: Sequence[Mapping[int, float]], *, exact: bool = True
) -> dict[tuple[int, int], Effect]:
    """Of each pair of rows, from their values by repeat, the first over the second.

    Each row is seen as the one that all others are held against; of a pair's two p values that
    follow the larger one counts.  Pairs without two common repeats are left out.
    """
    effects = {}
    for pair in combinations(range(len(values)), 2):
        above, below = (values[place] for place in pair)
        common = sorted(above.keys() & below.keys())
        effect = paired_effect([above[r] for r in common], [below[r] for r in common], exact=exact)
        if effect is not None:
            effects[pair] = effect
    largest: dict[tuple[int, int], float] = {}
    for place in range(len(values)):
        pairs = [pair for pair in effects if place in pair]
        seen = with_one_row([effects[pair] for pair in pairs])
        for pair, effect in zip(pairs, seen, strict=True):
            largest[pair] = max(largest.get(pair, 0.0), effect.p_moderated or 0.0)
    return {pair: replace(effects[pair], p_moderated=largest[pair]) for pair in effects}


def holm(effects: Sequence[Effect]) -> tuple[Effect, ...]:
    """The effects with p values corrected as one family, in their order.

    Whoever calls an effect shown where `p_corrected` is at most a, is wrong about any of them with
    a probability of at most a, however they depend on one another, if the moderated p values are
    right.  Where noise is too unequal for that, the ordinary p value bounds what one row can do: no
    corrected one is below twice that.  Source: Holm, Scandinavian J. Statistics 6 (1979), 65-70.
    """
    least = ALONE if len(effects) > 1 else 1
    p_values = [
        effect.p_value if effect.p_moderated is None else effect.p_moderated for effect in effects
    ]
    order = sorted(range(len(effects)), key=lambda index: p_values[index])
    corrected = list(effects)
    largest = 0.0
    for done, index in enumerate(order):
        largest = max(largest, (len(effects) - done) * p_values[index])
        p_corrected = min(1.0, max(largest, least * effects[index].p_value))
        corrected[index] = replace(effects[index], p_corrected=p_corrected)
    return tuple(corrected)
