"""The loop with a fake worker and a clock that counts: what is measured, told and seeded."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from shardmark.base.layout import Shard, StepShard
from shardmark.ranks.measure.step.recorder import Recorder
from shardmark.ranks.train.loop import LoopOptions, SlowRank, train
from shardmark.ranks.train.schedule import step_seed
from shardmark.ranks.workloads.base import Batch
from tests.unit.ranks.train.toy import CPU, CountingClock, FakeWorker, ToyWorkload


def share(step: int, index: int = 0) -> StepShard:
    return StepShard(step=step, shard=Shard(index=index, count=2))


class Loop:
    """A training, driven epoch by epoch."""

    def __init__(self, rates: tuple[float, ...] = ()) -> None:
        self.clock = CountingClock()
        self.recorder = Recorder(self.clock)
        self.recorder.start_training()
        self.worker = FakeWorker()
        self.told: list[int] = []
        self.slept: list[float] = []
        self.options = LoopOptions(
            devices=(CPU,),
            seed=5,
            learning_rate=lambda step: rates[step] if rates else 0.1,
            on_step=self.told.append,
            slow_rank=SlowRank(2.0, busy_seconds=lambda: self.clock.now, sleep=self.slept.append),
        )

    def take(self, *step_shards: StepShard, measured: bool = True) -> float:
        def batches() -> Iterator[tuple[StepShard, Batch]]:
            for step_shard in step_shards:
                yield step_shard, ToyWorkload().batch(range(step_shard.step % 3 + 1))

        return train(self.worker, batches(), self.recorder, self.options, measured=measured)

    def until(self, end_step: int, *, measured: bool = True) -> float:
        steps = range(self.recorder.step, end_step)
        return self.take(*map(share, steps), measured=measured)

    @property
    def windows(self) -> list[tuple[int, int]]:
        return [(window.first_step, window.end_step) for window in self.recorder.windows]


@pytest.mark.parametrize(
    ("stretches", "windows"),
    [
        (((2, False), (5, True)), [(2, 5)]),
        (((3, True), (5, True)), [(0, 3), (3, 5)]),
        (((5, False),), []),
        (((2, True), (2, True)), [(0, 2)]),
    ],
)
def test_each_call_is_one_window_unless_it_is_warm_up(
    stretches: tuple[tuple[int, bool], ...], windows: list[tuple[int, int]]
) -> None:
    loop = Loop()
    for end, measured in stretches:
        seconds = loop.until(end, measured=measured)
        assert 0 < seconds < 100
        loop.clock.now += 1000  # an evaluation, which is in no window
    assert loop.windows == windows
    assert loop.told == list(range(1, stretches[-1][0] + 1))
    assert loop.recorder.sample_ids == loop.worker.ids
    assert [step.loss for step in loop.recorder.recorded_steps()] == loop.told


def test_window_is_the_wall_time_of_its_steps_with_the_device_idle_at_both_ends() -> None:
    loop = Loop()
    loop.until(1, measured=False)
    seconds = loop.until(3)
    # Two marks of the step, of its data and of its forward pass; a step and its data are marked
    # that find no batch; the wait at the end belongs to the window.
    assert loop.recorder.windows[0].window_seconds == seconds == 2 * 6 + 3 + 10
    assert loop.clock.calls == ["wait", *("wait", "wall") * 4]


def test_end_of_the_batches_records_no_step() -> None:
    loop = Loop()
    loop.until(2)
    loop.until(3)
    taken = loop.recorder.recorded_steps()
    assert [step.seconds for step in taken] == [{"data": 1.0, "forward": 1.0, "step": 5.0}] * 3
    assert loop.slept == [4.0] * 3


def test_rate_and_seed_follow_the_step_and_the_share() -> None:
    """This rank's third step is another's share of the fourth step of the training."""
    loop = Loop(rates=(0.5, 0.4, 0.3, 0.2, 0.1))
    taken = (share(0, 1), share(0, 0), share(3, 1), share(4, 0))
    loop.take(*taken[:3])
    loop.take(taken[3])
    assert loop.worker.rates == [0.5, 0.2, 0.1], "set only when it changes"
    assert loop.recorder.learning_rates == [0.5, 0.5, 0.2, 0.1]
    assert loop.worker.seeds == [step_seed(5, step_shard) for step_shard in taken]
    assert loop.told == [1, 1, 4, 5]


@pytest.mark.parametrize(("factor", "slept"), [(1.5, [1.0, 2.0]), (3.0, [4.0, 8.0])])
def test_slow_rank_sleeps_in_proportion_to_its_computing_time(
    factor: float, slept: list[float]
) -> None:
    busy, sleeps = [0.0], list[float]()
    slow = SlowRank(factor, busy_seconds=lambda: busy[0], sleep=sleeps.append)
    for computing in (2.0, 4.0):
        busy[0] += 100  # between steps
        slow.step_started()
        busy[0] += computing
        slow.step_done()
    assert sleeps == slept


def test_slow_rank_ignores_waiting_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread's own time is taken on a CPU: a wait for others makes nothing slower."""
    own_seconds, slept = iter((1.0, 3.0)), list[float]()
    monkeypatch.setattr(time, "thread_time", lambda: next(own_seconds))
    slow = SlowRank(2.0, sleep=slept.append)
    slow.step_started()
    slow.step_done()
    assert slept == [2.0]
