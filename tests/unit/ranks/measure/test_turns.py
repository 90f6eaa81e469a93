"""A trial's turns without processes: the clock stands still between them."""

from __future__ import annotations

import signal
from types import SimpleNamespace

import pytest

from shardmark.ranks.measure.step import turns
from shardmark.ranks.measure.step.turns import LEAST_STEPS, Turn, TurnClock


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Time that the test sets, and the number of stops."""
    clock = SimpleNamespace(seconds=100.0, stops=0, group=0)
    monkeypatch.setattr(turns, "time", SimpleNamespace(perf_counter=lambda: clock.seconds))

    def stop(group: int, number: int) -> None:
        assert (group, number) == (clock.group, signal.SIGSTOP)
        clock.stops += 1

    monkeypatch.setattr(turns, "os", SimpleNamespace(killpg=stop))
    return clock


def test_the_clock_stands_still_between_turns(now: SimpleNamespace) -> None:
    turn = Turn()
    clock = TurnClock(turn)
    start = clock.mark()
    turn.stepped()
    assert now.stops == 1, "a trial stops once it is warm"
    now.seconds += 7.0  # others compute
    turn.begin(0.5)
    now.seconds += 0.4
    for _ in range(LEAST_STEPS):
        turn.stepped()
    assert now.stops == 1, "the turn is not over"
    now.seconds += 0.2
    turn.stepped()
    assert now.stops == 2
    now.seconds += 3.0
    turn.begin(0.5)
    assert clock.seconds_between(start, clock.mark()) == pytest.approx(0.6)
    assert clock.wall_seconds() == pytest.approx(100.6)


def test_a_turn_has_a_few_steps(now: SimpleNamespace) -> None:
    turn = Turn()
    turn.stepped()
    turn.begin(0.5)
    now.seconds += 10.0
    for _ in range(LEAST_STEPS - 1):
        turn.stepped()
    assert now.stops == 1
    turn.stepped()
    assert now.stops == 2


def test_a_turn_ends_for_the_trial_whatever_group_a_script_is_in(now: SimpleNamespace) -> None:
    turn = Turn()
    turn.group = now.group = 7
    turn.stepped()
    assert now.stops == 1


def test_a_last_turn_does_not_end(now: SimpleNamespace) -> None:
    turn = Turn()
    turn.last()
    now.seconds += 1e9
    turn.stepped()
    assert now.stops == 0


def test_a_reading_that_a_stop_interrupts_is_repeated(
    now: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    turn = Turn()
    turn.stepped()
    readings = iter([100.0, 109.0, 109.0])

    def read() -> float:
        value = next(readings)
        if value == 100.0:  # stopped for nine seconds after this reading
            turn.begin(1.0)
        return value

    monkeypatch.setattr(turns, "time", SimpleNamespace(perf_counter=read))
    assert turn.seconds() == pytest.approx(100.0)
    assert now.stops == 1
