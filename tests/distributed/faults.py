"""Trainings with one thing wrong each, as it goes wrong in the field."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

from shardmark.base.layout import Shard
from shardmark.base.recipe import Recipe
from shardmark.extras.detection.proposals import PictureSampler
from shardmark.extras.detection.task import DetectionBatch
from shardmark.ranks.measure.step.recorder import Spans
from shardmark.ranks.strategies import build_strategy
from shardmark.ranks.strategies.base import RankContext
from shardmark.ranks.strategies.deepspeed.strategy import Zero
from shardmark.ranks.workloads.base import Batch, TensorPlan, Workload
from shardmark.ranks.workloads.language.batch import TokenBatch
from tests import present


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
    strategy = build_strategy(name, options)
    share = present(strategy.layout(process.world_size).ranks[process.rank].share)
    return Started(strategy.start(workload, recipe, process), share)


def ddp(workload: Workload, recipe: Recipe, process: RankContext) -> Started:
    return start("ddp", workload, recipe, process)


Begin = Callable[[Workload, Recipe, RankContext], Started]


def worker_of(name: str, **options: Any) -> Callable[[Callable[[Any, RankContext], Any]], Begin]:
    """Decorate a function that changes the strategy's worker, or returns another one."""

    def decorated(change: Callable[[Any, RankContext], Any]) -> Begin:
        def begin(workload: Workload, recipe: Recipe, process: RankContext) -> Started:
            started = start(name, workload, recipe, process, **options)
            return replace(started, worker=change(started.worker, process) or started.worker)

        return begin

    return decorated


def scaled(factor: float) -> Begin:
    @worker_of("ddp")
    def begin(worker: Any, _: RankContext) -> None:
        for parameter in worker._parameters:
            parameter.register_hook(lambda gradient: gradient * factor)

    return begin


def clipped_by_default(workload: Workload, recipe: Recipe, process: RankContext) -> Started:
    """DeepSpeed, told nothing about clipping."""
    from shardmark.ranks.strategies.deepspeed.worker import start_engine

    config = Zero(name="zero-1", stage=1).config(recipe, process.device.type)
    del config["gradient_clipping"]
    worker = start_engine(workload, recipe, process, config=config, check=nn.Module.modules)
    return Started(worker, Shard(index=process.rank, count=process.world_size))


@worker_of("ddp")
def decay_spares_vectors(worker: Any, _: RankContext) -> None:
    optimizer = worker._optimizer
    group = optimizer.param_groups[0]
    vectors = [p for p in group["params"] if p.dim() < 2]
    group["params"] = [p for p in group["params"] if p.dim() >= 2]
    optimizer.add_param_group({**group, "params": vectors, "weight_decay": 0.0})


@worker_of("ddp")
def no_decay(worker: Any, _: RankContext) -> None:
    worker._optimizer.param_groups[0]["weight_decay"] = 0.0


def shares_repeat(workload: Workload, recipe: Recipe, process: RankContext) -> Started:
    """Every rank loads the first rank's share, as with a sampler that nobody told its rank."""
    return Started(ddp(workload, recipe, process).worker, Shard(index=0, count=process.world_size))


def shares_exchanged(workload: Workload, recipe: Recipe, process: RankContext) -> Started:
    other = process.world_size - 1 - process.rank
    worker = ddp(workload, recipe, process).worker
    return Started(worker, Shard(index=other, count=process.world_size))


@worker_of("ddp")
def other_weights(worker: Any, _: RankContext) -> None:
    with torch.no_grad():
        for parameter in worker._parameters:
            parameter.mul_(1.01)


@worker_of("ddp")
def other_draws(worker: Any, process: RankContext) -> Faulty:
    def step(batch: Batch, recorder: Spans) -> Any:
        torch.manual_seed(4321 + process.rank)
        return worker.step(batch, recorder)

    return Faulty(worker, step=step)


@worker_of("ddp")
def reduces_in_bf16(worker: Any, _: RankContext) -> None:
    worker._model.register_comm_hook(None, bf16_compress_hook)


@worker_of("ddp")
def masters_in_bf16(worker: Any, _: RankContext) -> Faulty:
    def step(batch: Batch, recorder: Spans) -> Any:
        loss = worker.step(batch, recorder)
        with torch.no_grad():
            for parameter in worker._parameters:
                parameter.copy_(parameter.bfloat16())
        return loss

    return Faulty(worker, step=step)


@worker_of("ddp")
def skips_a_step(worker: Any, _: RankContext) -> None:
    update, calls = worker._update, list[None]()

    def update_unless_second() -> None:
        calls.append(None)
        if len(calls) == 2:
            worker._optimizer.zero_grad()
        else:
            update()

    worker._update = update_unless_second


def keeps_norms_apart(workload: Workload, recipe: Recipe, process: RankContext) -> Started:
    return ddp(workload, recipe.model_copy(update={"sync_batch_norm": False}), process)


@worker_of("ddp")
def evaluates_other_buffers(worker: Any, process: RankContext) -> Faulty:
    """The model that is evaluated comes from the last rank, with its own batch statistics."""
    everybody: list[Any] = [None] * process.world_size

    def step(batch: Batch, recorder: Spans) -> Any:
        loss = worker.step(batch, recorder)
        dist.all_gather_object(everybody, worker.buffers())
        return loss

    return Faulty(worker, step=step, buffers=lambda: everybody[-1])


