"""Epochs of workers that take whatever is left, lose each other, or see the same samples."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from shardmark.core.shares import Shard, StepShard
from shardmark.measure.step.recorder import Recorder
from shardmark.train.epochs import evaluate, train_epochs
from shardmark.train.loop import LoopOptions
from shardmark.train.record import RankReport
from shardmark.train.schedule import Schedule
from shardmark.workloads.base import BatchPlan
from tests.unit.training.toy import CPU, CountingClock, FakeWorker, ToyWorkload, normed

MINE = Shard(index=1, count=2)


class Task(ToyWorkload):
    """Remembers what was evaluated."""

    def __init__(self) -> None:
        super().__init__(normed)
        self.evaluated: list[Shard] = []
        self.means: list[Tensor] = []

    def evaluate(self, model: nn.Module, shard: Shard, device: torch.device) -> object:
        assert (device, model.training) == (CPU, False)
        self.evaluated.append(shard)
        self.means.append(dict(model.named_buffers())["1.running_mean"])
        return "mine"

    def quality(self, parts: Iterable[object]) -> Mapping[str, float | None]:
        return {"parts": float(len(list(parts)))}


class Group:
    """The others answer what they are told to, meeting by meeting."""

    def __init__(self, calls: list[str], *answers: list[object]) -> None:
        self.calls = calls
        self.answers = list(answers)

    def barrier(self) -> None:
        self.calls.append("barrier")

    def gather(self, value: object) -> list[object]:
        answer = self.answers.pop(0)
        return [value if given == "mine" else given for given in answer]


class Taker(FakeWorker):
    """Gets certain step shards in each epoch; without any, its own."""

    def __init__(self, *epochs: tuple[StepShard, ...]) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.epochs = list(epochs)
        self.group = Group(self.calls)

    def step_shards(self, end_step: int) -> Iterator[StepShard] | None:
        self.calls.append(f"before {end_step}")
        return iter(self.epochs.pop(0)) if self.epochs else None

    def buffers(self) -> dict[str, Tensor]:
        return {"1.running_mean": torch.full((8,), 3.0)}


def step_shard(step: int, index: int) -> StepShard:
    return StepShard(step=step, shard=Shard(index=index, count=2))


EPOCHS = ((step_shard(0, 1), step_shard(1, 0)), (), (step_shard(4, 0),))


@pytest.mark.parametrize(
    ("handed_out", "ends", "ids", "told"),
    [
        (EPOCHS, (2, 4, 6), [(2, 3), (4, 5), (16, 17)], [1, 2, 5]),
        ((), (2, 2, 3), [(2, 3), (6, 7), (10, 11)], [1, 2, 3]),
    ],
)
def test_each_epoch_s_step_shards_are_taken(
    tmp_path: Path,
    handed_out: tuple[tuple[StepShard, ...], ...],
    ends: tuple[int, ...],
    ids: list[tuple[int, ...]],
    told: list[int],
) -> None:
    worker, report, seen = Taker(*handed_out), RankReport(tmp_path, 1), list[int]()
    schedule = Schedule(
        plan=BatchPlan(global_batch=4, seed=1),
        total_steps=6,
        steps_per_epoch=2,
        epoch_ends=ends,
        evaluated=(False,) * 3,
    )
    train_epochs(
        schedule,
        LoopOptions(
            device=CPU, seed=1, warmup_steps=0, learning_rate=lambda _: 0.1, on_step=seen.append
        ),
        worker=worker,
        workload=ToyWorkload(),
        shard=MINE,
        recorder=Recorder(CountingClock()),
        report=report,
    )
    assert (worker.ids, seen) == (ids, told)
    assert worker.calls[:3] == ["barrier", "barrier", "before 2"], "before the clock and the epoch"
    assert [call for call in worker.calls if call != "barrier"] == [f"before {end}" for end in ends]
    assert len(report.epochs) == 3


THEIRS = {"1.running_mean": torch.full((8,), 5.0)}
FIRST, SECOND = (Shard(index=index, count=2) for index in (0, 1))


@pytest.mark.parametrize(
    ("answers", "parts_of", "mean", "parts"),
    [
        # Of three workers the first is lost: this one is the first of two, and its buffers count.
        ((["mine", 2], ["mine", None], ["mine", (1, "another's")]), [FIRST], 3.0, 2),
        # The first worker's buffers are everybody's.
        (([0, "mine"], [THEIRS, None], [(0, "another's"), "mine"]), [SECOND], 5.0, 2),
        # The first worker dies before it gives its buffers, and its part of the samples is missing:
        # those left evaluate again, and share all of them.
        (([0, "mine"], *[["mine"]] * 5), [SECOND, Shard(index=0, count=1)], 3.0, 1),
        # Ranks that see the same samples evaluate the same part, and it counts once.
        (
            (
                [0, 0, "mine", 1],
                [THEIRS, THEIRS, None, None],
                [*[(0, "another's")] * 2, "mine", "mine"],
            ),
            [SECOND],
            5.0,
            2,
        ),
    ],
)
def test_the_validation_set_is_evaluated_once(
    answers: tuple[list[object], ...], parts_of: list[Shard], mean: float, parts: int
) -> None:
    worker, task = Taker(), Task()
    worker.group = Group([], *answers)
    assert evaluate(worker, task, MINE, CPU).quality["parts"] == parts
    assert task.evaluated == parts_of
    assert task.means[0].tolist() == [mean] * 8
