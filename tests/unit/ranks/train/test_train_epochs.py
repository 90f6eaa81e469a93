"""Epochs of workers that take whatever is left, lose each other, or see the same samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from shardmark.base.layout import Shard, StepShard
from shardmark.ranks.measure.step.recorder import Recorder, Spans
from shardmark.ranks.strategies.base import TrainingGroup
from shardmark.ranks.train.epochs import Training
from shardmark.ranks.train.evaluation import evaluate
from shardmark.ranks.train.loop import LoopOptions
from shardmark.ranks.train.pacing import Pacing
from shardmark.ranks.train.record import RankReport
from shardmark.ranks.train.schedule import Schedule, learning_rate_of
from shardmark.ranks.workloads.base import Batch, BatchPlan
from tests.unit.ranks.train.toy import CPU, CountingClock, FakeWorker, ToyWorkload, normed, recipe

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


class Group(TrainingGroup):
    """The others answer what they are told to, meeting by meeting."""

    def __init__(self, calls: list[str], *answers: list[object]) -> None:
        self.calls = calls
        self.answers = list(answers)

    def barrier(self) -> None:
        self.calls.append("barrier")

    def gather(self, value: object) -> list[object]:
        answer = self.answers.pop(0) if self.answers else ["mine"]
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


def train_all(
    worker: FakeWorker,
    report: RankReport,
    ends: tuple[int, ...],
    *,
    clock: CountingClock,
    pacing: Pacing,
    rate: Callable[[int], float] = lambda _: 0.1,
) -> tuple[list[int], list[int], list[tuple[int, int]]]:
    """Steps that were told and announced, and the windows."""
    told, announced = list[int](), list[int]()
    report.recorder = recorder = Recorder(clock)
    Training(
        schedule=Schedule(
            plan=BatchPlan(global_batch=4, seed=1),
            total_steps=ends[-1],
            steps_per_epoch=2,
            epoch_ends=ends,
            evaluated=(False,) * len(ends),
        ),
        options=LoopOptions(devices=(CPU,), seed=1, learning_rate=rate, on_step=told.append),
        worker=worker,
        workload=ToyWorkload(),
        shard=MINE,
        recorder=recorder,
        report=report,
        pacing=pacing,
        on_added=announced.append,
    ).run()
    windows = [(window.first_step, window.end_step) for window in recorder.windows]
    return told, announced, windows


EPOCHS = ((step_shard(0, 1), step_shard(1, 0)), (), (step_shard(4, 0),))


@pytest.mark.parametrize(
    ("handed_out", "ends", "ids", "told"),
    [
        (EPOCHS, (2, 4, 6), [(2, 3), (4, 5), (16, 17)], [1, 2, 5]),
        ((), (2, 2, 3), [(2, 3), (6, 7), (10, 11)], [1, 2, 3]),
    ],
)
def test_step_shards_of_each_epoch_are_trained_on(
    tmp_path: Path,
    handed_out: tuple[tuple[StepShard, ...], ...],
    ends: tuple[int, ...],
    ids: list[tuple[int, ...]],
    told: list[int],
) -> None:
    worker, report = Taker(*handed_out), RankReport(tmp_path, 1)
    seen, _, _ = train_all(
        worker, report, ends, clock=CountingClock(), pacing=Pacing(warmup_steps=0)
    )
    assert (worker.ids, seen) == (ids, told)
    assert worker.calls[:3] == ["barrier", "barrier", "before 2"], "before the clock and the epoch"
    asked = [f"before {end}" for end in dict.fromkeys(ends)]
    assert [call for call in worker.calls if call != "barrier"] == asked
    assert len(report.epochs) == 3


THEIRS = {"1.running_mean": torch.full((8,), 5.0)}


@pytest.mark.parametrize(
    "answers",
    [
        ([THEIRS, None], [(0, "another's"), "mine"]),
        # Ranks that see the same samples evaluate the same part, and it counts once.
        ([THEIRS, THEIRS, None, None], [*[(0, "another's")] * 2, "mine", "mine"]),
    ],
)
def test_validation_set_is_evaluated_once(answers: tuple[list[object], ...]) -> None:
    """The buffers are those of the first share's worker."""
    worker, task = Taker(), Task()
    worker.group = Group([], *answers)
    assert evaluate(worker, task, MINE, CPU).quality["parts"] == 2
    assert task.evaluated == [Shard(index=1, count=2)]
    assert task.means[0].tolist() == [5.0] * 8


class Losing(FakeWorker):
    """A rank of two: each step takes a second of the shared clock; its weight is its steps."""

    def __init__(self, clock: CountingClock, *answers: list[object]) -> None:
        super().__init__()
        self.clock = clock
        self.group = Group([], *answers)

    def step(self, batch: Batch, recorder: Spans) -> Tensor:
        self.clock.now += 1.0
        return super().step(batch, recorder)

    def full_parameters(self) -> dict[str, Tensor]:
        return {"steps": torch.tensor(float(len(self.ids)))}


def trained_for(
    directory: Path, **least: float
) -> tuple[Losing, RankReport, list[int], list[tuple[int, int]]]:
    """Two epochs of two steps on a worker, its report, what was announced, and the windows."""
    clock = CountingClock()
    worker, report = Losing(clock), RankReport(directory, 1)
    rate = learning_rate_of(recipe(schedule={"name": "cosine"}, steps=4), 4)
    pacing = Pacing(warmup_steps=1, **least)  # type: ignore[arg-type]  # of seconds alone
    _, announced, windows = train_all(worker, report, (2, 4), clock=clock, pacing=pacing, rate=rate)
    return worker, report, announced, windows


def test_added_steps_do_not_change_the_training(tmp_path: Path) -> None:
    """Samples, seeds, rates and weights of the recipe are those of a training without any."""
    alone, plain, unannounced, windows = trained_for(tmp_path / "a")
    worker, report, announced, more = trained_for(tmp_path / "b", window_seconds=100.0)
    assert (windows, unannounced) == ([(1, 2), (2, 4)], [])
    assert more[:2] == windows
    assert more[2][0] == 4
    assert announced[-1] == more[-1][1] == len(worker.ids) > 8
    assert worker.ids[:4] == alone.ids
    assert worker.seeds[:4] == alone.seeds
    assert report.final_sha256 == plain.final_sha256 is not None
    assert report.epochs == plain.epochs
    assert worker.rates == alone.rates, "those of the last step stay"
    step = worker.ids[4]
    assert step == (18, 19), "data goes on where the recipe ended"
    recorder = report.recorder
    assert recorder is not None
    assert sum(window.window_seconds for window in recorder.windows) >= 100


def test_short_recipe_is_measured_in_added_steps(tmp_path: Path) -> None:
    _, report, _, windows = trained_for(tmp_path, warmup_seconds=200.0, window_seconds=50.0)
    assert windows[0][0] > 4
    assert report.trained_steps == 4
    assert len(report.epochs) == 2


def test_measured_seconds_of_the_longest_rank_end_the_added_steps(tmp_path: Path) -> None:
    """This one would add steps for 100 s; another has measured so long already."""
    clock = CountingClock()
    answers: list[list[object]] = [[(20.0, seconds), "mine"] for seconds in (0.0, 99.0, 120.0)]
    worker = Losing(clock, *answers)
    pacing = Pacing(warmup_steps=1, window_seconds=100.0)
    train_all(worker, RankReport(tmp_path, 1), (2, 3), clock=clock, pacing=pacing)
    assert len(worker.ids) == 3
