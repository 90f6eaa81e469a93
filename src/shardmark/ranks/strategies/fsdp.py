"""FSDP2 (`fully_shard`): sharded parameters, gradients and optimizer state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field

from shardmark.base.layout import Fractions, Layout, data_parallel
from shardmark.base.machine import Machine
from shardmark.base.numerics import ONE_DEVICE, Casts, Numerics
from shardmark.ranks.strategies.base import (
    MixedPrecision,
    RankContext,
    Strategy,
    check_machine,
    common_settings,
    is_native,
    refuse,
    refuse_for_distributed_tensors,
)

if TYPE_CHECKING:
    from shardmark.base.recipe import Recipe
    from shardmark.ranks.strategies.step import EagerWorker
    from shardmark.ranks.workloads.base import Workload
    from shardmark.ranks.workloads.options import WorkloadOptions

DEFAULT_GROUP = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class FSDP(Strategy):
    """Parameters, gradients and optimizer state sharded (Zhao et al., VLDB 2023; FSDP2).

    `reshard_after_forward=False` keeps the gathered parameters until the backward pass: ZeRO-2's
    mathematics, less traffic, more memory.
    """

    costs = "shardmark.ranks.costs.sharded:FSDPCosts"
    library = "FSDP2"
    refused_parameters = ("scalar", "sparse", "empty", "mixed types", "hooks", "strides")

    name: str = "fsdp"
    reshard_after_forward: bool = True
    wrap: Literal["blocks", "layers", "root"] = "blocks"
    """Units that are gathered together: repeated blocks, single layers, or the full model."""
    mixed_precision: MixedPrecision | None = None
    """`native`: parameters are gathered in 16 bits, gradients reduced in fp32.  `autocast` is what
    `ddp` does.  null: `native` in bf16, `autocast` in fp16 and for detection."""
    reduce_each_pass: bool = False
    """Reduce gradients in each micro-batch of gradient accumulation: a rank holds shards of them
    instead of full gradients, and sends them as many times as there are micro-batches."""

    def for_workload(self, options: WorkloadOptions) -> Self:
        if self.mixed_precision is None and not options.casts_parameters:
            return replace(self, mixed_precision="autocast")
        return self

    def group(self, world_size: int, nodes: int) -> int:
        """Number of consecutive ranks that share one copy of the model."""
        return world_size

    def check(self, world_size: int, machine: Machine, recipe: Recipe) -> None:
        refuse_for_distributed_tensors(self.name, recipe)
        gathers_inside = {"none": (), "blocks": ("layers",), "model": ("blocks", "layers")}
        refuse(
            self.name,
            (
                self.wrap in gathers_inside[recipe.compile],
                f"compile: {recipe.compile} with wrap: {self.wrap} has FSDP gather parameters "
                "inside of what is compiled, where it falls to pieces",
                "set recipe.compile to blocks or none"
                if self.wrap == "blocks"
                else "set wrap to blocks or root, or recipe.compile to none",
            ),
            (
                self.wrap == "layers" and recipe.activation_checkpointing == "selective",
                "selective checkpointing is only tested with parameters that are gathered outside"
                " of a block",
                "set wrap to blocks, or recipe.activation_checkpointing to true",
            ),
        )
        check_machine(self.name, world_size, machine, recipe, offload_instead=None)

    def layout(self, world_size: int, nodes: int = 1) -> Layout:
        group = self.group(world_size, nodes)
        part = 1 / group
        parameters = part if self.reshard_after_forward else 1.0
        holds = Fractions(parameters=parameters, gradients=part, optimizer_state=part)
        return data_parallel(world_size, nodes=nodes, group=group, holds=holds)

    def builds_in_parts(self) -> bool:
        return True

    def loads(self) -> tuple[str, ...]:
        return ("torch.distributed.fsdp",)

    def backend(self, device_type: str, recipe: Recipe) -> str:
        """Offloaded shards are gathered, clipped and unscaled on the CPU, where NCCL cannot."""
        if device_type == "cuda" and recipe.cpu_offload:
            return "cpu:gloo,cuda:nccl"
        return Strategy.backend(self, device_type, recipe)

    def settings(self, recipe: Recipe) -> Mapping[str, object]:
        native = {"mixed_precision": "native"} if is_native(self.mixed_precision, recipe) else {}
        return common_settings(recipe) | native

    def numerics(self, recipe: Recipe) -> Numerics:
        if recipe.precision == "fp32" or not is_native(self.mixed_precision, recipe):
            return ONE_DEVICE
        return Numerics(casts=Casts(precision=recipe.precision, units=self.wrap, gradients="fp32"))

    def start(self, workload: Workload, recipe: Recipe, context: RankContext) -> EagerWorker:
        from shardmark.ranks.strategies.step import EagerWorker

        return self.start_as(EagerWorker, workload, recipe, context)

    def start_as(
        self,
        worker_class: Callable[..., EagerWorker],
        workload: Workload,
        recipe: Recipe,
        context: RankContext,
    ) -> EagerWorker:
        """Shard the workload's model over the mesh, blocks first and the rest at the root."""
        import torch
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import (
            CPUOffloadPolicy,
            MixedPrecisionPolicy,
            OffloadPolicy,
            fully_shard,
        )

        from shardmark.ranks.strategies.blocks import sharding_units
        from shardmark.ranks.strategies.casting import allow_mixed_dtype_batch_norm, widen_outputs
        from shardmark.ranks.strategies.initial_weights import build_in_parts
        from shardmark.ranks.strategies.step import AUTOCAST_DTYPES

        group = self.group(context.world_size, context.nodes)
        copies = context.world_size // group
        names = ("replicate", "shard") if copies > 1 else ("shard",)
        sizes = (copies, group) if copies > 1 else (group,)
        native = is_native(self.mixed_precision, recipe)
        policy = MixedPrecisionPolicy(
            param_dtype=AUTOCAST_DTYPES[recipe.precision] if native else None,
            reduce_dtype=torch.float32 if recipe.weights == "fp32" else None,
        )
        mesh = init_device_mesh(context.device.type, sizes, mesh_dim_names=names)
        model, large = build_in_parts(
            workload,
            recipe,
            context,
            check=lambda model: self.check_model(workload, model, context.world_size),
            parts=lambda model: sharding_units(model, self.wrap, workload.blocks(model)),
            shard=partial(
                fully_shard,
                mesh=mesh,
                mp_policy=policy,
                offload_policy=CPUOffloadPolicy() if recipe.cpu_offload else OffloadPolicy(),
                reshard_after_forward=self.reshard_after_forward,
            ),
        )
        if native:
            allow_mixed_dtype_batch_norm(model)
            widen_outputs(model)
        return worker_class(
            model,
            workload=workload,
            recipe=recipe,
            device=context.device,
            shares=context.world_size,
            # The method is added by fully_shard.
            synchronise=None if self.reduce_each_pass else model.set_requires_gradient_sync,
            casts_of=self.name if native else None,
            large=large,
            sharded_by=self.name,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridFSDP(FSDP):
    """Sharded inside a group of ranks, replicated across the groups (FSDP2 on a 2-D mesh)."""

    costs = "shardmark.ranks.costs.sharded:FSDPCosts"

    name: str = "fsdp-hybrid"
    shard_group: Annotated[int, Field(ge=2)] | None = None
    """Ranks that share one copy of the model, neighbours in rank order; null: those of one node,
    or 2 on a single node.  Groups lie inside nodes, or take up whole nodes."""

    def group(self, world_size: int, nodes: int) -> int:
        if self.shard_group is not None:
            return self.shard_group
        return DEFAULT_GROUP if nodes == 1 else world_size // nodes

    def unsupported_reason(self, world_size: int, nodes: int = 1) -> str | None:
        group = self.group(world_size, nodes)
        if group == 1:
            return "one rank on each node has nobody there to shard the model with"
        if world_size % group or world_size <= group:
            return f"{world_size} ranks do not make two or more groups of shard_group {group}"
        node_ranks = world_size // nodes
        if node_ranks % group and group % node_ranks:
            return (
                f"nodes of {node_ranks} ranks do not hold whole groups of shard_group {group}: "
                "some would lie in a node and others across nodes"
            )
        return None
