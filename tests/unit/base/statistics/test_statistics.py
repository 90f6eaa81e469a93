"""Intervals are tested as intervals: on draws from a known law they hold the truth."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from statistics import NormalDist, fmean

import numpy as np
import pytest
from scipy.special import stdtr, stdtrit

from shardmark.base.statistics.intervals import (
    ROBUST_FROM,
    Estimate,
    estimate_difference,
    estimate_mean,
    estimate_ratio,
    trimmed_mean,
)

DRAWS = 600
COUNTS = (2, 3, 9, 10, 20)
LEAST, MOST = 0.92, 0.98
"""Fraction of the intervals that hold the truth; its standard error is 0.9 %."""

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
    """A law by which a pair of values in twenty is disturbed."""
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


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("law", [normal, skewed, disturbed])
def test_interval_of_a_mean_holds_the_truth(
    law: Callable[[random.Random], float], count: int
) -> None:
    """The truth is the mean of the undisturbed law, where some repeats are disturbed."""
    draw = random.Random(count)
    truth = truth_of_skewed(count) if law is skewed else 100.0
    share = share_held(lambda: estimate_mean([law(draw) for _ in range(count)]), truth)
    assert LEAST <= share <= MOST


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("law", [skewed, half_disturbed])
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
def test_intervals_are_tukey_and_mclaughlins_and_student_s(count: int, left_out: int) -> None:
    draw = random.Random(count)
    values = sorted(normal(draw) for _ in range(count))
    left = count - 2 * left_out
    drawn_in = np.clip(values, values[left_out], values[-left_out - 1])
    error = drawn_in.std(ddof=1) * math.sqrt((count - 1) / (left * (left - 1)))
    longer = 1 + 1 / (4 * count) if left_out else 1.0
    estimate = estimate_difference(draw.sample(values, count))
    assert estimate.value == pytest.approx(fmean(values[left_out : count - left_out]))
    assert estimate.half_width == pytest.approx(stdtrit(left - 1, 0.975) * error * longer)
    if left_out == 0:
        known = 2 * stdtr(count - 1, (90 - fmean(values)) / error)
        assert trimmed_mean([value - 90 for value in values]).p_value == pytest.approx(known)


def test_positive_quantities_have_their_interval_on_the_log_scale() -> None:
    half = 4.302652729911275 / 3**0.5
    estimate = estimate_mean([1.0, 2.0, 3.0])
    assert estimate.value == 2
    assert estimate.low == pytest.approx(2 / math.exp(half / 2))
    assert estimate.high == pytest.approx(2 * math.exp(half / 2))
    assert estimate.half_width == pytest.approx(2 * math.exp(half / 2) - 2)
    assert estimate_mean([0.0, 0.0, 1.0]).low == 0
    assert estimate_mean([0.1] * 3).half_width == 0, "rounding alone is no width"
    ratio, turned = (estimate_ratio([3.0, 6.5], [1.0, 2.0]), estimate_ratio([1, 2], [3, 6.5]))
    assert ratio.value == pytest.approx(math.sqrt(19.5 / 2))
    assert (turned.value, turned.low) == pytest.approx((1 / ratio.value, 1 / (ratio.high or 0)))


def test_too_much_noise_has_no_interval() -> None:
    """The values are like those of two repeats with different models."""
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
def test_too_few_values_have_no_interval(estimate: Estimate, value: float, n: int) -> None:
    assert estimate == Estimate(value=value, low=None, high=None, n=n)
    assert estimate.half_width is None
