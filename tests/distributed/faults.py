"""Trainings with one thing wrong each, as it goes wrong in the field."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

from shardmark.core.recipe import Recipe
from shardmark.core.shares import Shard
from shardmark.measure.step.recorder import Spans
from shardmark.strategies import build_strategy
from shardmark.strategies.base import RankContext
from shardmark.strategies.deepspeed.strategy import Zero
from shardmark.workloads.base import Batch, Workload


class Faulty:
    """A worker of which some methods are replaced."""

    def __init__(self, worker: Any, **replaced: Callable[..., Any]) -> None:
        self.worker = worker
        self._replaced = replaced

    def __getattr__(self, name: str) -> Any:
        return self._replaced.get(name) or getattr(self.worker, name)


@dataclass(frozen=True, slots=True)
class Started:
    worker: Any
    shard: Shard


def start(
    name: str, workload: Workload, recipe: Recipe, process: RankContext, **options: Any
) -> Started:
    worker = build_strategy(name, options).start(workload, recipe, process)
    return Started(worker, Shard(index=process.rank, count=process.world_size))


def ddp(workload: Workload, recipe: Recipe, process: RankContext) -> Started:
    return start("ddp", workload, recipe, process)


def scaled(factor: float) -> Callable[..., Started]:
    def begin(workload: Workload, recipe: Recipe, process: RankContext) -> Started:
        started = ddp(workload, recipe, process)
        for parameter in started.worker._parameters:
            parameter.register_hook(lambda gradient: gradient * factor)
        return started

    return begin


def clipped_by_default(workload: Workload, recipe: Recipe, process: RankContext) -> Started:
    """DeepSpeed, told nothing about clipping."""
    from shardmark.strategies.deepspeed.worker import start_engine

    config = Zero(name="zero-1", stage=1).config(recipe, process.device.type)
    del config["gradient_clipping"]
    worker = start_engine(workload, recipe, process, config=config, check=nn.Module.modules)
    return Started(worker, Shard(index=process.rank, count=process.world_size))


def decay_spares_vectors(workload: Workload, recipe: Recipe, process: RankContext) -> Started:
    started = ddp(workload, recipe, process)
    optimizer = started.worker._optimizer
    group = optimizer.param_groups[0]
    vectors = [p for p in group["params"] if p.dim() < 2]
    group["params"] = [p for p in group["params"] if p.dim() >= 2]
    optimizer.add_param_group({**group, "params": vectors, "weight_decay": 0.0})
    return started


def no_decay(workload: Workload, recipe: Recipe, process: RankContext) -> Started:
    started = ddp(workload, recipe, process)
    started.worker._optimizer.param_groups[0]["weight_decay"] = 0.0
    return started


def shares_repeat(workload: Workload, recipe: Recipe, process: RankContext) -> Started:
    """Every rank loads the first rank's share, as with a sampler that nobody told its rank."""
    return Started(ddp(workload, recipe, process).worker, Shard(index=0, count=process.world_size))


def shares_exchanged(workload: Workload, recipe: Recipe, process: RankContext) -> Started:
    other = process.world_size - 1 - process.rank
    worker = ddp(workload, recipe, process).worker
    return Started(worker, Shard(index=other, count=process.world_size))


def other_weights(workload: Workload, recipe: Recipe, process: RankContext) -> Started:
    started = ddp(workload, recipe, process)
    with torch.no_grad():
        for parameter in started.worker._parameters:
            parameter.mul_(1.01)
    return started


def other_draws(workload: Workload, recipe: Recipe, process: RankContext) -> Started:
    started = ddp(workload, recipe, process)

    def step(batch: Batch, recorder: Spans) -> Tensor:
        torch.manual_seed(4321 + process.rank)
        return started.worker.step(batch, recorder)  # type: ignore[no-any-return]

    return Started(Faulty(started.worker, step=step), started.shard)


def reduces_in_bf16(workload: Workload, recipe: Recipe, process: RankContext) -> Started:
    started = ddp(workload, recipe, process)
    started.worker._model.register_comm_hook(None, bf16_compress_hook)
    return started


