"""The whole training of one rank: epochs, and the evaluation between them."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self, cast

from shardmark.core.shares import Shard, StepShard
from shardmark.measure.step.recorder import Recorder
from shardmark.strategies.base import Worker
from shardmark.train.checkpoints import Checkpoints
from shardmark.train.loop import Steps, train
from shardmark.train.record import Evaluation, RankReport
from shardmark.trials.trial import Trial
from shardmark.workloads.base import Batch, BatchPlan, Workload

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """A trial's steps: how many there are, where its epochs end, which of them are evaluated."""

    plan: BatchPlan
    total_steps: int
    steps_per_epoch: int
    epoch_ends: tuple[int, ...]
    """Steps taken at the end of each epoch; one entry where the recipe counts steps."""
    evaluated: tuple[bool, ...]

    @classmethod
    def of(cls, trial: Trial, workload: Workload) -> Self:
        steps_per_epoch = workload.training_samples // trial.batch_per_step
        if trial.recipe.steps is not None:
            ends: tuple[int, ...] = (trial.recipe.steps,)
        else:
            assert trial.recipe.epochs is not None, "the recipe has epochs or steps"
            ends = tuple(steps_per_epoch * (i + 1) for i in range(trial.recipe.epochs))
        when = trial.measure.evaluate
        return cls(
            plan=BatchPlan(global_batch=trial.batch_per_step, seed=trial.recipe.seed),
            total_steps=ends[-1],
            steps_per_epoch=steps_per_epoch,
            epoch_ends=ends,
            evaluated=tuple(when == "epoch" or (when == "end" and e == ends[-1]) for e in ends),
        )


def train_epochs(
    training: Training,
    *,
    worker: Worker,
    workload: Workload,
    shard: Shard,
    steps: Steps,
    report: RankReport,
    device: torch.device,
    checkpoints: Checkpoints | None = None,
) -> Iterator[Batch]:
    """Train every epoch and evaluate those that the trial asks for, outside the windows.

    With `checkpoints`, from the last one on, and pausing for further ones.  Returns further
    batches of this rank's own share, for steps that belong to no training.
    """
    recorder = report.recorder
    assert recorder is not None, "the rank gives its report a recorder first"
    worker.group.barrier()
    recorder.start_training()
    first = 0
    if checkpoints is not None:
        checkpoints.training_goes_on(report)
        first = checkpoints.first_step
    own = _own_share(training, workload, shard, first)
    epochs = list(zip(training.epoch_ends, training.evaluated, strict=True))
    for end_step, evaluated in epochs[len(report.epochs) :]:
        for stop in [end_step] if checkpoints is None else checkpoints.stops(first, end_step):
            worker.group.barrier()
            step_shards = worker.step_shards(stop)
            if step_shards is None:
                feed = Feed(own, stop, lambda index: StepShard(step=index, shard=shard))
            else:
                feed = _left(workload, training, shard, step_shards, recorder.step)
            _train(worker, feed, recorder, steps, device)
            if checkpoints is not None and stop < end_step:
                checkpoints.save(stop, worker, report)
        evaluation = evaluate(worker, workload, shard, device) if evaluated else None
        report.end_epoch(recorder.step, evaluation)
        if checkpoints is not None and checkpoints.is_due(end_step, of=training.total_steps):
            checkpoints.save(end_step, worker, report)
        first = end_step
    return own


def _own_share(training: Training, workload: Workload, shard: Shard, first: int) -> Iterator[Batch]:
    """This rank's share of that step and of all that follow."""
    if first == 0:
        return workload.batches(training.plan, shard)
    step_shards = (StepShard(step=step, shard=shard) for step in itertools.count(first))
    return workload.batches(training.plan, shard, step_shards)


def _train(
    worker: Worker, feed: Feed, recorder: Recorder, steps: Steps, device: torch.device
) -> None:
    train(
        worker,
        feed.batches,
        recorder,
        steps,
        end_step=feed.end_step,
        step_shard_of=feed.step_shard_of,
        device=device,
    )


@dataclass(frozen=True, slots=True)
class Feed:
    """One epoch's batches of one rank."""

    batches: Iterator[Batch]
    end_step: int | None
    """None where the batches end by themselves."""
    step_shard_of: Callable[[int], StepShard]
    """This rank's step -> what its batch is of."""


def _left(
    workload: Workload,
    training: Training,
    shard: Shard,
    step_shards: Iterator[StepShard],
    first: int,
) -> Feed:
    """Whatever step shard of the epoch is left when this rank asks for one."""
    taken: list[StepShard] = []

    def noted() -> Iterator[StepShard]:
        for step_shard in step_shards:
            taken.append(step_shard)
            yield step_shard

    batches = workload.batches(training.plan, shard, noted())
    return Feed(batches, None, lambda index: taken[index - first])


def evaluate(worker: Worker, workload: Workload, shard: Shard, device: torch.device) -> Evaluation:
    """The whole validation set once, on the assembled model.  Collective.

    Every training rank holds the whole model and takes its part of the samples; the first one's
    buffers are used.
    """
    group = worker.group
    group.barrier()
    started = time.perf_counter()
    parameters = worker.full_parameters()
    while (parts := _evaluated(worker, workload, shard, device, parameters)) is None:
        pass  # somebody died meanwhile, and left a part of the samples undone
    return Evaluation(seconds=time.perf_counter() - started, quality=dict(workload.quality(parts)))


def _evaluated(
    worker: Worker,
    workload: Workload,
    shard: Shard,
    device: torch.device,
    parameters: Mapping[str, Tensor],
) -> list[object] | None:
    """Every training rank's part; None where one of those that began has not finished."""
    group = worker.group
    present = group.gather(shard.index)
    place = Shard(index=present.index(shard.index), count=len(present))
    first = group.gather(worker.buffers() if place.index == 0 else None)[0]
    # The first worker may have died meanwhile: then it is everybody's own.
    buffers = worker.buffers() if first is None else first
    model = workload.build_model()
    model.load_state_dict({**parameters, **cast("dict[str, Tensor]", buffers)}, strict=False)
    model = model.to(device).eval()
    part = workload.evaluate(model, place, device)
    parts = group.gather(part)
    return parts if len(parts) == len(present) else None
