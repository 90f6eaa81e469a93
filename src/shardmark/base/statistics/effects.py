"""Paired differences with p-values, moderated variances and correction for multiple tests."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from statistics import fmean
from typing import NamedTuple, TypeVar

from shardmark.base.statistics.intervals import (
    Estimate,
    estimate_difference,
    log_ratios,
    ratio_of,
    t_probability,
    trimmed_mean,
)

MIN_SINGLE_FACTOR = 2
"""A corrected p-value is at least this many times the ordinary p-value of the pair."""
_SHARED = 1 / 4
"""Squared correlation of the variances of two comparisons with the same row."""
_FIT_DEGREES = 3
"""Comparisons used by the fit: two for the prior's parameters, one for its lack of fit."""
_MAX_HALF_DEGREES = 1e7
"""Half of the prior's degrees of freedom above which the prior is treated as exact."""


class Spread(NamedTuple):
    """The variance of log ratios or differences, with its degrees of freedom."""

    variance: float
    degrees: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedTest(ABC):
    """A test of the paired values of two rows."""

    p_value: float
    """Two-sided p-value from the repeats of this comparison alone."""
    p_moderated: float | None = None
    """P-value with a variance from all comparisons with the same row; None if there are none."""
    p_corrected: float
    """P-value corrected for all verdicts of the comparison, on which the verdict is based."""
    spread: Spread | None = None
    """Variance of the pairs' location estimate; None if the pairs do not vary."""

    @property
    @abstractmethod
    def located(self) -> tuple[float, int]:
        """The location estimate on the scale of the variance, and the number of pairs."""


Tested = TypeVar("Tested", bound=PairedTest)


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference(PairedTest):
    """The paired difference of a quality between two rows; a quality can be zero or negative."""

    estimate: Estimate
    """Difference with a 95 % interval that is not corrected for the number of comparisons."""

    @property
    def located(self) -> tuple[float, int]:
        return self.estimate.value, self.estimate.n


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect(PairedTest):
    """The paired ratio of a positive metric between two rows."""

    ratio: Estimate
    """Ratio with a 95 % interval that is not corrected for the number of comparisons."""

    @property
    def located(self) -> tuple[float, int]:
        return math.log(self.ratio.value), self.ratio.n

    @property
    def percent(self) -> float:
        return 100 * (self.ratio.value - 1)


def paired_effect(
    numerators: Sequence[float], denominators: Sequence[float], *, exact: bool = True
) -> Effect | None:
    """Test the ratio of paired positive values.

    Student's t test of the log ratios; Yuen's test from ten pairs on.  None for fewer than two
    pairs and for values that are not positive.  An equal ratio in all pairs is significant for
    `exact` quantities such as bytes; for a quality it only shows that the repeats share a seed.
    Source: Yuen, Biometrika 61 (1974), 165-170, for pairs as in Wilcox, Introduction to Robust
    Estimation and Hypothesis Testing, 3rd ed. (2012), section 4.3.
    """
    count = len(numerators)
    if count < 2 or min(*numerators, *denominators) <= 0:
        return None
    mean = trimmed_mean(log_ratios(numerators, denominators))
    noisy = mean.standard_error > 0
    spread = Spread(count * mean.standard_error**2, mean.degrees) if noisy else None
    p_value = mean.p_value if noisy or exact else 1.0
    ratio = ratio_of(mean, count)
    return Effect(ratio=ratio, p_value=p_value, p_corrected=p_value, spread=spread)


def paired_difference(above: Sequence[float], below: Sequence[float]) -> Difference | None:
    """Test the difference of paired values by Student's t test; None for fewer than two pairs.

    An equal difference in all pairs proves nothing: qualities are not counted, as bytes are.
    """
    if len(above) < 2:
        return None
    differences = [value - other for value, other in zip(above, below, strict=True)]
    mean = trimmed_mean(differences)
    noisy = mean.standard_error > 0
    spread = Spread(len(above) * mean.standard_error**2, mean.degrees) if noisy else None
    p_value = mean.p_value if noisy else 1.0
    estimate = estimate_difference(differences)
    return Difference(estimate=estimate, p_value=p_value, p_corrected=p_value, spread=spread)


def with_shared_noise(effects: Sequence[Tested]) -> tuple[Tested, ...]:
    """Add moderated p-values to effects that share a row, from their common variance."""
    prior = prior_of([effect.spread for effect in effects if effect.spread is not None])
    return tuple(replace(effect, p_moderated=_moderated(effect, prior)) for effect in effects)


