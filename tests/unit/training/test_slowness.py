"""A slow rank sleeps in proportion to what it computes."""

from __future__ import annotations

import time
from contextlib import nullcontext

import pytest

from shardmark.train.slowness import slowed


class Busy:
    """Computes and sleeps without doing either."""

    def __init__(self) -> None:
        self.computed = 0.0
        self.slept: list[float] = []

    def seconds(self) -> float:
        return self.computed


@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_fast_ranks_are_left_alone(factor: float) -> None:
    assert slowed(factor) is nullcontext


@pytest.mark.parametrize(("factor", "slept"), [(1.5, [1.0, 2.0]), (3.0, [4.0, 8.0])])
def test_each_step_is_so_many_times_as_long(factor: float, slept: list[float]) -> None:
    busy = Busy()
    pace = slowed(factor, busy_seconds=busy.seconds, sleep=busy.slept.append)
    for computing in (2.0, 4.0):
        busy.computed += 100  # between steps
        with pace():
            busy.computed += computing
    assert busy.slept == slept


def test_no_time_is_lost_after_a_failure() -> None:
    busy = Busy()
    pace = slowed(2.0, busy_seconds=busy.seconds, sleep=busy.slept.append)

    def fails() -> None:
        busy.computed += 1
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"), pace():
        fails()
    assert busy.slept == []


def test_waiting_is_not_computing() -> None:
    """The thread's own time is taken on a CPU: a wait for others makes nothing slower."""
    slept: list[float] = []
    with slowed(2.0, sleep=slept.append)():
        time.sleep(0.05)
    assert 0 <= slept[0] < 0.04
