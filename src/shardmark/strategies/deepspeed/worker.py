"""One rank under DeepSpeed's engine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import shardmark.strategies.deepspeed.preload  # noqa: F401  # isort: skip  (chooses its accelerator)
import deepspeed
import torch
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
)
from torch import Tensor

from shardmark.core.recipe import Recipe
from shardmark.measure.step.recorder import Spans
from shardmark.strategies.base import CheckpointState, HeldState, RankContext
from shardmark.strategies.blocks import build_on
from shardmark.strategies.collective import CollectiveWorker
from shardmark.strategies.deepspeed.checkpoint_state import kept_of, restore
from shardmark.strategies.step import autocast, build_optimizer, state_keys, state_tensors
from shardmark.workloads.base import Batch, Workload

# Where DeepSpeed 0.19 keeps what it holds beside the module: attributes of its ZeRO optimizers.
PARAMETER_HOLDERS = ("bit16_groups_flat", "fp16_partitioned_groups_flat")
GRADIENT_HOLDERS = (
    "averaged_gradients",
    "all_grad_tensors",
    "ipg_buckets",
    "grad_partitions_flat_buffer",
    "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition",
)
MASTER_HOLDERS = ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat")


def start_engine(
    workload: Workload, recipe: Recipe, process: RankContext, *, config: dict[str, Any]
) -> ZeroWorker:
    """Hand the model and the recipe's own optimizer to DeepSpeed; the process group exists."""
    model = build_on(process.device, workload, recipe)
    parameters = [p for p in model.parameters() if p.requires_grad]
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=parameters,
        optimizer=build_optimizer(parameters, recipe),
        config=config,
        dist_init_required=False,
    )
    return ZeroWorker(engine, workload, recipe, process.device)


class ZeroWorker(CollectiveWorker):
    """Forward, backward and step through DeepSpeed's engine, which divides and reduces itself."""

    def __init__(
        self, engine: Any, workload: Workload, recipe: Recipe, device: torch.device
    ) -> None:
        self._engine = engine
        self._workload = workload
        self._recipe = recipe
        self._device = device
        self._native = engine.bfloat16_enabled() or engine.fp16_enabled()
        self._steps_called = 0
        self._steps_taken = 0
        self._counted_call = 0
        self._base_optimizer().register_step_post_hook(self._count_step)

    def _base_optimizer(self) -> torch.optim.Optimizer:
        optimizer = self._engine.optimizer
        base = getattr(optimizer, "optimizer", optimizer)
        assert isinstance(base, torch.optim.Optimizer)
        return base

    def _count_step(self, *_: object) -> None:
        if self._counted_call != self._steps_called:  # stage 3 steps once for each sub-group
            self._counted_call = self._steps_called
            self._steps_taken += 1

    def step(self, batch: Batch, recorder: Spans) -> Tensor:
        losses = []
        self._steps_called += 1
        micro_batches = batch.split(self._recipe.gradient_accumulation)
        for index, micro_batch in enumerate(micro_batches):
            with recorder.span("forward"):
                if self._native:
                    loss = self._workload.loss(self._engine, micro_batch)
                else:
                    with autocast(self._recipe, self._device):
                        loss = self._workload.loss(self._engine, micro_batch)
            with recorder.span("backward"):
                self._engine.backward(loss)
            if index < len(micro_batches) - 1:
                self._engine.step()  # only counts the micro-batch
            losses.append(loss.detach())
        with recorder.span("optimizer"):
            self._engine.step()
        return losses[0] if len(losses) == 1 else torch.stack(losses).mean()

    def set_learning_rate(self, learning_rate: float) -> None:
        for group in self._engine.optimizer.param_groups:
            group["lr"] = learning_rate

    def skipped_steps(self) -> int:
        return self._steps_called - self._steps_taken

    def full_parameters(self) -> dict[str, Tensor]:
        sharded = self._engine.zero_optimization()
        full = {}
        for name, parameter in self._engine.module.named_parameters():
            value = safe_get_full_fp32_param(parameter) if sharded else parameter
            full[name] = value.detach().float().cpu().clone()
        return full

    def full_gradients(self) -> dict[str, Tensor]:
        sharded = self._engine.zero_optimization()
        found = {
            name: safe_get_full_grad(parameter) if sharded else parameter.grad
            for name, parameter in self._engine.module.named_parameters()
        }
        # Loss-scaled gradients are unscaled in the optimizer step, which is still to come.
        scaler = getattr(self._engine, "torch_autocast_z0_gradscaler", None) or getattr(
            self._engine.optimizer, "torch_autocast_gradscaler", None
        )
        scale = scaler.get_scale() if scaler is not None else 1.0
        return {
            name: gradient.detach().float().cpu().clone() / scale
            for name, gradient in found.items()
            if gradient is not None
        }

    def full_optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        sharded = self._engine.zero_optimization()
        state: dict[str, dict[str, Tensor]] = {}
        keys = state_keys(self._recipe.optimizer)
        for name, parameter in self._engine.module.named_parameters():
            if sharded:
                found = {key: safe_get_full_optimizer_state(parameter, key) for key in keys}
            else:
                found = self._base_optimizer().state.get(parameter, {})
            state[name] = {
                key: value.detach().float().cpu().clone()
                for key, value in found.items()
                if isinstance(value, Tensor)
            }
        return state

    def buffers(self) -> dict[str, Tensor]:
        return {name: b.detach().cpu().clone() for name, b in self._engine.module.named_buffers()}

    def checkpoint_state(self) -> CheckpointState:
        counts = {"steps_called": self._steps_called, "steps_taken": self._steps_taken}
        return kept_of(self._engine, self._base_optimizer(), counts)

    def load_checkpoint_state(self, kept: CheckpointState) -> None:
        restore(self._engine, self._base_optimizer(), kept)
        self._steps_called = self._counted_call = int(kept.counts["steps_called"])
        self._steps_taken = int(kept.counts["steps_taken"])

    def held_state(self) -> HeldState:
        optimizer, base = self._engine.optimizer, self._base_optimizer()
        parameters = list(self._engine.module.parameters())
        masters = [*held(optimizer, MASTER_HOLDERS)]
        shards = [p.ds_tensor for p in parameters if hasattr(p, "ds_tensor")]
        own = [*parameters, *shards, *held(optimizer, PARAMETER_HOLDERS)]
        gradients = [p.grad for p in (*parameters, *masters) if p.grad is not None]
        return HeldState(
            parameters=tuple(own),
            gradients=(*gradients, *held(optimizer, GRADIENT_HOLDERS)),
            # ZeRO counts its fp32 partition as optimizer state (Rajbhandari et al., section 3.1).
            optimizer_state=(*state_tensors(base), *masters),
        )


def held(owner: object, names: Iterable[str]) -> Iterator[Tensor]:
    """Every tensor inside the owner's attributes of these names."""
    for name in names:
        yield from tensors_in(getattr(owner, name, None))


def tensors_in(value: object) -> Iterator[Tensor]:
    """Every tensor in nested lists, mappings and plain objects."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from tensors_in(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif hasattr(value, "buffer"):
        yield from tensors_in(value.buffer)
