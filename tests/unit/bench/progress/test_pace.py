"""Rate and time left, under a clock of the test's."""

from __future__ import annotations

import pytest

from shardmark.bench.progress import pace
from shardmark.bench.progress.pace import Pace


class Time:
    """Stands for the module: `monotonic` is what the test says."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    fake = Time()
    monkeypatch.setattr(pace, "time", fake)
    return fake


def started(trials: int = 1, budget_seconds: float | None = None) -> Pace:
    watch = Pace(budget_seconds)
    watch.planned(trials)
    watch.trial_started(samples_per_step=8)
    return watch


def test_rate_covers_the_last_seconds(time: Time) -> None:
    watch = started()
    time.now += 20  # a start takes its time, which is none of the steps'
    for step in (*range(100), *range(100, 1000, 10)):  # one step a second, then ten
        time.now += 1.0
        watch.stepped(step, 1000)
    assert watch.samples_per_second == pytest.approx(80.0)
    for step in (2, 6):  # measured again
        time.now += 5
        watch.stepped(step, 1000)
    assert (watch.still_seconds, watch.samples_per_second) == (0.0, 8 * 4 / 5)


def test_rate_disappears_without_steps(time: Time) -> None:
    watch = started()
    for step in (1, 2):
        time.now += 5
        watch.stepped(step, 9)
    time.now += 15
    assert (watch.still_seconds, watch.samples_per_second) == (0.0, 8 / 5)
    time.now += 1
    assert (watch.still_seconds, watch.samples_per_second) == (16.0, None)
    watch.stepped(3, 9)
    assert watch.still_seconds == 0.0
    assert watch.samples_per_second is not None


def test_remaining_time_uses_the_mean_of_finished_trials(time: Time) -> None:
    watch = started(trials=3)
    assert watch.run_left_seconds() is None, "nothing is known yet"
    time.now += 10
    watch.stepped(0, 40)
    assert watch.run_left_seconds() is None
    time.now += 10
    watch.stepped(10, 40)
    # No trial has ended: each of the two to come takes as long as this one will have.
    assert watch.run_left_seconds() == 30.0 + 2 * (20.0 + 30.0)
    time.now += 40
    watch.trial_ended(ran_through=True)
    assert watch.run_left_seconds(between_trials=True) == 2 * 60.0
    watch.trial_started(samples_per_step=8)
    time.now += 15
    assert watch.run_left_seconds() == 45.0 + 60.0, "its steps are not known, the mean is"
    time.now += 5
    watch.trial_ended(ran_through=True)
    watch.trial_started(samples_per_step=8)
    watch.stepped(0, 40)
    time.now += 2
    watch.stepped(20, 40)
    assert watch.run_left_seconds() == 2.0
    time.now += 98
    watch.trial_ended(ran_through=True)
    assert watch.run_left_seconds(between_trials=True) == 0.0
    watch.trial_started(samples_per_step=8)  # beyond the plan, and longer than the mean
    time.now += 150
    assert watch.run_left_seconds() == 0.0


@pytest.mark.parametrize(("budget_seconds", "left"), [(1000.0, 130.0), (100.0, 80.0), (25.0, 30.0)])
def test_remaining_time_is_limited_by_the_budget(
    time: Time, budget_seconds: float, left: float
) -> None:
    """The trial under way goes on to its end all the same."""
    watch = started(3, budget_seconds)
    for seconds, steps in ((10, 0), (10, 10)):
        time.now += seconds
        watch.stepped(steps, 40)
    assert watch.run_left_seconds() == left


def test_failed_trials_do_not_count_for_the_remaining_time(time: Time) -> None:
    watch = started(trials=3)
    time.now += 60
    watch.trial_ended(ran_through=False)
    assert watch.run_left_seconds(between_trials=True) is None
