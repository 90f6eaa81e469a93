"""Trainings with one thing wrong each, as it goes wrong in the field."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

from shardmark.base.layout import Shard
from shardmark.base.recipe import Recipe
from shardmark.extras.detection.batch import DetectionBatch
from shardmark.extras.detection.proposals import PictureSampler
from shardmark.ranks.measure.step.recorder import Spans
from shardmark.ranks.strategies import build_strategy
from shardmark.ranks.strategies.base import RankContext
from shardmark.ranks.strategies.deepspeed.strategy import Zero
from shardmark.ranks.workloads.base import Batch, TensorPlan, Workload
from shardmark.ranks.workloads.language.batch import TokenBatch


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
    share = strategy.layout(process.world_size).ranks[process.rank].share
    assert share is not None
    return Started(strategy.start(workload, recipe, process), share)


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
    from shardmark.ranks.strategies.deepspeed.worker import start_engine

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


def forgets_errors(workload: Workload, recipe: Recipe, process: RankContext) -> Started:
    started = start("ddp", workload, recipe, process, compress="powersgd")
    started.worker.error_feedback.__self__.state.use_error_feedback = False
    return started


def first_round_discarded(workload: Workload, recipe: Recipe, process: RankContext) -> Started:
    """torchft's `init_sync`: the first meeting gives rank 0's weights to all ranks."""
    started = start("diloco", workload, recipe, process, period_steps=2)
    worker = started.worker
    synchronise: Callable[[list[str]], None] = worker._synchronise
    met: list[None] = []

    def after_broadcast(names: list[str]) -> None:
        for name in names if not met else ():
            dist.broadcast(worker._trained[name].detach(), src=0)
        met.append(None)
        synchronise(names)

    worker._synchronise = after_broadcast
    return started


def messages_in_fp32(workload: Workload, recipe: Recipe, process: RankContext) -> Started:
    started = start("ps-sync", workload, recipe, process)
    return replace(started, shard=Shard(index=process.rank, count=process.world_size - 1))


def untied_layers(workload: Workload, recipe: Recipe, process: RankContext) -> Started:
    """Tied weights as `parallelize_module` leaves them."""
    with patch("shardmark.ranks.strategies.layers.divided._tied", return_value=[]):
        return start("tp", workload, recipe, process)


def with_plan(change: Callable[[TensorPlan, int], TensorPlan]) -> Callable[..., Started]:
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


def untied_stages(workload: Workload, recipe: Recipe, process: RankContext) -> Started:
    """Each stage keeps the gradient of its own copy of the tied weight."""
    started = start("pp", workload, recipe, process)
    started.worker._tied = {}
    return started


def clipped_by_stage(workload: Workload, recipe: Recipe, process: RankContext) -> Started:
    started = start("pp", workload, recipe, process)
    worker = started.worker
    worker._clip = lambda largest: nn.utils.clip_grad_norm_(worker._parameters, largest)
    return started


def gradients_not_summed(workload: Workload, recipe: Recipe, process: RankContext) -> Started:
    """Each rank updates with the gradients of its part of the sequences."""
    started = start("ulysses", workload, recipe, process)
    started.worker._model.require_backward_grad_sync = False
    return started


def positions_from_zero(workload: Workload, recipe: Recipe, process: RankContext) -> Started:
    """Each part of a sequence begins at the first position."""
    started = start("ulysses", workload, recipe, process)
    part = started.worker._part

    def moved(batch: TokenBatch, index: int, count: int) -> TokenBatch:
        cut: TokenBatch = part(batch, index, count)
        assert cut.positions is not None
        return replace(cut, positions=cut.positions - cut.positions[:, :1])

    started.worker._part = moved
    return started


def torchvisions_sampler(workload: Workload, recipe: Recipe, process: RankContext) -> Started:
    """Proposals from the global generator, as a plain training script draws them."""
    from torchvision.models.detection._utils import BalancedPositiveNegativeSampler

    started = ddp(workload, recipe, process)
    for owner in (started.worker.module.rpn, started.worker.module.roi_heads):
        ours = owner.fg_bg_sampler
        assert isinstance(ours, PictureSampler)
        del owner.fg_bg_sampler
        owner.fg_bg_sampler = BalancedPositiveNegativeSampler(
            ours.batch_size_per_image, ours.positive_fraction
        )
    return started


@dataclass
class OtherSeeds:
    """A worker that samples other proposals from the same pictures."""

    worker: Any

    def step(self, batch: Batch, recorder: Spans) -> Tensor:
        assert isinstance(batch, DetectionBatch)
        targets = tuple(
            target | {"sampling_seed": target["sampling_seed"] + 1} for target in batch.targets
        )
        return self.worker.step(replace(batch, targets=targets), recorder)  # type: ignore[no-any-return]


def other_seeds(workload: Workload, recipe: Recipe, process: RankContext) -> Started:
    """The strategy's own seeds: only zero-1 samples so, say."""
    started = start("zero-1", workload, recipe, process)
    faulty = Faulty(started.worker, step=OtherSeeds(started.worker).step)
    return Started(faulty, started.shard)


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
