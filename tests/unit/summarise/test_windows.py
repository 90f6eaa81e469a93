"""Counters are interpolated to the windows; samples that do not bracket them say nothing."""

from __future__ import annotations

import pytest

from shardmark.analysis.trial.sampled_metrics import Windows, counter_increase, levels

POINTS = [(0.0, 0.0), (10.0, 100.0), (20.0, 100.0), (30.0, 400.0)]


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        (((0.0, 30.0),), 400.0),
        (((5.0, 25.0),), 200.0),
        (((5.0, 6.0),), 10.0),
        (((2.0, 4.0), (21.0, 22.0)), 50.0),
        (((12.0, 18.0),), 0.0),
    ],
)
def test_interpolated(spans: tuple[tuple[float, float], ...], expected: float) -> None:
    assert counter_increase(POINTS, Windows(spans)) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("points", "spans", "reason"),
    [
        ([], ((1.0, 2.0),), "no sample was taken"),
        (POINTS, (), "no window was measured"),
        (POINTS, ((-1.0, 5.0),), "no sample was taken before the first window"),
        (POINTS, ((1.0, 31.0),), "no sample was taken after the last window"),
    ],
)
def test_not_bracketed(
    points: list[tuple[float, float]], spans: tuple[tuple[float, float], ...], reason: str
) -> None:
    assert counter_increase(points, Windows(spans)) == reason


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        (((10.0, 20.0),), [100.0, 100.0]),
        (((1.0, 2.0),), [0.0, 100.0]),  # none within: the two around it
        (((1.0, 12.0), (21.0, 22.0)), [100.0, 100.0, 400.0]),
        (((31.0, 32.0),), [400.0]),
        (((-2.0, -1.0),), [0.0]),
    ],
)
def test_levels(spans: tuple[tuple[float, float], ...], expected: list[float]) -> None:
    assert levels(POINTS, Windows(spans)) == expected


def test_levels_without_samples() -> None:
    assert levels([], Windows(((0.0, 1.0),))) == []
