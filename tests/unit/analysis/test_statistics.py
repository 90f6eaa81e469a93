"""Intervals are tested as intervals: on draws from a known law they hold the truth."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from statistics import NormalDist, fmean, stdev

import numpy as np
import pytest
from scipy.special import stdtrit

from shardmark.analysis.statistics.intervals import (
    ROBUST_FROM,
    Estimate,
    estimate_difference,
    estimate_mean,
    estimate_ratio,
    t_probability,
    two_sided_p_value,
)

DRAWS = 1000
COUNTS = (2, 3, 5, 9, 10, 20)
LEAST, MOST = 0.925, 0.975
"""Of the intervals hold the truth; the standard error of that share is 0.7 %."""

SKEW = 0.2
"""Standard deviation of the logarithm: more than a machine's own noise has."""


def normal(draw: random.Random) -> float:
    return draw.gauss(100, 5)


def skewed(draw: random.Random) -> float:
    return 100 * draw.lognormvariate(0, SKEW)


def disturbed(draw: random.Random, share: float = 0.05) -> float:
    """That share of the repeats takes 10 to 50 % longer, on top of a skewed law."""
    longer = draw.uniform(1.1, 1.5) if draw.random() < share else 1.0
    return 100 * draw.lognormvariate(0, 0.03) * longer


def half_disturbed(draw: random.Random) -> float:
    """One pair of two such values in twenty is disturbed."""
    return disturbed(draw, 0.025)


def truth_of_skewed(count: int) -> float:
    """The law's mean, or its mean between the first and the last tenth."""
    mean = 100 * math.exp(SKEW**2 / 2)
    if count < ROBUST_FROM:
        return mean
    unit = NormalDist()
    edge = unit.inv_cdf(0.9)
    return mean * (unit.cdf(edge - SKEW) - unit.cdf(-edge - SKEW)) / 0.8


def share_held(draw_estimate: Callable[[], Estimate], truth: float) -> float:
    held = 0
    for _ in range(DRAWS):
        estimate = draw_estimate()
        low, high = estimate.low, estimate.high
        # No interval for all the noise there is holds the truth as a wide one would.
        held += estimate.too_noisy or (low is not None and high is not None and low < truth < high)
    return held / DRAWS


def test_p_value_is_that_of_a_t_test() -> None:
    values = [0.3, 1.1, 0.7, -0.2]
    third = (fmean(values) / (stdev(values) / 2)) / math.sqrt(3)
    three_degrees = 1 - 2 / math.pi * (math.atan(third) + third / (1 + third**2))
    assert two_sided_p_value(values) == pytest.approx(three_degrees)
    assert two_sided_p_value([1.0, 1.0]) == 0
    assert two_sided_p_value([0.0, 0.0]) == 1
    assert t_probability(-2.0, 3.3) == pytest.approx(0.1309588644394494)  # SciPy's t.sf


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("law", [normal, skewed, disturbed])
def test_interval_of_a_mean_holds_the_truth(
    law: Callable[[random.Random], float], count: int
) -> None:
    """Of the undisturbed law, where some repeats are disturbed."""
    draw = random.Random(count)
    truth = truth_of_skewed(count) if law is skewed else 100.0
    share = share_held(lambda: estimate_mean([law(draw) for _ in range(count)]), truth)
    assert LEAST <= share <= MOST


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("law", [normal, skewed, half_disturbed])
def test_interval_of_a_ratio_holds_the_truth(
    law: Callable[[random.Random], float], count: int
) -> None:
    """Though the machine's mood doubles the values of some repeats, in both of a pair."""
    draw = random.Random(count)

    def estimate() -> Estimate:
        moods = [draw.uniform(1, 2) for _ in range(count)]
        return estimate_ratio(
            [1.5 * mood * law(draw) for mood in moods], [mood * law(draw) for mood in moods]
        )

    assert LEAST <= share_held(estimate, 1.5) <= MOST


@pytest.mark.parametrize(("count", "left_out"), [(9, 0), (10, 1), (19, 1), (20, 2)])
def test_trimmed_interval_is_tukey_and_mclaughlins(count: int, left_out: int) -> None:
    draw = random.Random(count)
    values = sorted(normal(draw) for _ in range(count))
    left = count - 2 * left_out
    drawn_in = np.clip(values, values[left_out], values[-left_out - 1])
    error = drawn_in.std(ddof=1) * math.sqrt((count - 1) / (left * (left - 1)))
    longer = 1 + 1 / (4 * count) if left_out else 1.0
    estimate = estimate_difference(draw.sample(values, count))
    assert estimate.value == pytest.approx(fmean(values[left_out : count - left_out]))
    assert estimate.half_width == pytest.approx(stdtrit(left - 1, 0.975) * error * longer)


def test_known_intervals() -> None:
    """Differences may have either sign; of a positive quantity the logarithm has the interval."""
    half = 4.302652729911275 / 3**0.5
    assert estimate_difference([1.0, 2.0, 3.0]).half_width == pytest.approx(half)
    estimate = estimate_mean([1.0, 2.0, 3.0])
    assert estimate.value == 2
    assert estimate.low == pytest.approx(2 / math.exp(half / 2))
    assert estimate.high == pytest.approx(2 * math.exp(half / 2))
    assert estimate_mean([0.0, 0.0, 1.0]).low == 0


def test_too_much_noise_has_no_interval() -> None:
    """As of two repeats of which one was of another model."""
    for estimate in (
        estimate_mean([484.0, 3820.0]),
        estimate_ratio([484.0, 3820.0], [500.0, 500.0]),
        estimate_ratio([1e200, 1e-200], [1.0, 1.0]),
    ):
        assert estimate.too_noisy
        assert (estimate.low, estimate.high, estimate.half_width) == (None, None, None)
        assert estimate.n == 2
    assert not estimate_mean([484.0, 520.0]).too_noisy


@pytest.mark.parametrize(
    ("estimate", "value", "n"),
    [
        (estimate_mean([3.0]), 3.0, 1),
        (estimate_ratio([6.0], [2.0]), 3.0, 1),
        (estimate_ratio([0.0, 3.0], [1.0, 2.0]), 1.0, 2),
    ],
    ids=["one repeat", "one pair", "a ratio with a zero"],
)
def test_without_an_interval(estimate: Estimate, value: float, n: int) -> None:
    assert estimate == Estimate(value=value, low=None, high=None, n=n)
    assert estimate.half_width is None


def test_values_are_needed() -> None:
    with pytest.raises(ValueError, match="an estimate needs at least one value"):
        estimate_mean([])
    for numerators, denominators in (([], []), ([1.0], [1.0, 2.0])):
        with pytest.raises(ValueError, match="as many numerators as denominators"):
            estimate_ratio(numerators, denominators)


def test_ratio_is_that_of_the_geometric_means() -> None:
    ratio = estimate_ratio([3.0, 6.5], [1.0, 2.0])
    assert ratio.value == pytest.approx(math.sqrt(19.5 / 2))
    turned = estimate_ratio([1.0, 2.0], [3.0, 6.5])
    assert ratio.high is not None
    assert turned.value == pytest.approx(1 / ratio.value)
    assert turned.low == pytest.approx(1 / ratio.high)
    assert ratio.half_width == pytest.approx(ratio.high - ratio.value)


def test_equal_values_have_no_width_but_for_rounding() -> None:
    estimate = estimate_mean([0.1] * 3)
    assert (estimate.low, estimate.value, estimate.high) == pytest.approx((0.1,) * 3, abs=1e-16)
    assert estimate.half_width == 0
