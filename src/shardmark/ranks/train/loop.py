"""Epochs, and the training loop, which reads no clock and no loss, and writes nothing."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch

from shardmark.base.layout import Shard, StepShard
from shardmark.ranks.measure.memory.tensors import temporary_memory
from shardmark.ranks.measure.step.recorder import Recorder
from shardmark.ranks.strategies.base import Worker
from shardmark.ranks.train.evaluation import evaluate
from shardmark.ranks.train.pacing import Pacing
from shardmark.ranks.train.record import RankReport, weights_sha256
from shardmark.ranks.train.schedule import Schedule, seed_step
from shardmark.ranks.workloads.base import Batch, BatchPlan, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopOptions:
    """Parameters of the loop that come from the trial."""

    devices: Sequence[torch.device]
    """Devices of this process; the one that it computes on comes first."""
    seed: int
    learning_rate: Callable[[int], float]
    on_step: Callable[[int], None]
    """Called after every step with the number of steps so far.  Must not synchronise the device."""
    slow_rank: SlowRank | None = None


def train(
    worker: Worker,
    batches: Iterator[tuple[StepShard, Batch]],
    recorder: Recorder,
    options: LoopOptions,
    *,
    measured: bool,
) -> float:
    """Take a step for each batch, in one window if they are measured; return their seconds."""
    recorder.start_window(measured=measured)  # waits for the device
    while True:
        recorder.start_step()
        if options.slow_rank is not None:
            options.slow_rank.step_started()
        with recorder.span("data"):
            following = next(batches, None)
        if following is None:
            break
        step_shard, batch = following
        rate = options.learning_rate(step_shard.step)
        if not recorder.learning_rates or rate != recorder.learning_rates[-1]:
            worker.set_learning_rate(rate)
        seed_step(options.seed, step_shard, options.devices)
        loss = worker.step(batch, recorder)
        if options.slow_rank is not None:
            options.slow_rank.step_done()
        recorder.end_step(loss, batch.sample_ids, rate)
        options.on_step(step_shard.step + 1)
    return recorder.stop_window()  # waits for the device


class SlowRank:
    """Lengthens each step to `factor` times the rank's computing time.

    On a CPU, computing time is the time for which the training thread is busy.  Waiting for other
    ranks does not count, because a slow rank would then slow itself down further.  On CUDA it is
    the device's time between the two ends of the step, waiting included.
    """

    def __init__(
        self,
        factor: float,
        *,
        busy_seconds: Callable[[], float] | None = None,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._factor = factor
        self._busy_seconds = busy_seconds or _busy_seconds()
        self._sleep = sleep
        self._started = 0.0

    def step_started(self) -> None:
        self._started = self._busy_seconds()

    def step_done(self) -> None:
        self._sleep((self._factor - 1) * (self._busy_seconds() - self._started))


def _busy_seconds() -> Callable[[], float]:
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return time.thread_time

    def after_the_device() -> float:
        torch.cuda.synchronize()
        return time.perf_counter()

    return after_the_device


@dataclass(kw_only=True)
class BatchSource:
    """The batches of a rank: its own share of each step, or shares that the strategy assigns."""

    worker: Worker
    workload: Workload
    plan: BatchPlan
    shard: Shard
    device: torch.device
    step: int = field(default=0, init=False)
    """First step whose batch has not been taken."""

    def __post_init__(self) -> None:
        # One iterator for all epochs: a loader keeps its processes.
        self._batches = self._loaded(
            StepShard(step=step, shard=self.shard) for step in itertools.count()
        )

    def until(self, end_step: int) -> Iterator[tuple[StepShard, Batch]]:
        """Return the rank's remaining batches before `end_step`, each with its share of a step."""
        assigned = self.worker.step_shards(end_step)
        if assigned is not None:
            return self._loaded(assigned)
        first, self.step = self.step, max(self.step, end_step)
        return itertools.islice(self._batches, self.step - first)

    def _loaded(self, step_shards: Iterator[StepShard]) -> Iterator[tuple[StepShard, Batch]]:
        requested, loaded = itertools.tee(step_shards)  # a loader reads ahead
        for batch in self.workload.batches(self.plan, self.shard, requested):
            yield next(loaded), batch.to(self.device)


@dataclass(slots=True, kw_only=True)
class Training:
    """The training of one rank, in stretches of steps; all ranks synchronise between stretches."""

    schedule: Schedule
    options: LoopOptions
    worker: Worker
    workload: Workload
    shard: Shard
    recorder: Recorder
    report: RankReport
    pacing: Pacing
    on_added: Callable[[int], None] = lambda total_steps: None  # noqa: ARG005
    """Called with the new number of steps when steps are added for measuring."""
    step: int = field(default=0, init=False)
    """Number of steps that have been taken."""
    source: BatchSource = field(init=False)

    def run(self) -> None:
        """Train every epoch, and evaluate after those that the trial evaluates.

        Steps that are added for measuring come last, after the final weights are recorded.
        """
        worker, report, device = self.worker, self.report, self.options.devices[0]
        worker.group.barrier()
        self.recorder.start_training()
        self.source = BatchSource(
            worker=worker,
            workload=self.workload,
            plan=self.schedule.plan,
            shard=self.shard,
            device=device,
        )
        epochs = zip(self.schedule.epoch_ends, self.schedule.evaluated, strict=True)
        for end_step, evaluated in epochs:
            while self.step < end_step:
                self._take(min(self.pacing.next_steps, end_step - self.step))
            evaluation = None
            if evaluated:
                with temporary_memory(device):
                    evaluation = evaluate(worker, self.workload, self.shard, device)
            report.end_epoch(self.recorder.step, evaluation)
        worker.group.barrier()
        with temporary_memory(device):
            report.end_training(self.recorder.step, weights_sha256(worker.each_parameter()))
        while added := self.pacing.added_steps:
            self.on_added(self.step + added)
            self._take(added)

    def _take(self, steps: int) -> None:
        """Take steps, measured once the warm-up is over, and agree with all ranks on the pace."""
        self.worker.group.barrier()
        batches = self.source.until(self.step + steps)
        measured, compiled = self.pacing.warm, self.report.compile_seconds
        seconds = train(self.worker, batches, self.recorder, self.options, measured=measured)
        seconds -= self.report.compile_seconds - compiled  # compiling is no warm-up
        self.recorder.flush()
        gathered = self.worker.group.gather((seconds, self.recorder.measured_seconds))
        of_ranks = cast("list[tuple[float, float]]", gathered)
        slowest_seconds = max(rank_seconds for rank_seconds, _ in of_ranks)
        measured_seconds = max(rank_seconds for _, rank_seconds in of_ranks)
        self.pacing.record(steps, slowest_seconds, measured_seconds)
        self.step += steps
