"""Intervals are tested as intervals: on draws from a known law they hold the truth."""

from __future__ import annotations

import random
from statistics import fmean

import pytest
from scipy.special import stdtrit

from shardmark.analysis.statistics import Estimate, estimate_mean, estimate_ratio, t_quantile

DRAWS = 2000


@pytest.mark.parametrize("degrees", [*range(1, 32), 100, 199])
def test_quantile_is_scipys(degrees: int) -> None:
    assert t_quantile(degrees) == pytest.approx(stdtrit(degrees, 0.975), rel=1e-9)


def test_quantile_refuses_less_than_one_degree() -> None:
    with pytest.raises(ValueError, match="degrees of freedom must be at least 1, got 0"):
        t_quantile(0)


@pytest.mark.parametrize("count", [2, 3, 5, 10])
def test_interval_of_a_mean_holds_the_truth(count: int) -> None:
    """About 95 % of the time; three standard errors of that share are 1.5 %."""
    draw = random.Random(count)
    held = 0
    for _ in range(DRAWS):
        estimate = estimate_mean([draw.gauss(100, 5) for _ in range(count)])
        assert estimate.low is not None
        assert estimate.high is not None
        held += estimate.low < 100 < estimate.high
    assert held / DRAWS == pytest.approx(0.95, abs=0.015)


@pytest.mark.parametrize("count", [3, 5, 10])
def test_interval_of_a_ratio_holds_the_truth(count: int) -> None:
    """Also where both values of a pair share most of their noise."""
    draw = random.Random(count)
    held = 0
    for _ in range(DRAWS):
        bases = [draw.gauss(100, 5) for _ in range(count)]
        estimate = estimate_ratio([1.5 * base + draw.gauss(0, 2) for base in bases], bases)
        assert estimate.low is not None
        assert estimate.high is not None
        held += estimate.low < 1.5 < estimate.high
    assert held / DRAWS == pytest.approx(0.95, abs=0.015)


def test_pairing_cancels_what_disturbs_both() -> None:
    estimate = estimate_ratio([180, 200, 220], [90, 100, 110])
    assert estimate.value == pytest.approx(2)
    assert estimate.half_width == pytest.approx(0, abs=1e-12)


def test_known_interval() -> None:
    estimate = estimate_mean([1.0, 2.0, 3.0])
    assert estimate.value == 2
    assert estimate.half_width == pytest.approx(4.302652729911275 / 3**0.5)


@pytest.mark.parametrize("estimate", [estimate_mean([3.0]), estimate_ratio([6.0], [2.0])])
def test_one_repeat_has_no_interval(estimate: Estimate) -> None:
    assert estimate == Estimate(value=3.0, low=None, high=None, n=1)
    assert estimate.half_width is None


def test_values_are_needed() -> None:
    with pytest.raises(ValueError, match="an estimate needs at least one value"):
        estimate_mean([])
    for numerators, denominators in (([], []), ([1.0], [1.0, 2.0])):
        with pytest.raises(ValueError, match="as many numerators as denominators"):
            estimate_ratio(numerators, denominators)


def test_ratio_is_that_of_the_means() -> None:
    numerators, denominators = [3.0, 9.0], [1.0, 2.0]
    ratio = estimate_ratio(numerators, denominators)
    assert ratio.value == pytest.approx(fmean(numerators) / fmean(denominators))
