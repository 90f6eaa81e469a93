"""Epochs of workers that take whatever is left, and lose each other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from shardmark.core.shares import Shard, StepShard
from shardmark.measure.step.recorder import Recorder
from shardmark.train.epochs import Training, evaluate, train_epochs
from shardmark.train.loop import Steps
from shardmark.train.record import RankReport
from shardmark.workloads.base import BatchPlan
from tests.unit.training.test_loop import FakeWorker
from tests.unit.training.toy import CPU, CountingClock, ToyWorkload, normed

MINE = Shard(index=1, count=2)


class Task(ToyWorkload):
    """Remembers what was evaluated."""

    def __init__(self) -> None:
        super().__init__(normed)
        self.places: list[Shard] = []
        self.means: list[Tensor] = []

    def evaluate(self, model: nn.Module, shard: Shard, device: torch.device) -> object:
        assert (device, model.training) == (CPU, False)
        self.places.append(shard)
        self.means.append(dict(model.named_buffers())["1.running_mean"])
        return "mine"

    def quality(self, parts: Iterable[object]) -> Mapping[str, float | None]:
        return {"parts": float(len(list(parts)))}


class TrainingGroup:
    """The others answer what they are told to, meeting by meeting."""

    def __init__(self, calls: list[str], *answers: list[object]) -> None:
        self.calls = calls
        self.answers = list(answers)

    def barrier(self) -> None:
        self.calls.append("barrier")

    def gather(self, value: object) -> list[object]:
        self.calls.append("gather")
        answer = self.answers.pop(0)
        return [value if one == "mine" else one for one in answer]


class Taker(FakeWorker):
    """Gets certain step shards in each epoch."""

    def __init__(self, *epochs: tuple[StepShard, ...]) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.epochs = list(epochs)
        self.group = TrainingGroup(self.calls)
        self.mean = torch.full((8,), 3.0)

    def step_shards(self, end_step: int) -> Iterator[StepShard] | None:
        self.calls.append(f"step_shards before {end_step}")
        return iter(self.epochs.pop(0)) if self.epochs else None

    def buffers(self) -> dict[str, Tensor]:
        return {"1.running_mean": self.mean}


def step_shard(step: int, index: int) -> StepShard:
    return StepShard(step=step, shard=Shard(index=index, count=2))


def trained(worker: Taker, directory: Path, ends: tuple[int, ...]) -> tuple[RankReport, list[int]]:
    report, told = RankReport(directory, rank=1), list[int]()
    report.recorder = Recorder(CountingClock())
    training = Training(
        plan=BatchPlan(global_batch=4, seed=1),
        total_steps=ends[-1],
        steps_per_epoch=ends[0],
        epoch_ends=ends,
        evaluated=(False,) * len(ends),
    )
    steps = Steps(
        warmup_steps=0, learning_rate=lambda _: 0.1, seed_of=lambda _: 1, on_step=told.append
    )
    batches = train_epochs(
        training,
        worker=worker,
        workload=ToyWorkload(),
        shard=MINE,
        steps=steps,
        report=report,
        device=CPU,
    )
    told.append(min(next(batches).sample_ids))
    return report, told


def test_each_epoch_s_portions_are_taken(tmp_path: Path) -> None:
    worker = Taker((step_shard(0, 1), step_shard(1, 0)), (), (step_shard(4, 0),))
    report, told = trained(worker, tmp_path, (2, 4, 6))
    assert worker.ids == [(2, 3), (4, 5), (16, 17)]
    assert told[:-1] == [1, 2, 5]
    assert told[-1] == 2, "further batches are this rank's own share"
    assert [f"step_shards before {end}" for end in (2, 4, 6)] == [
        call for call in worker.calls if call != "barrier"
    ]
    assert worker.calls[:2] == ["barrier", "barrier"], "before the clock, before the epoch"
    report.write()
    assert report.recorder is not None
    assert report.recorder.step == 3


def test_own_shares_go_on_over_the_epochs(tmp_path: Path) -> None:
    worker = Taker()
    _, told = trained(worker, tmp_path, (2, 3))
    assert worker.ids == [(2, 3), (6, 7), (10, 11)]
    assert told == [1, 2, 3, 14]


def evaluated(*answers: list[object]) -> tuple[Task, float | None]:
    worker, task = Taker(), Task()
    worker.group = TrainingGroup([], *answers)
    found = evaluate(worker, task, MINE, CPU)
    return task, found.quality["parts"]


def test_those_left_share_the_validation_set() -> None:
    """Of three workers the first is lost: this one is the first of two, and its buffers count."""
    task, parts = evaluated(["mine", 2], ["mine", None], ["mine", "another's"])
    assert task.places == [Shard(index=0, count=2)]
    assert task.means[0].tolist() == [3.0] * 8
    assert parts == 2


def test_the_first_worker_s_buffers_are_everybody_s() -> None:
    theirs = {"1.running_mean": torch.full((8,), 5.0)}
    task, _ = evaluated([0, "mine"], [theirs, None], ["another's", "mine"])
    assert task.places == [Shard(index=1, count=2)]
    assert task.means[0].tolist() == [5.0] * 8


def test_a_first_worker_that_dies_before_it_gives_its_buffers() -> None:
    """Its part of the samples is missing: those left evaluate again, and share all of them."""
    alone: list[list[object]] = [["mine"], ["mine"], ["mine"]]
    task, parts = evaluated([0, "mine"], ["mine"], ["mine"], *alone)
    assert task.places == [Shard(index=1, count=2), Shard(index=0, count=1)]
    assert task.means[0].tolist() == [3.0] * 8
    assert parts == 1