def masters_in_bf16(workload: Workload, recipe: Recipe, process: RankContext) -> Started:
    started = ddp(workload, recipe, process)

    def step(batch: Batch, recorder: Spans) -> Tensor:
        loss = started.worker.step(batch, recorder)
        with torch.no_grad():
            for parameter in started.worker._parameters:
                parameter.copy_(parameter.bfloat16())
        return loss  # type: ignore[no-any-return]

    return Started(Faulty(started.worker, step=step), started.shard)


def skips_a_step(workload: Workload, recipe: Recipe, process: RankContext) -> Started:
    started = ddp(workload, recipe, process)
    worker, update = started.worker, started.worker._update
    calls: list[None] = []

    def update_unless_second() -> None:
        calls.append(None)
        if len(calls) == 2:
            worker._optimizer.zero_grad()
        else:
            update()

    worker._update = update_unless_second
    return started


def keeps_norms_apart(workload: Workload, recipe: Recipe, process: RankContext) -> Started:
    return ddp(workload, recipe.model_copy(update={"sync_batch_norm": False}), process)


def evaluates_other_buffers(workload: Workload, recipe: Recipe, process: RankContext) -> Started:
    """The model that is evaluated comes from the last rank, with its own batch statistics."""
    started = ddp(workload, recipe, process)
    everybody: list[Any] = [None] * process.world_size

    def step(batch: Batch, recorder: Spans) -> Tensor:
        loss = started.worker.step(batch, recorder)
        dist.all_gather_object(everybody, started.worker.buffers())
        return loss  # type: ignore[no-any-return]

    faulty = Faulty(started.worker, step=step, buffers=lambda: everybody[-1])
    return Started(faulty, started.shard)


def mean_of_means(workload: Workload, recipe: Recipe, process: RankContext) -> Started:
    """Every rank divides by its own weight, and takes the mean of ranks for the whole mean."""
    started = ddp(workload, recipe, process)

    def step(batch: Any, recorder: Spans) -> Tensor:
        own = replace(batch, step_weight=batch.weight * process.world_size)
        return started.worker.step(own, recorder)  # type: ignore[no-any-return]

    return Started(Faulty(started.worker, step=step), started.shard)


def adds_no_weights(workload: Workload, recipe: Recipe, process: RankContext) -> Started:
    """The same where the loss alone knows them: each rank's own stands for all."""
    started = ddp(workload, recipe, process)
    started.worker._over_shares = lambda value: value * process.world_size
    return started


def averages_nothing(workload: Workload, recipe: Recipe, process: RankContext) -> Started:
    started = ddp(workload, recipe, process)
    model = started.worker._model
    model.require_backward_grad_sync = False
    started.worker.synchronise = None
    return started


def computes_in_bf16(workload: Workload, recipe: Recipe, process: RankContext) -> Started:
    started = ddp(workload, recipe, process)
    started.worker._precision = lambda: torch.autocast("cpu", dtype=torch.bfloat16)
    return started


FAULTS: dict[str, tuple[Callable[..., Started], str]] = {
    "sum over ranks": (scaled(2.0), "gradients are summed over the 2 ranks, not averaged"),
    "accumulation undivided": (
        scaled(4.0),
        "gradients of the 4 micro-batches are summed, not averaged",
    ),
    "odd scale": (scaled(1.7), "gradients are scaled by 1.7"),
    "DeepSpeed's clipping": (
        clipped_by_default,
        "gradients are clipped to norm 1, DeepSpeed's default",
    ),
    "decay spares vectors": (decay_spares_vectors, "weight decay spares biases and norms"),
    "no decay": (no_decay, "weight decay is not applied"),
    "repeated samples": (shares_repeat, "repeated samples"),
    "exchanged shares": (shares_exchanged, "different batch shares"),
    "other weights": (other_weights, "different initial weights"),
    "other draws": (other_draws, "different random draws (dropout, proposal sampling)"),
    "bf16 reduction": (reduces_in_bf16, "gradients are reduced in a lower precision (bf16)"),
    "bf16 masters": (masters_in_bf16, "master weights are kept in a lower precision (bf16)"),
    "skipped step": (skips_a_step, "the update of step 2 is skipped"),
    "other buffers": (
        evaluates_other_buffers,
        "buffers are not synchronised: rank 1's are evaluated, not rank 0's",
    ),
    "nothing averaged": (averages_nothing, "gradients are not averaged: only rank 0's is used"),
    "bf16 computation": (computes_in_bf16, "computation in a lower precision (bf16)"),
}
