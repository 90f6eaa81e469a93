"""Trainings with one thing wrong each, as it goes wrong in the field."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
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
        self.replaced = replaced

    def __getattr__(self, name: str) -> Any:
        return self.replaced.get(name) or getattr(self.worker, name)


@dataclass(frozen=True, slots=True)
class Started:
    worker: Any
    shard: Shard


Begin = Callable[[Workload, Recipe, RankContext], Started]


def start(name: str, workload: Workload, recipe: Recipe, process: RankContext) -> Started:
    worker = build_strategy(name, {}).start(workload, recipe, process)
    return Started(worker, Shard(index=process.rank, count=process.world_size))


def ddp(workload: Workload, recipe: Recipe, process: RankContext) -> Started:
    return start("ddp", workload, recipe, process)


def scaled(factor: float) -> Begin:
    def scale(worker: Any) -> None:
        for parameter in worker._parameters:
            parameter.register_hook(lambda gradient: gradient * factor)

    return changed(scale)


def changed(change: Callable[[Any], object]) -> Begin:
    """DDP whose worker is changed, or replaced by what the change returns."""

    def begin(workload: Workload, recipe: Recipe, process: RankContext) -> Started:
        started = ddp(workload, recipe, process)
        return Started(change(started.worker) or started.worker, started.shard)

    return begin


def after_each_step(worker: Any, then: Callable[[], object]) -> Faulty:
    def step(batch: Batch, recorder: Spans) -> Tensor:
        loss: Tensor = worker.step(batch, recorder)
        then()
        return loss

    return Faulty(worker, step=step)


def clipped_by_default(workload: Workload, recipe: Recipe, process: RankContext) -> Started:
    """DeepSpeed, told nothing about clipping."""
    from shardmark.strategies.deepspeed.worker import start_engine

    config = Zero(name="zero-1", stage=1).config(recipe, process)
    del config["gradient_clipping"]
    worker = start_engine(workload, recipe, process, config=config)
    return Started(worker, Shard(index=process.rank, count=process.world_size))


def with_share(index: Callable[[RankContext], int]) -> Begin:
    def begin(workload: Workload, recipe: Recipe, process: RankContext) -> Started:
        worker = ddp(workload, recipe, process).worker
        return Started(worker, Shard(index=index(process), count=process.world_size))

    return begin


def decay_spares_vectors(worker: Any) -> None:
    group = worker._optimizer.param_groups[0]
    vectors = [p for p in group["params"] if p.dim() < 2]
    group["params"] = [p for p in group["params"] if p.dim() >= 2]
    worker._optimizer.add_param_group({**group, "params": vectors, "weight_decay": 0.0})


def no_decay(worker: Any) -> None:
    worker._optimizer.param_groups[0]["weight_decay"] = 0.0


def other_weights(worker: Any) -> None:
    with torch.no_grad():
        for parameter in worker._parameters:
            parameter.mul_(1.01)


def other_draws(worker: Any) -> Faulty:
    def step(batch: Batch, recorder: Spans) -> Tensor:
        torch.manual_seed(4321 + dist.get_rank())
        return worker.step(batch, recorder)  # type: ignore[no-any-return]

    return Faulty(worker, step=step)


def reduces_in_bf16(worker: Any) -> None:
    worker._model.register_comm_hook(None, bf16_compress_hook)


def masters_in_bf16(worker: Any) -> Faulty:
    @torch.no_grad()
    def rounds() -> None:
        for parameter in worker._parameters:
            parameter.copy_(parameter.bfloat16())

    return after_each_step(worker, rounds)


def skips_a_step(worker: Any) -> None:
    update, calls = worker._update, count(1)
    worker._update = lambda: update() if next(calls) != 2 else worker._optimizer.zero_grad()


def evaluates_other_buffers(worker: Any) -> Faulty:
    """The model that is evaluated comes from the last rank, with its own batch statistics."""
    everybody: list[Any] = [None] * dist.get_world_size()
    faulty = after_each_step(worker, lambda: dist.all_gather_object(everybody, worker.buffers()))
    faulty.replaced["buffers"] = lambda: everybody[-1]
    return faulty


def averages_nothing(worker: Any) -> None:
    worker._model.require_backward_grad_sync = False
    worker._synchronise = None


def computes_in_bf16(worker: Any) -> None:
    worker._precision = lambda: torch.autocast("cpu", dtype=torch.bfloat16)


FAULTS: dict[str, tuple[Begin, str]] = {
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
    "decay spares vectors": (changed(decay_spares_vectors), "weight decay spares biases and norms"),
    "no decay": (changed(no_decay), "weight decay is not applied"),
    # As with a sampler that nobody told its rank.
    "repeated samples": (with_share(lambda _: 0), "repeated samples"),
    "exchanged shares": (
        with_share(lambda process: process.world_size - 1 - process.rank),
        "different batch shares",
    ),
    "other weights": (changed(other_weights), "different initial weights"),
    "other draws": (changed(other_draws), "different random draws (dropout, proposal sampling)"),
    "bf16 reduction": (
        changed(reduces_in_bf16),
        "gradients are reduced in a lower precision (bf16)",
    ),
    "bf16 masters": (
        changed(masters_in_bf16),
        "master weights are kept in a lower precision (bf16)",
    ),
    "skipped step": (changed(skips_a_step), "the update of step 2 is skipped"),
    "other buffers": (
        changed(evaluates_other_buffers),
        "buffers are not synchronised: rank 1's are evaluated, not rank 0's",
    ),
    "nothing averaged": (
        changed(averages_nothing),
        "gradients are not averaged: only rank 0's is used",
    ),
    "bf16 computation": (changed(computes_in_bf16), "computation in a lower precision (bf16)"),
}
