"""The whole training of one rank: epochs, and the evaluation between them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from shardmark.core.shares import Shard, StepShard
from shardmark.measure.memory.tensors import memory_apart
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
    """One rank's steps, in stretches between which the ranks meet."""

    worker: Worker
    source: BatchSource
    recorder: Recorder
    options: LoopOptions
    pacing: Pacing
    step: int = 0
    """Of the whole training, so many have been taken."""

    def until(self, stop: int) -> None:
        """Take the steps before `stop` that are left."""
        while self.step < stop:
            self.take(min(self.pacing.next_steps, stop - self.step))

    def take(self, steps: int) -> None:
        self.worker.group.barrier()
        batches = self.source.until(self.step + steps)
        measured = self.pacing.warm
        seconds = train(self.worker, batches, self.recorder, self.options, measured=measured)
        self.recorder.settle()
        told = self.worker.group.gather((seconds, self.recorder.measured_seconds))
        of_ranks = cast("list[tuple[float, float]]", told)
        slowest_seconds = max(own for own, _ in of_ranks)
        self.pacing.took(steps, slowest_seconds, max(measured for _, measured in of_ranks))
        self.step += steps


def train_epochs(
    schedule: Schedule,
    options: LoopOptions,
    *,
    worker: Worker,
    workload: Workload,
    shard: Shard,
    recorder: Recorder,
    report: RankReport,
    pacing: Pacing,
    checkpoints: Checkpoints | None = None,
    on_added: Callable[[int], None] = lambda total_steps: None,  # noqa: ARG005
) -> None:
    """Train every epoch and evaluate those that the trial asks for, outside the windows.

    Steps that are added for the sake of measuring come last: no weight or quality is theirs.
    `on_added` is told how many steps there are with them.  With `checkpoints`, from the last one
    on, and pausing for further ones.
    """
    worker.group.barrier()
    recorder.start_training()
    first = 0
    if checkpoints is not None:
        checkpoints.training_goes_on(report)
        first = checkpoints.first_step
    device = options.devices[0]
    training = Training(
        worker=worker,
        source=BatchSource(
            worker=worker,
            workload=workload,
            plan=schedule.plan,
            shard=shard,
            device=device,
            step=first,
        ),
        recorder=recorder,
        options=options,
        pacing=pacing,
        step=first,
    )
    epochs = zip(schedule.epoch_ends, schedule.evaluated, strict=True)
    for index, (end_step, evaluated) in enumerate(epochs):
        if end_step <= first:  # before a restart: nobody evaluates it again
            if index == len(report.epochs):  # this rank has lost what it knew of it
                report.end_epoch(end_step, None)
            continue
        for stop in [end_step] if checkpoints is None else checkpoints.stops(first, end_step):
            training.until(stop)
            if checkpoints is not None and stop < end_step:
                checkpoints.save(stop, worker, report)
        evaluation = None
        if evaluated:
            with memory_apart(device):
                evaluation = evaluate(worker, workload, shard, device)
        report.end_epoch(recorder.step, evaluation)
        if checkpoints is not None and checkpoints.is_due(end_step, of=schedule.total_steps):
            checkpoints.save(end_step, worker, report)
        first = end_step
    worker.group.barrier()
    with memory_apart(device):
        report.end_training(recorder.step, weights_sha256(worker.each_parameter()))
    while added := pacing.added_steps:
        on_added(training.step + added)
        training.take(added)
