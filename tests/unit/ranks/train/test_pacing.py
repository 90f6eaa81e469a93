"""When the warm-up ends and how many steps are added, from what the slowest rank told."""

from __future__ import annotations

import pytest

from shardmark.ranks.train.pacing import MAX_STEPS, Pacing


def trained(pacing: Pacing, step_seconds: float, recipe_steps: int) -> tuple[int, int, int]:
    """Steps of warm-up, measured ones and those added, of a device of a steady pace."""
    warmup = measured = added = 0
    while warmup + measured < recipe_steps or pacing.added_steps:
        left = recipe_steps - warmup - measured
        steps = min(pacing.next_steps, left) if left > 0 else pacing.added_steps
        assert 0 < steps <= MAX_STEPS
        warm = pacing.warm
        measured += steps * warm
        warmup += steps * (not warm)
        added += steps * (left <= 0)
        pacing.record(steps, steps * step_seconds, measured * step_seconds)
    return warmup, measured, added


@pytest.mark.parametrize(
    ("asked", "step_seconds", "recipe_steps", "expected"),
    [
        # Counted in steps alone, as on a CPU: nothing is added.
        ({"warmup_steps": 5}, 0.5, 20, (5, 15, 0)),
        ({"warmup_steps": 5}, 0.001, 5000, (5, 4995, 0)),
        # Ranks that meet once in 8 steps: windows hold whole rounds.
        ({"warmup_steps": 5, "round_steps": 8}, 0.5, 20, (5, 16, 1)),
        ({"warmup_steps": 5, "round_steps": 8}, 0.5, 5, (5, 0, 0)),
        # The warm-up lasts long enough.
        ({"warmup_steps": 5, "warmup_seconds": 1.0}, 0.0625, 100, (17, 83, 0)),
        # A recipe of 0.5 s is all warm-up; the rest of it and the window are added.
        (
            {"warmup_steps": 5, "warmup_seconds": 1.0, "window_seconds": 4.0},
            0.0625,
            8,
            (17, 68, 77),
        ),
        # More than one stretch's steps are added.
        ({"warmup_steps": 1, "window_seconds": 4.0}, 0.001, 2, (1, 4001, 4000)),
    ],
)
def test_steps_reach_the_requested_seconds(
    asked: dict[str, float],
    step_seconds: float,
    recipe_steps: int,
    expected: tuple[int, int, int],
) -> None:
    pacing = Pacing(**asked)  # type: ignore[arg-type]  # numbers of steps are whole
    warmup, measured, added = trained(pacing, step_seconds, recipe_steps)
    assert warmup * step_seconds >= asked.get("warmup_seconds", 0)
    assert measured * step_seconds >= asked.get("window_seconds", 0)
    assert warmup == expected[0]
    assert (measured, added) == pytest.approx(expected[1:], abs=60)


def test_slow_first_steps_do_not_end_the_warm_up_early() -> None:
    """The first step loads kernels: it took a second, the next ones a thousandth."""
    pacing = Pacing(warmup_steps=1, warmup_seconds=2.0)
    pacing.record(1, 1.0, 0.0)
    seconds, stretches = 1.0, 1
    while not pacing.warm:
        steps = pacing.next_steps
        pacing.record(steps, steps * 0.001, 0.0)
        seconds, stretches = seconds + steps * 0.001, stretches + 1
    assert 2.0 <= seconds < 2.2
    assert stretches < 6


def test_earlier_windows_count_toward_the_requested_seconds() -> None:
    pacing = Pacing(warmup_steps=2, window_seconds=10.0)
    pacing.record(2, 1.0, 9.0)
    assert pacing.warm
    assert pacing.added_steps == pytest.approx(2, abs=1)
    pacing.record(2, 1.0, 10.0)
    assert pacing.added_steps == 0
