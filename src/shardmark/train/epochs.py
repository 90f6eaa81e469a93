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
from shardmark.train.checkpoint import Checkpoints
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
    step: int = 0
    """Its own share of the steps before is taken."""

    def __post_init__(self) -> None:
        # One iterator for all epochs: a loader keeps its processes.
        self._own = self._loaded(
            StepShard(step=step, shard=self.shard) for step in itertools.count(self.step)
        )

    def until(self, end_step: int) -> Iterator[tuple[StepShard, Batch]]:
        """This rank's batches of the steps before `end_step`, and what each is a share of."""
        handed_out = self.worker.step_shards(end_step)
        if handed_out is not None:
            return self._loaded(handed_out)
        first, self.step = self.step, max(self.step, end_step)
        return itertools.islice(self._own, self.step - first)

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
    checkpoints: Checkpoints | None = None
    on_added: Callable[[int], None] = lambda total_steps: None  # noqa: ARG005
    """Told how many steps there are with those that are added for the sake of measuring."""
    step: int = field(default=0, init=False)
    """Of the whole training, so many have been taken."""
    source: BatchSource = field(init=False)

    def run(self) -> None:
        """Train every epoch and evaluate those that the trial asks for, outside the windows.

        Steps that are added come last: no weight or quality is theirs.  With `checkpoints`, from
        the last one on, and pausing for further ones.
        """
        worker, report, device = self.worker, self.report, self.options.devices[0]
        worker.group.barrier()
        self.recorder.start_training()
        if self.checkpoints is not None:
            self.checkpoints.training_goes_on(report)
            self.step = self.checkpoints.first_step
        self.source = BatchSource(
            worker=worker,
            workload=self.workload,
            plan=self.schedule.plan,
            shard=self.shard,
            device=device,
            step=self.step,
        )
        epochs = zip(self.schedule.epoch_ends, self.schedule.evaluated, strict=True)
        for index, (end_step, evaluated) in enumerate(epochs):
            if end_step <= self.step:  # before a restart: nobody evaluates it again
                if index == len(report.epochs):  # this rank has lost what it knew of it
                    report.end_epoch(end_step, None)
                continue
            self._take_epoch(end_step)
            evaluation = None
            if evaluated:
                with temporary_memory(device):
                    evaluation = evaluate(worker, self.workload, self.shard, device)
            report.end_epoch(self.recorder.step, evaluation)
            self._save(end_step)
        worker.group.barrier()
        with temporary_memory(device):
            report.end_training(self.recorder.step, weights_sha256(worker.each_parameter()))
        while added := self.pacing.added_steps:
            self.on_added(self.step + added)
            self._take(added)

    def _take_epoch(self, end_step: int) -> None:
        """Pause for checkpoints on the way; the one at the end follows the evaluation."""
        checkpoints = self.checkpoints
        for stop in [end_step] if checkpoints is None else checkpoints.stops(self.step, end_step):
            while self.step < stop:
                self._take(min(self.pacing.next_steps, stop - self.step))
            if stop < end_step:
                self._save(stop)

    def _save(self, step: int) -> None:
        checkpoints = self.checkpoints
        if checkpoints is not None and checkpoints.is_due(step, of=self.schedule.total_steps):
            checkpoints.save(step, self.worker, self.report)

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
