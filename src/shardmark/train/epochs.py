"""The whole training of one rank: epochs, and the evaluation between them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from shardmark.core.shares import Shard, StepShard
from shardmark.measure.memory.tensors import temporary_memory
from shardmark.measure.step.recorder import Recorder
from shardmark.strategies.base import Worker
from shardmark.train.evaluation import evaluate
from shardmark.train.loop import LoopOptions, train
from shardmark.train.pacing import Pacing
from shardmark.train.record import RankReport, weights_sha256
from shardmark.train.schedule import Schedule
from shardmark.workloads.base import Batch, BatchPlan, Workload

if TYPE_CHECKING:
    import torch


@dataclass(kw_only=True)
class BatchSource:
    """What a rank trains on: its own share of each step, or whatever the strategy hands out."""

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
        """This rank's batches of the steps before `end_step`, and what each is a share of."""
        handed_out = self.worker.step_shards(end_step)
        if handed_out is not None:
            return self._loaded(handed_out)
        first, self.step = self.step, max(self.step, end_step)
        return itertools.islice(self._batches, self.step - first)

    def _loaded(self, step_shards: Iterator[StepShard]) -> Iterator[tuple[StepShard, Batch]]:
        asked, loaded = itertools.tee(step_shards)  # a loader asks ahead of what it has loaded
        for batch in self.workload.batches(self.plan, self.shard, asked):
            yield next(loaded), batch.to(self.device)


@dataclass(slots=True, kw_only=True)
class Training:
    """One rank's whole training, in stretches of steps between which the ranks meet."""

    schedule: Schedule
    options: LoopOptions
    worker: Worker
    workload: Workload
    shard: Shard
    recorder: Recorder
    report: RankReport
    pacing: Pacing
    on_added: Callable[[int], None] = lambda total_steps: None  # noqa: ARG005
    """Told how many steps there are with those that are added for the sake of measuring."""
    step: int = field(default=0, init=False)
    """Of the whole training, so many have been taken."""
    source: BatchSource = field(init=False)

    def run(self) -> None:
        """Train every epoch and evaluate those that the trial asks for, outside the windows.

        Steps that are added come last: no weight or quality is theirs.
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
        self.worker.group.barrier()
        batches = self.source.until(self.step + steps)
        measured, compiled = self.pacing.warm, self.report.compile_seconds
        seconds = train(self.worker, batches, self.recorder, self.options, measured=measured)
        seconds -= self.report.compile_seconds - compiled  # which warms nothing up
        self.recorder.flush()
        told = self.worker.group.gather((seconds, self.recorder.measured_seconds))
        of_ranks = cast("list[tuple[float, float]]", told)
        slowest_seconds = max(own for own, _ in of_ranks)
        self.pacing.took(steps, slowest_seconds, max(measured for _, measured in of_ranks))
        self.step += steps
