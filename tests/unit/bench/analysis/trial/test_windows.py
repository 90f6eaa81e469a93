"""Counters are interpolated to the windows; levels are those sampled in them."""

from __future__ import annotations

import pytest

from shardmark.bench.analysis.trial.sampled_metrics import Windows, counter_increase, levels

POINTS = [(0.0, 0.0), (10.0, 100.0), (20.0, 100.0), (30.0, 400.0)]


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        (((0.0, 30.0),), 400.0),
        (((5.0, 25.0),), 200.0),
        (((2.0, 4.0), (21.0, 22.0)), 50.0),
        (((12.0, 18.0),), 0.0),
        ((), "no window was measured"),
    ],
)
def test_counters_are_interpolated_to_the_windows(
    spans: tuple[tuple[float, float], ...], expected: float | str
) -> None:
    rise = counter_increase(POINTS, Windows(spans))
    assert rise == (expected if isinstance(expected, str) else pytest.approx(expected))


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        (((10.0, 20.0),), [100.0, 100.0]),
        (((1.0, 2.0),), [0.0, 100.0]),  # none within: the two around it
        (((1.0, 12.0), (21.0, 22.0)), [100.0, 100.0, 400.0]),
        (((31.0, 32.0),), [400.0]),
    ],
)
def test_levels_are_those_sampled_in_the_windows(
    spans: tuple[tuple[float, float], ...], expected: list[float]
) -> None:
    assert levels(POINTS, Windows(spans)) == expected
    assert levels([], Windows(spans)) == []
