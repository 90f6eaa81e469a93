"""The loop, its epochs and its workers: what is measured, told and seeded."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from shardmark.base.layout import Shard, StepShard
from shardmark.ranks.measure.step.recorder import Recorder, Spans
from shardmark.ranks.strategies.base import TrainingGroup
from shardmark.ranks.train.evaluation import evaluate
from shardmark.ranks.train.loop import LoopOptions, SlowRank, Training, train
from shardmark.ranks.train.pacing import Pacing
from shardmark.ranks.train.record import RankReport
from shardmark.ranks.train.schedule import Schedule, learning_rate_of, step_seed
from shardmark.ranks.workloads.base import Batch, BatchPlan
from tests.unit.ranks.train.toy import CPU, CountingClock, FakeWorker, ToyWorkload, normed, recipe


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
