"""The whole training of one rank: epochs, and the evaluation between them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor

from shardmark.experiment.schema import Trial
from shardmark.strategies._protocol import Shard, Worker
from shardmark.training.loop import Steps, train
from shardmark.training.report import Evaluation, RankReport
from shardmark.workloads._protocol import Batch, BatchPlan, Workload


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
    batches: Iterator[Batch],
    shard: Shard,
    steps: Steps,
    report: RankReport,
    device: torch.device,
) -> None:
    """Train every epoch and evaluate those that the trial asks for, outside the windows."""
    assert report.recorder is not None, "the rank gives its report a recorder first"
    dist.barrier()
    report.recorder.start_training()
    for end_step, evaluated in zip(training.epoch_ends, training.evaluated, strict=True):
        dist.barrier()
        train(worker, batches, report.recorder, steps, end_step=end_step, device=device)
        report.end_epoch(end_step, evaluate(worker, workload, shard, device) if evaluated else None)


def evaluate(worker: Worker, workload: Workload, shard: Shard, device: torch.device) -> Evaluation:
    """The whole validation set once, on the assembled model.  Collective.

    Every rank holds the whole model and takes its part of the samples; rank 0's buffers are used.
    """
    dist.barrier()
    started = time.perf_counter()
    parameters = worker.full_parameters()
    own = worker.buffers() if dist.get_rank() == 0 else None
    buffers: list[Mapping[str, Tensor] | None] = [own]
    dist.broadcast_object_list(buffers, src=0)
    assert buffers[0] is not None, "rank 0 sent them"
    model = workload.build_model()
    model.load_state_dict({**parameters, **buffers[0]}, strict=False)
    model = model.to(device).eval()
    part = workload.evaluate(model, shard, device)
    parts: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, part)
    return Evaluation(seconds=time.perf_counter() - started, quality=dict(workload.quality(parts)))