def _moderated(effect: PairedTest, prior: Spread | None) -> float:
    """Return the p-value with the variance of `moderated`."""
    if effect.spread is None or prior is None:
        return effect.p_value
    spread = moderated(effect.spread, prior)
    location, count = effect.located
    return t_probability(location / math.sqrt(spread.variance / count), spread.degrees)


def moderated(spread: Spread, prior: Spread) -> Spread:
    """Return the moderated variance of a comparison, with its degrees of freedom.

    Smyth's mean of both, weighted by the degrees of freedom, but at least the comparison's
    variance: otherwise a noisy row among quiet rows would too often be called different.
    """
    degrees = spread.degrees + prior.degrees
    mean = (spread.degrees * spread.variance + prior.degrees * prior.variance) / degrees
    return Spread(max(mean, spread.variance), degrees)


def prior_of(spreads: Sequence[Spread]) -> Spread | None:
    """Fit the prior of the variance to comparisons that share a row; None for up to three.

    The fit uses how far the logarithms of the variances differ beyond what their degrees of freedom
    explain.  If they do not, the prior's degrees would be infinite; they are limited to those of
    the mean variance.  With n comparisons these are 4 n / (n + 3) times those of one, because the
    noise of the shared row is in all of them.  The fit uses up three of the n comparisons.  Source:
    Smyth, Statistical Applications in Genetics and Molecular Biology 3 (2004), article 3,
    sections 4 to 6.2.
    """
    nonzero = [spread for spread in spreads if spread.variance > 0]
    count = len(nonzero)
    if count <= _FIT_DEGREES:
        return None
    # Slow to import.  zeta(2, x) is much faster than polygamma(1, x), which calls it.
    from scipy.special import digamma, zeta

    def bias(half: float) -> float:
        """Return the bias of the logarithm of a variance, for half its degrees of freedom."""
        return float(digamma(half)) - math.log(half)

    halves = [spread.degrees / 2 for spread in nonzero]
    logs = [math.log(s.variance) - bias(half) for s, half in zip(nonzero, halves, strict=True)]
    middle = fmean(logs)
    variance = math.fsum((log - middle) ** 2 for log in logs) / (count - 1)
    beyond = variance / (1 - _SHARED) - fmean(float(zeta(2, half)) for half in halves)
    mean_degrees = fmean(spread.degrees for spread in nonzero)
    degrees = mean_degrees * (count / (1 + _SHARED * (count - 1)) - 1)
    if beyond > 1 / _MAX_HALF_DEGREES:
        from scipy.optimize import brentq

        # 1/x + 1/(2 x^2) < zeta(2, x) < 1/x + 1/x^2
        low, high = ((1 + math.sqrt(1 + 4 * c * beyond)) / (2 * beyond) for c in (0.4, 1.1))
        half = float(brentq(lambda x: zeta(2, x) - beyond, low, high, rtol=1e-12))
        middle += bias(half)
        degrees = min(2 * half, degrees)
    return Spread(math.exp(middle), degrees * (1 - _FIT_DEGREES / count))


def pairwise_effects(values: Sequence[Mapping[int, float]]) -> dict[tuple[int, int], Effect]:
    """Return the effects of all pairs of rows, the first over the second, from values by repeat.

    The noise is moderated over the comparisons with either row of the pair, and the larger of the
    two p-values counts.  Pairs with fewer than two common repeats are omitted.
    """
    effects = {}
    for pair in combinations(range(len(values)), 2):
        above, below = (values[place] for place in pair)
        common = sorted(above.keys() & below.keys())
        effect = paired_effect([above[r] for r in common], [below[r] for r in common])
        if effect is not None:
            effects[pair] = effect
    largest: dict[tuple[int, int], float] = {}
    for place in range(len(values)):
        pairs = [pair for pair in effects if place in pair]
        moderated_effects = with_shared_noise([effects[pair] for pair in pairs])
        for pair, effect in zip(pairs, moderated_effects, strict=True):
            largest[pair] = max(largest.get(pair, 0.0), effect.p_moderated or 0.0)
    return {pair: replace(effects[pair], p_moderated=largest[pair]) for pair in effects}


def holm(effects: Sequence[Tested]) -> tuple[Tested, ...]:
    """Correct the p-values of one family of effects, which keep their order.

    If effects with `p_corrected` of at most a are called significant, the probability of one or
    more errors is at most a, whatever the dependence of the effects, if the moderated p-values are
    correct.  Unequal noise can make them too small; therefore a corrected p-value is at least twice
    the ordinary one.  Source: Holm, Scandinavian J. Statistics 6 (1979), 65-70.
    """
    least = MIN_SINGLE_FACTOR if len(effects) > 1 else 1
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
