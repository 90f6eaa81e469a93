"""Moderated variances: a prior is as sure as it says."""

from __future__ import annotations

import math
import random
from statistics import fmean

import pytest
from scipy import special
from shardmark.analysis.statistics.moderation import (
    Spread,
    moderated,
    prior_of,
    trigamma_inverse,
)


@pytest.mark.parametrize("value", [1e-7, 1e-3, 0.5, 1.0, 9.99, 57.0, 1e4, 1e7])
def test_trigammas_inverse(value: float) -> None:
    assert special.polygamma(1, trigamma_inverse(value)) == pytest.approx(value, rel=1e-7)


def spreads(draw: random.Random, count: int, degrees: int, prior: float) -> list[Spread]:
    """Of independent comparisons whose true variances come from a law of so many degrees."""

    def chi_square(of: float) -> float:
        return draw.gammavariate(of / 2, 2)

    found = []
    for _ in range(count):
        true = 4.0 if math.isinf(prior) else 4.0 * prior / chi_square(prior)
        found.append(Spread(true * chi_square(degrees) / degrees, degrees))
    return found


def test_prior_is_found_again() -> None:
    """The fit expects that a shared row makes variances alike: it finds fewer degrees than true."""
    draw = random.Random(0)
    found = [prior_of(spreads(draw, 400, 20, 6.0)) for _ in range(30)]
    known = [one for one in found if one is not None]
    assert len(known) == len(found)
    assert fmean(one.variance for one in known) == pytest.approx(4.0, rel=0.1)
    assert 3.5 < fmean(one.degrees for one in known) < 6.0


def test_equal_variances_end_at_what_the_shared_row_allows() -> None:
    """Of n comparisons with one row, 4 n / (n + 3) times the degrees of one, less their own."""
    found = prior_of([Spread(2.0, 2)] * 28)
    assert found is not None
    assert found.degrees == pytest.approx((4 * 28 / 31 - 1) * 2 * 25 / 28)
    assert found.degrees + 2 < 2 * 4


def test_few_comparisons_say_nothing_of_one_another() -> None:
    assert prior_of([]) is None
    assert prior_of([Spread(1.0, 2)] * 3) is None
    assert prior_of([*[Spread(1.0, 2)] * 3, Spread(0.0, 2)]) is None


def test_moderation_never_makes_a_noisy_comparison_calm() -> None:
    prior = Spread(1.0, 6.0)
    calm, noisy = moderated(Spread(0.2, 2), prior), moderated(Spread(9.0, 2), prior)
    assert calm == Spread((6 * 1.0 + 2 * 0.2) / 8, 8)
    assert noisy == Spread(9.0, 8)
    assert moderated(Spread(9.0, 2), None) == Spread(9.0, 2)
