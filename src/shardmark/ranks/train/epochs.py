"""The training of one rank: its epochs, and the evaluations between them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from shardmark.base.layout import Shard, StepShard
from shardmark.ranks.measure.memory.tensors import temporary_memory
from shardmark.ranks.measure.step.recorder import Recorder
from shardmark.ranks.strategies.base import Worker
from shardmark.ranks.train.evaluation import evaluate
from shardmark.ranks.train.loop import LoopOptions, train
from shardmark.ranks.train.pacing import Pacing
from shardmark.ranks.train.record import RankReport, weights_sha256
from shardmark.ranks.train.schedule import Schedule
from shardmark.ranks.workloads.base import Batch, BatchPlan, Workload

if TYPE_CHECKING:
    import torch


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
