"""The whole training of one rank: epochs, and the evaluation between them."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, cast

from shardmark.core.shares import Shard, StepShard
from shardmark.measure.step.recorder import Recorder
from shardmark.strategies.base import Worker
from shardmark.train.checkpoint import Checkpoints
from shardmark.train.loop import LoopOptions, train
from shardmark.train.record import Evaluation, RankReport
from shardmark.train.schedule import Schedule
from shardmark.workloads.base import Batch, BatchPlan, Workload

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class BatchSource:
    """What a rank trains on: its own share of each step, or whatever the strategy hands out."""

    def __init__(
        self,
        worker: Worker,
        workload: Workload,
        plan: BatchPlan,
        shard: Shard,
        *,
        device: torch.device,
        first_step: int = 0,
    ) -> None:
        self._worker = worker
        self._workload = workload
        self._plan = plan
        self._shard = shard
        self._device = device
        self._step = first_step
        # One iterator for all epochs: a loader keeps its processes.
        self._own = self._loaded(
            StepShard(step=step, shard=shard) for step in itertools.count(first_step)
        )

    def until(self, end_step: int) -> Iterator[tuple[StepShard, Batch]]:
        """This rank's batches of the steps before `end_step`, and what each is a share of."""
        handed_out = self._worker.step_shards(end_step)
        if handed_out is not None:
            return self._loaded(handed_out)
        first, self._step = self._step, max(self._step, end_step)
        return itertools.islice(self._own, self._step - first)

    def _loaded(self, step_shards: Iterator[StepShard]) -> Iterator[tuple[StepShard, Batch]]:
        asked, loaded = itertools.tee(step_shards)  # a loader asks ahead of what it has loaded
        for batch in self._workload.batches(self._plan, self._shard, asked):
            yield next(loaded), batch.to(self._device)


def train_epochs(
    schedule: Schedule,
    options: LoopOptions,
    *,
    worker: Worker,
    workload: Workload,
    shard: Shard,
    recorder: Recorder,
    report: RankReport,
    checkpoints: Checkpoints | None = None,
) -> None:
    """Train every epoch and evaluate those that the trial asks for, outside the windows.

    With `checkpoints`, from the last one on, and pausing for further ones.
    """
    worker.group.barrier()
    recorder.start_training()
    first = 0
    if checkpoints is not None:
        checkpoints.training_goes_on(report)
        first = checkpoints.first_step
    source = BatchSource(
        worker, workload, schedule.plan, shard, device=options.device, first_step=first
    )
    epochs = list(zip(schedule.epoch_ends, schedule.evaluated, strict=True))
    for end_step, evaluated in epochs[len(report.epochs) :]:
        for stop in [end_step] if checkpoints is None else checkpoints.stops(first, end_step):
            worker.group.barrier()
            train(worker, source.until(stop), recorder, options)
            if checkpoints is not None and stop < end_step:
                checkpoints.save(stop, worker, report)
        evaluation = evaluate(worker, workload, shard, options.device) if evaluated else None
        report.end_epoch(recorder.step, evaluation)
        if checkpoints is not None and checkpoints.is_due(end_step, of=schedule.total_steps):
            checkpoints.save(end_step, worker, report)
        first = end_step


def evaluate(worker: Worker, workload: Workload, shard: Shard, device: torch.device) -> Evaluation:
    """The whole validation set once, on the assembled model.  Collective.

    Each distinct share of the training ranks takes its part of the samples; the first one's
    buffers are used.
    """
    worker.group.barrier()
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
    """Every share's part, once; None where one that was begun has not been finished."""
    group = worker.group
    present = list(dict.fromkeys(group.gather(shard.index)))
    part = Shard(index=present.index(shard.index), count=len(present))
    first = group.gather(worker.buffers() if part.index == 0 else None)[0]
    # The first worker may have died meanwhile: then it is everybody's own.
    buffers = worker.buffers() if first is None else first
    model = workload.build_model()
    model.load_state_dict({**parameters, **cast("dict[str, Tensor]", buffers)}, strict=False)
    result = workload.evaluate(model.to(device).eval(), part, device)
    by_share = dict(cast("list[tuple[int, object]]", group.gather((part.index, result))))
    return list(by_share.values()) if len(by_share) == len(present) else None
