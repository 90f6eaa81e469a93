"""Paired differences: how large, how sure, and how sure where many are looked at together."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from shardmark.analysis.statistics.intervals import (
    Estimate,
    log_ratios,
    middle_of,
    ratio_of,
    t_probability,
)
from shardmark.analysis.statistics.moderation import Spread, moderated, prior_of

ALONE = 2
"""The ordinary test of the pair alone must show the difference, too, at half the family's level."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """A paired difference of one metric: how large, how large beside its spread, how sure."""

    ratio: Estimate
    """With a single 95 % interval, not corrected for the number of comparisons."""
    standardised: float | None
    """Mean of the logarithms' differences over their standard deviation, corrected for few pairs;
    None below three pairs and where they do not differ from one another."""
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

    Student's t test of the log ratios, Yuen's from ten pairs on.  The standardised effect is
    Cohen's d_z with Hedges' correction.  None for fewer than two pairs and for values that are not
    above zero.  A difference that is the same in all pairs is sure where the quantity is `exact`,
    as a number of bytes is; of a quality it says only that the repeats share a seed.  Sources:
    Yuen, Biometrika 61 (1974), 165-170, for pairs as in Wilcox, Introduction to Robust Estimation
    and Hypothesis Testing, 3rd ed. (2012), section 4.3; Hedges, J. Educational Statistics 6 (1981),
    107-128; Algina, Keselman and Penfield, Psychological Methods 10 (2005), 317-328, for the spread
    of trimmed values.
    """
    count = len(numerators)
    if count < 2 or min(*numerators, *denominators) <= 0:
        return None
    middle = middle_of(log_ratios(numerators, denominators))
    spread = None
    if middle.standard_error > 0:
        p_value = t_probability(middle.value / middle.standard_error, middle.degrees)
        spread = Spread(count * middle.standard_error**2, middle.degrees)
    else:
        p_value = 0.0 if exact and middle.value != 0 else 1.0
    standardised = None
    if middle.spread > 0 and middle.degrees > 1:
        standardised = middle.value / middle.spread * _few_values_correction(middle.degrees)
    return Effect(
        ratio=ratio_of(middle, count),
        standardised=standardised,
        p_value=p_value,
        p_corrected=p_value,
        spread=spread,
    )


def with_one_row(effects: Sequence[Effect]) -> tuple[Effect, ...]:
    """The effects of comparisons that share a row, each with the noise that they see together."""
    pairs = zip(effects, _moderated_p_values(effects), strict=True)
    return tuple(replace(effect, p_moderated=p_value) for effect, p_value in pairs)


def _moderated_p_values(effects: Sequence[Effect]) -> list[float]:
    prior = prior_of([effect.spread for effect in effects if effect.spread is not None])
    return [_moderated_p_value(effect, prior) for effect in effects]


def _moderated_p_value(effect: Effect, prior: Spread | None) -> float:
    if effect.spread is None or prior is None:
        return effect.p_value
    spread = moderated(effect.spread, prior)
    error = math.sqrt(spread.variance / effect.ratio.n)
    return t_probability(math.log(effect.ratio.value) / error, spread.degrees)


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
        repeats = sorted(above.keys() & below.keys())
        effect = paired_effect(
            [above[repeat] for repeat in repeats],
            [below[repeat] for repeat in repeats],
            exact=exact,
        )
        if effect is not None:
            effects[pair] = effect
    moderated_p: dict[tuple[int, int], float] = {}
    for place in range(len(values)):
        pairs = [pair for pair in effects if place in pair]
        p_values = _moderated_p_values([effects[pair] for pair in pairs])
        for pair, p_value in zip(pairs, p_values, strict=True):
            moderated_p[pair] = max(moderated_p.get(pair, 0.0), p_value)
    return {pair: replace(effects[pair], p_moderated=moderated_p[pair]) for pair in effects}


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


def _few_values_correction(degrees: int) -> float:
    """Exact factor that makes a standardised mean of normal values unbiased; degrees from 2."""
    gammas = math.lgamma(degrees / 2) - math.lgamma((degrees - 1) / 2)
    return math.exp(gammas) / math.sqrt(degrees / 2)
