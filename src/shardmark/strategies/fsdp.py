"""FSDP2 (`fully_shard`): parameters, gradients and optimizer state sharded."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from shardmark.core.machine import Machine
from shardmark.strategies.base import RankContext
from shardmark.strategies.checks import (
    check_devices,
    check_offload_device,
    check_precision,
    needs_company,
)
from shardmark.strategies.collective import CollectiveStrategy
from shardmark.strategies.layout import Fractions, Layout, sharded
from shardmark.strategies.settings import common_settings
from shardmark.strategies.wire import (
    FP32_BYTES,
    PRECISION_BYTES,
    ModelSize,
    Traffic,
    WireBytes,
    sharded_traffic,
    times,
)

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch.distributed.device_mesh import DeviceMesh

    from shardmark.core.recipe import Recipe
    from shardmark.strategies.step import EagerWorker
    from shardmark.workloads.base import Workload

DEFAULT_GROUP = 2
Wrap = Literal["blocks", "layers", "root"]
MixedPrecision = Literal["autocast", "native"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FSDP(CollectiveStrategy):
    """Parameters, gradients and optimizer state sharded (Zhao et al., VLDB 2023; FSDP2).

    `reshard_after_forward=False` keeps the gathered parameters until the backward pass: ZeRO-2's
    mathematics, less traffic, more memory.
    """

    name: str = "fsdp"
    reshard_after_forward: bool = True
    wrap: Wrap = "blocks"
    """What is gathered together: repeated blocks, single layers, or the whole model at once."""
    mixed_precision: MixedPrecision = "autocast"
    """`native` casts parameters to the recipe's precision: less traffic, other mathematics."""

    def unsupported_reason(self, world_size: int, nodes: int = 1) -> str | None:  # noqa: ARG002
        return needs_company(world_size)

    def check(self, world_size: int, machine: Machine, recipe: Recipe) -> None:
        check_devices(self.name, world_size, machine)
        check_precision(self.name, machine, recipe)
        check_offload_device(self.name, machine, recipe)

    def layout(self, world_size: int, nodes: int = 1) -> Layout:  # noqa: ARG002
        part = 1 / world_size
        return sharded(
            world_size,
            group=world_size,
            holds=Fractions(parameters=part, gradients=part, optimizer_state=part),
        )

    def wire_bytes(
        self,
        size: ModelSize,
        recipe: Recipe,
        world_size: int,
        nodes: int = 1,  # noqa: ARG002
    ) -> WireBytes:
        gathers = (2 if self.reshard_after_forward else 1) * recipe.gradient_accumulation
        return WireBytes(
            traffic=sharded_traffic(
                size, gathered_bytes(recipe, self.mixed_precision), world_size, gathers
            ),
            formula=f"{times(gathers)}all-gather, reduce-scatter: {times(gathers)}(n-1)/n P"
            " + (n-1)/n G",
        )

    def loads(self) -> tuple[str, ...]:
        return ("torch.distributed.fsdp",)

    def settings(self, recipe: Recipe) -> Mapping[str, object]:
        return fsdp_settings(recipe, self.mixed_precision)

    def start(self, workload: Workload, recipe: Recipe, process: RankContext) -> EagerWorker:
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh(process.device.type, (process.world_size,))
        return start_sharded(
            workload,
            recipe,
            process,
            mesh=mesh,
            wrap=self.wrap,
            mixed_precision=self.mixed_precision,
            reshard_after_forward=self.reshard_after_forward,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridFSDP(CollectiveStrategy):
    """Sharded inside a group of ranks, replicated across the groups (FSDP2 on a 2-D mesh)."""

    name: str = "fsdp-hybrid"
    shard_group: Annotated[int, Field(ge=2)] | None = None
    """Ranks that share one copy of the model, neighbours in rank order; null: those of one node,
    or 2 on a single node.  Groups lie inside nodes, or take up whole nodes."""
    wrap: Wrap = "blocks"
    mixed_precision: MixedPrecision = "autocast"

    def unsupported_reason(self, world_size: int, nodes: int = 1) -> str | None:
        group = self._group(world_size, nodes)
        if group == 1:
            return "one rank on each node has nobody there to shard the model with"
        if world_size % group or world_size <= group:
            return f"{world_size} ranks do not make two or more groups of shard_group {group}"
        each = world_size // nodes
        if each % group and group % each:
            return (
                f"nodes of {each} ranks do not hold whole groups of shard_group {group}: "
                "some would lie in a node and others across nodes"
            )
        return None

    def _group(self, world_size: int, nodes: int) -> int:
        if self.shard_group is not None:
            return self.shard_group
        return DEFAULT_GROUP if nodes == 1 else world_size // nodes

    def check(self, world_size: int, machine: Machine, recipe: Recipe) -> None:
        check_devices(self.name, world_size, machine)
        check_precision(self.name, machine, recipe)
        check_offload_device(self.name, machine, recipe)

    def layout(self, world_size: int, nodes: int = 1) -> Layout:
        group = self._group(world_size, nodes)
        part = 1 / group
        return sharded(
            world_size,
            group=group,
            holds=Fractions(parameters=part, gradients=part, optimizer_state=part),
        )

    def wire_bytes(
        self, size: ModelSize, recipe: Recipe, world_size: int, nodes: int = 1
    ) -> WireBytes:
        group = self._group(world_size, nodes)
        gathers = 2 * recipe.gradient_accumulation
        held_bytes = gathered_bytes(recipe, self.mixed_precision)
        shard = Traffic(
            kind="all_reduce",
            payload_bytes=size.trained_parameters * FP32_BYTES / group,
            ranks=world_size // group,
        )
        return WireBytes(
            traffic=(*sharded_traffic(size, held_bytes, group, gathers), shard),
            formula=f"{times(gathers)}all-gather and reduce-scatter in a group of s, all-reduce"
            f" across r groups: {times(gathers)}(s-1)/s P + (s-1)/s G + 2 (r-1)/r G/s",
        )

    def loads(self) -> tuple[str, ...]:
        return ("torch.distributed.fsdp",)

    def settings(self, recipe: Recipe) -> Mapping[str, object]:
        return fsdp_settings(recipe, self.mixed_precision)

    def start(self, workload: Workload, recipe: Recipe, process: RankContext) -> EagerWorker:
        from torch.distributed.device_mesh import init_device_mesh

        group = self._group(process.world_size, process.nodes)
        mesh = init_device_mesh(
            process.device.type,
            (process.world_size // group, group),
            mesh_dim_names=("replicate", "shard"),
        )
        return start_sharded(
            workload,
            recipe,
            process,
            mesh=mesh,
            wrap=self.wrap,
            mixed_precision=self.mixed_precision,
            reshard_after_forward=True,
        )


def gathered_bytes(recipe: Recipe, mixed_precision: MixedPrecision) -> int:
    """Of one gathered parameter."""
    return PRECISION_BYTES[recipe.precision] if mixed_precision == "native" else FP32_BYTES


def fsdp_settings(recipe: Recipe, mixed_precision: MixedPrecision) -> dict[str, object]:
    settings = common_settings(recipe)
    if recipe.precision != "fp32":
        settings["mixed_precision"] = mixed_precision
    return settings


def start_sharded(
    workload: Workload,
    recipe: Recipe,
    process: RankContext,
    *,
    mesh: DeviceMesh,
    wrap: Wrap,
    mixed_precision: MixedPrecision,
    reshard_after_forward: bool,
) -> EagerWorker:
    """Shard the workload's model over the mesh, blocks first and the rest at the root."""
    import torch
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
    from torch.distributed.fsdp import fully_shard as shard

    from shardmark.strategies.blocks import build_on, wrapped
    from shardmark.strategies.step import AUTOCAST_DTYPES, EagerWorker

    native = mixed_precision == "native" and recipe.precision != "fp32"
    policy = MixedPrecisionPolicy(
        param_dtype=AUTOCAST_DTYPES[recipe.precision] if native else None,
        reduce_dtype=torch.float32,
    )
    offload = CPUOffloadPolicy() if recipe.cpu_offload else OffloadPolicy()
    model = build_on(process.device, workload, recipe)
    for part in (*wrapped(model, wrap), model):
        shard(
            part,
            mesh=mesh,
            mp_policy=policy,
            offload_policy=offload,
            reshard_after_forward=reshard_after_forward,
        )

    def synchronise(last: bool) -> AbstractContextManager[object]:
        model.set_requires_gradient_sync(last)  # type: ignore[operator]  # added by fully_shard
        return nullcontext()

    return EagerWorker(
        model=model,
        module=model,
        workload=workload,
        recipe=recipe,
        device=process.device,
        synchronise=synchronise,
        autocasts=not native,
        replicated=False,
    )
