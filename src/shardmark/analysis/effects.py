"""Paired differences: how large, how sure, and how sure where many are looked at together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardmark.analysis.statistics import (
    Estimate,
    log_ratios,
    middle_of,
    ratio_of,
    two_sided_p_value,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """A paired difference of one metric: how large, how large beside its spread, how sure."""

    ratio: Estimate
    """With a single 95 % interval, not corrected for the number of comparisons."""
    standardised: float | None
    """Mean of the logarithms' differences over their standard deviation, corrected for few pairs;
    None below three pairs and where they do not differ from one another."""
    p_value: float
    """Two-sided, of this comparison alone."""
    p_corrected: float
    """Corrected for all verdicts of the comparison."""

    @property
    def percent(self) -> float:
        return 100 * (self.ratio.value - 1)


def paired_effect(numerators: Sequence[float], denominators: Sequence[float]) -> Effect | None:
    """How the first values differ from the second ones of the same pairs; all above zero.

    Student's t test of the log ratios, Yuen's from ten pairs on.  The standardised effect is
    Cohen's d_z with Hedges' correction.  None for fewer than two pairs and for values that are not
    above zero.  Sources: Yuen, Biometrika 61 (1974), 165-170, for pairs as in Wilcox, Introduction
    to Robust Estimation and Hypothesis Testing, 3rd ed. (2012), section 4.3; Hedges, J. Educational
    Statistics 6 (1981), 107-128; Algina, Keselman and Penfield, Psychological Methods 10 (2005),
    317-328, for the spread of trimmed values.
    """
    if len(numerators) < 2 or min(*numerators, *denominators) <= 0:
        return None
    middle = middle_of(log_ratios(numerators, denominators))
    if middle.standard_error > 0:
        p_value = two_sided_p_value(middle.value / middle.standard_error, middle.degrees)
    else:
        p_value = 1.0 if middle.value == 0 else 0.0
    standardised = None
    if middle.spread > 0 and middle.degrees > 1:
        standardised = middle.value / middle.spread * _few_values_correction(middle.degrees)
    return Effect(
        ratio=ratio_of(middle, len(numerators)),
        standardised=standardised,
        p_value=p_value,
        p_corrected=p_value,
    )


def holm(effects: Sequence[Effect]) -> tuple[Effect, ...]:
    """The effects with p values corrected as one family, in their order.

    Whoever calls an effect shown where `p_corrected` is at most a, is wrong about any of them with
    a probability of at most a, however they depend on one another.  Source: Holm, Scandinavian J.
    Statistics 6 (1979), 65-70.
    """
    order = sorted(range(len(effects)), key=lambda index: effects[index].p_value)
    corrected = list(effects)
    largest = 0.0
    for done, index in enumerate(order):
        largest = max(largest, min(1.0, (len(effects) - done) * effects[index].p_value))
        corrected[index] = replace(effects[index], p_corrected=largest)
    return tuple(corrected)


def _few_values_correction(degrees: int) -> float:
    """Exact factor that makes a standardised mean of normal values unbiased; degrees from 2."""
    gammas = math.lgamma(degrees / 2) - math.lgamma((degrees - 1) / 2)
    return math.exp(gammas) / math.sqrt(degrees / 2)
