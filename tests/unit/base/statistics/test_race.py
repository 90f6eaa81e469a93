"""The rule of a race holds its error rate however often one looks, and finds true gains soon."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest

from shardmark.base.statistics import race
from shardmark.base.statistics.race import ERROR_RATE, Decision, half_width, standing

NOISE = 0.02
RACES, MOST_PAIRS = 200, 60


def raced(gain: float, *, noise: float = NOISE, drift: float = 0.0) -> list[tuple[Decision, int]]:
    """Decisions of races and the pairs that they took, with a look after each pair."""
    generator = np.random.default_rng(3)
    results = []
    for _ in range(RACES):
        logs = generator.normal(0, noise, (MOST_PAIRS, 2))
        times = np.arange(2 * MOST_PAIRS).reshape(-1, 2) / (2 * MOST_PAIRS)
        order = generator.permuted(times, axis=1)
        logs += drift * np.sin(6 * math.pi * order)
        speeds = np.exp(logs + np.array([0.0, math.log(gain)]))
        decision, count = Decision.UNDECIDED, 1
        while decision is Decision.UNDECIDED and count < MOST_PAIRS:
            count += 1
            seen = speeds[:count]
            decision = standing(list(seen[:, 1]), list(seen[:, 0])).decision(0.01)
        results.append((decision, count))
    return results


@pytest.mark.parametrize("drift", [0.0, 0.1])
def test_equal_candidates_are_seldom_told_apart(drift: float) -> None:
    counts = Counter(decision for decision, _ in raced(1.0, drift=drift))
    assert counts[Decision.FASTER] + counts[Decision.SLOWER] <= ERROR_RATE * RACES


@pytest.mark.parametrize("drift", [0.0, 0.1])
def test_a_gain_of_three_percent_is_found_with_a_third_of_the_fixed_pairs(drift: float) -> None:
    """A fixed design that finds the margin of 1 % in 90 of 100 races takes 84 pairs."""
    fixed = (1.960 + 1.282) ** 2 * 2 * NOISE**2 / math.log1p(0.01) ** 2
    results = raced(1.03, drift=drift)
    assert sum(decision is Decision.FASTER for decision, _ in results) >= 0.9 * RACES
    assert np.median([count for _, count in results]) <= fixed / 3


def test_little_noise_shows_that_there_is_no_difference() -> None:
    counts = Counter(decision for decision, _ in raced(1.0, noise=0.003))
    assert counts[Decision.NO_DIFFERENCE] >= 0.95 * RACES


def test_a_small_difference_that_is_shown_is_none() -> None:
    result = standing([1.004, 1.0041, 1.0039, 1.004] * 3, [1.0] * 12)
    assert result.low > 1
    assert result.decision(0.01) is Decision.NO_DIFFERENCE
    assert result.decision(0.001) is Decision.FASTER


def test_a_slower_candidate_is_told() -> None:
    result = standing([0.90, 0.91, 0.92, 0.90, 0.91, 0.90], [1.0] * 6)
    assert result.decision(0.01) is Decision.SLOWER
    assert result.low < result.ratio < result.high < 1


@pytest.mark.parametrize(("count", "comparisons"), [(0, 1), (1, 1), (2, 1), (4, 12)])
def test_few_pairs_decide_nothing(count: int, comparisons: int) -> None:
    speeds = [0.5, 0.6, 0.7, 0.6][:count]
    result = standing(speeds, [1.0] * count, comparisons=comparisons)
    assert (result.pairs, result.is_bounded) == (count, False)
    assert result.decision(0.01) is Decision.UNDECIDED
    assert result.pairs_to_decide(0.01) is None


def test_the_interval_is_that_of_the_factor() -> None:
    """At the interval's end the factor of the t statistic is 1 / rate."""
    count, rate, spread = 12, 0.05, 13.0
    t = half_width(count, 1.0, rate) * math.sqrt(count)
    factor = ((1 + t**2 / 11) / (1 + t**2 / (11 * spread))) ** (count / 2) / math.sqrt(spread)
    assert factor == pytest.approx(1 / rate)


def test_more_comparisons_make_a_wider_interval() -> None:
    speeds = [1.03, 1.01, 1.04, 1.02, 1.0, 1.03]
    one, three = (standing(speeds, [1.0] * 6, comparisons=n) for n in (1, 3))
    assert three.low < one.low < one.high < three.high


def test_the_pairs_that_would_decide_are_estimated() -> None:
    speeds = [1.02, 0.99, 1.03, 0.98, 1.04, 0.99, 1.02, 1.0]
    result = standing(speeds, [1.0] * 8)
    assert result.decision(0.01) is Decision.UNDECIDED
    pairs = result.pairs_to_decide(0.01)
    assert pairs is not None
    assert standing((speeds * 100)[:pairs], [1.0] * pairs).decision(0.01) is Decision.FASTER
    assert standing((speeds * 100)[: pairs // 2], [1.0] * (pairs // 2)).low < 1
    assert standing([1.5, 0.7, 1.0] * 3, [1.0] * 9).pairs_to_decide(0.01) == race.MOST_PAIRS