@worker_of("ddp")
def mean_of_means(worker: Any, process: RankContext) -> Faulty:
    """Every rank divides by its own weight, and takes the mean of ranks for the whole mean."""

    def step(batch: Any, recorder: Spans) -> Any:
        own = replace(batch, step_weight=batch.weight * process.world_size)
        return worker.step(own, recorder)

    return Faulty(worker, step=step)


@worker_of("ddp")
def adds_no_weights(worker: Any, process: RankContext) -> None:
    """The same where the loss alone knows them: each rank's own stands for all."""
    worker._over_shares = lambda value: value * process.world_size


@worker_of("ddp")
def averages_nothing(worker: Any, _: RankContext) -> None:
    worker._model.require_backward_grad_sync = False
    worker.synchronise = None


@worker_of("ddp")
def computes_in_bf16(worker: Any, _: RankContext) -> None:
    worker._precision = lambda: torch.autocast("cpu", dtype=torch.bfloat16)


@worker_of("ddp", compress="powersgd")
def forgets_errors(worker: Any, _: RankContext) -> None:
    worker.error_feedback.__self__.state.use_error_feedback = False


@worker_of("diloco", period_steps=2)
def first_round_discarded(worker: Any, _: RankContext) -> None:
    """torchft's `init_sync`: the first meeting gives rank 0's weights to all ranks."""
    synchronise: Callable[[list[str]], None] = worker._synchronise
    met: list[None] = []

    def after_broadcast(names: list[str]) -> None:
        for name in names if not met else ():
            dist.broadcast(worker._trained[name].detach(), src=0)
        met.append(None)
        synchronise(names)

    worker._synchronise = after_broadcast


def messages_in_fp32(workload: Workload, recipe: Recipe, process: RankContext) -> Started:
    started = start("ps-sync", workload, recipe, process)
    return replace(started, shard=Shard(index=process.rank, count=process.world_size - 1))


def untied_layers(workload: Workload, recipe: Recipe, process: RankContext) -> Started:
    """Tied weights as `parallelize_module` leaves them."""
    with patch("shardmark.ranks.strategies.layers.divided._tied", return_value=[]):
        return start("tp", workload, recipe, process)


def with_plan(change: Callable[[TensorPlan, int], TensorPlan]) -> Begin:
    def begin(workload: Workload, recipe: Recipe, process: RankContext) -> Started:
        planned = workload.tensor_plan

        def changed(model: nn.Module) -> TensorPlan:
            plan = planned(model)
            assert isinstance(plan, TensorPlan)
            return change(plan, process.rank)

        workload.tensor_plan = changed  # type: ignore[method-assign]
        return start("tp", workload, recipe, process)

    return begin


def norms_not_summed(plan: TensorPlan, _: int) -> TensorPlan:
    """The plan of Qwen3 without `replicated_with_grad_allreduce`."""
    styles = {name: style for name, style in plan.styles.items() if style != "summed"}
    return TensorPlan(styles=styles, units=plan.units)


def order_of_a_set(plan: TensorPlan, rank: int) -> TensorPlan:
    """A plan in another order on each rank, as if it were made from a set of names."""
    order = sorted(plan.styles, reverse=rank == 1)
    return TensorPlan(styles={name: plan.styles[name] for name in order}, units=plan.units)


@worker_of("pp")
def untied_stages(worker: Any, _: RankContext) -> None:
    """Each stage keeps the gradient of its own copy of the tied weight."""
    worker._tied = {}


@worker_of("pp")
def clipped_by_stage(worker: Any, _: RankContext) -> None:
    worker._clip = lambda largest: nn.utils.clip_grad_norm_(worker._parameters, largest)


@worker_of("ulysses")
def gradients_not_summed(worker: Any, _: RankContext) -> None:
    """Each rank updates with the gradients of its part of the sequences."""
    worker._model.require_backward_grad_sync = False


@worker_of("ulysses")
def positions_from_zero(worker: Any, _: RankContext) -> None:
    """Each part of a sequence begins at the first position."""
    part = worker._part

    def moved(batch: TokenBatch, index: int, count: int) -> TokenBatch:
        cut: TokenBatch = part(batch, index, count)
        positions = present(cut.positions)
        return replace(cut, positions=positions - positions[:, :1])

    worker._part = moved


@worker_of("ddp")
def torchvisions_sampler(worker: Any, _: RankContext) -> None:
    """Proposals from the global generator, as a plain training script draws them."""
    from torchvision.models.detection._utils import BalancedPositiveNegativeSampler

    for owner in (worker.module.rpn, worker.module.roi_heads):
        ours = owner.fg_bg_sampler
        assert isinstance(ours, PictureSampler)
        del owner.fg_bg_sampler
        owner.fg_bg_sampler = BalancedPositiveNegativeSampler(
            ours.batch_size_per_image, ours.positive_fraction
        )


@worker_of("zero-1")
def other_seeds(worker: Any, _: RankContext) -> Faulty:
    """The strategy's own seeds: only zero-1 samples so, say."""

    def step(batch: Batch, recorder: Spans) -> Any:
        assert isinstance(batch, DetectionBatch)
        targets = tuple(
            target | {"sampling_seed": target["sampling_seed"] + 1} for target in batch.targets
        )
        return worker.step(replace(batch, targets=targets), recorder)

    return Faulty(worker, step=step)


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
