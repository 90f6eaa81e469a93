"""The loop with a fake worker and a clock that counts: what is measured, told and seeded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from shardmark.core.shares import Shard, StepShard
from shardmark.measure.step.recorder import Recorder, Spans
from shardmark.strategies.base import CheckpointState, HeldState
from shardmark.strategies.collective import CollectiveWorker
from shardmark.train.loop import Steps, train
from shardmark.workloads.base import Batch
from tests.unit.training.toy import CPU, CountingClock, ToyBatch, ToyWorkload


class FakeWorker(CollectiveWorker):
    """Notes what it is told; its forward pass takes two marks more."""

    def __init__(self) -> None:
        self.rates: list[float] = []
        self.seeds: list[int] = []
        self.ids: list[tuple[int, ...]] = []

    def step(self, batch: Batch, recorder: Spans) -> Tensor:
        self.seeds.append(torch.initial_seed())
        self.ids.append(batch.sample_ids)
        with recorder.span("forward"):
            pass
        return torch.tensor(float(len(self.ids)))

    def set_learning_rate(self, learning_rate: float) -> None:
        self.rates.append(learning_rate)

    def skipped_steps(self) -> int:
        return 0

    def full_parameters(self) -> dict[str, Tensor]:
        return {}

    def full_gradients(self) -> dict[str, Tensor]:
        return {}

    def full_optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        return {}

    def buffers(self) -> dict[str, Tensor]:
        return {}

    def held_state(self) -> HeldState:
        return HeldState(parameters=(), gradients=(), optimizer_state=())

    def checkpoint_state(self) -> CheckpointState:
        return CheckpointState(
            own={"taken": torch.tensor(len(self.ids))}, counts={"taken": len(self.ids)}
        )

    def load_checkpoint_state(self, kept: CheckpointState) -> None:
        self.ids = [()] * int(kept.own["taken"])


class Loop:
    """One training, driven epoch by epoch."""

    def __init__(self, warmup_steps: int, rates: tuple[float, ...] = ()) -> None:
        self.clock = CountingClock()
        self.recorder = Recorder(self.clock)
        self.recorder.start_training()
        self.worker = FakeWorker()
        self.told: list[int] = []
        self.batches = self._batches()
        self.steps = Steps(
            warmup_steps=warmup_steps,
            learning_rate=lambda step: rates[step] if rates else 0.1,
            seed_of=lambda step_shard: 1000 + step_shard.step + 100 * step_shard.shard.index,
            on_step=self.told.append,
            pace=self._pace,
        )
        self.paced: list[int] = []
        self.step_shard_of = lambda index: StepShard(step=index, shard=Shard(index=0, count=1))

    def _batches(self, count: int = 100) -> Iterator[ToyBatch]:
        workload = ToyWorkload()
        for step in range(count):
            yield workload.batch(range(step % 3 + 1))

    @contextmanager
    def _pace(self) -> Iterator[None]:
        yield
        self.paced.append(self.recorder.step)

    def until(self, end_step: int | None) -> None:
        train(
            self.worker,
            self.batches,
            self.recorder,
            self.steps,
            end_step=end_step,
            step_shard_of=self.step_shard_of,
            device=CPU,
        )

    def take(self, *step_shards: StepShard) -> None:
        """Steps on those step shards, until no batch is left."""
        first = self.recorder.step
        self.batches = self._batches(len(step_shards))
        self.step_shard_of = lambda index: step_shards[index - first]
        self.until(None)

    @property
    def windows(self) -> list[tuple[int, int]]:
        return [(window.first_step, window.end_step) for window in self.recorder.windows]


def test_warm_up_is_outside_the_window() -> None:
    loop = Loop(warmup_steps=2)
    loop.until(5)
    assert loop.windows == [(2, 5)]
    assert loop.told == [1, 2, 3, 4, 5]
    assert loop.recorder.sample_ids == loop.worker.ids
    assert [float(loss) for loss in loop.recorder.losses] == [1.0, 2.0, 3.0, 4.0, 5.0]


def test_each_call_is_one_window() -> None:
    """What lies between two epochs, such as an evaluation, is in none."""
    loop = Loop(warmup_steps=3)
    loop.until(2)
    assert loop.windows == []
    loop.until(5)
    loop.clock.now += 1000  # an evaluation
    loop.until(7)
    assert loop.windows == [(3, 5), (5, 7)]
    assert all(window.window_seconds < 100 for window in loop.recorder.windows)


def test_window_is_the_wall_time_of_its_steps_with_the_device_idle_at_both_ends() -> None:
    loop = Loop(warmup_steps=1)
    loop.until(3)
    # A step has three spans of two marks each; the wait at the end belongs to the window.
    assert loop.recorder.windows[0].window_seconds == 2 * 6 + 10
    assert loop.clock.calls == ["wait", "wait", "wall", "wait", "wall"]


def test_warm_up_longer_than_the_training_measures_nothing() -> None:
    loop = Loop(warmup_steps=5)
    loop.until(5)
    assert loop.windows == []
    assert loop.recorder.step == 5


def test_without_warm_up_everything_is_measured() -> None:
    loop = Loop(warmup_steps=0)
    loop.until(2)
    assert loop.windows == [(0, 2)]


def test_no_step_is_no_window() -> None:
    loop = Loop(warmup_steps=0)
    loop.until(2)
    loop.until(2)
    assert loop.windows == [(0, 2)]


def test_spans_of_a_step_lie_in_it_in_order() -> None:
    loop = Loop(warmup_steps=0)
    loop.until(2)
    assert loop.recorder.span_names == ("data", "forward", "step")
    assert loop.recorder.seconds_by_step("step") == {0: 5.0, 1: 5.0}
    assert loop.recorder.seconds_by_step("data") == {0: 1.0, 1: 1.0}
    assert loop.recorder.seconds_by_step("forward") == {0: 1.0, 1: 1.0}


def test_learning_rate_is_set_only_when_it_changes() -> None:
    loop = Loop(warmup_steps=0, rates=(0.1, 0.1, 0.2, 0.2, 0.1))
    loop.until(5)
    assert loop.worker.rates == [0.1, 0.2, 0.1]


def test_every_step_has_its_seed() -> None:
    loop = Loop(warmup_steps=1)
    loop.until(2)
    loop.until(4)
    assert loop.worker.seeds == [1000, 1001, 1002, 1003]


def step_shard(step: int, index: int) -> StepShard:
    return StepShard(step=step, shard=Shard(index=index, count=2))


def test_portions_give_rate_and_seed_of_their_step_and_share() -> None:
    """This rank's third step is another's share of the fourth step of the training."""
    loop = Loop(warmup_steps=1, rates=(0.5, 0.4, 0.3, 0.2, 0.1))
    loop.take(step_shard(0, 1), step_shard(0, 0), step_shard(3, 1))
    loop.take(step_shard(4, 0))
    assert loop.worker.rates == [0.5, 0.2, 0.1]
    assert loop.steps.learning_rates == [0.5, 0.5, 0.2, 0.1]
    assert loop.worker.seeds == [1100, 1000, 1103, 1004]
    assert loop.told == [1, 1, 4, 5]


def test_a_step_without_a_batch_leaves_nothing() -> None:
    loop = Loop(warmup_steps=1)
    loop.take(step_shard(0, 0), step_shard(1, 1))
    assert loop.windows == [(1, 2)]
    assert loop.recorder.step == len(loop.recorder.losses) == 2
    assert loop.recorder.seconds_by_step("step").keys() == {0, 1}
    assert loop.recorder.seconds_by_step("data").keys() == {0, 1}


def test_pace_is_kept_within_every_step_that_is_taken() -> None:
    loop = Loop(warmup_steps=0)
    loop.take(step_shard(0, 0), step_shard(1, 0))
    assert loop.paced == [0, 1]
