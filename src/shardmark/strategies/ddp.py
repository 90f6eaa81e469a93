"""DistributedDataParallel: a replica on every rank, gradients all-reduced."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from shardmark.core.machine import Machine
from shardmark.strategies.base import RankContext
from shardmark.strategies.checks import (
    check_devices,
    check_no_offload,
    check_precision,
    needs_company,
)
from shardmark.strategies.collective import CollectiveStrategy
from shardmark.strategies.layout import Layout, replicas
from shardmark.strategies.settings import common_settings
from shardmark.strategies.wire import ModelSize, WireBytes, all_reduced

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from shardmark.core.recipe import Recipe
    from shardmark.strategies.step import EagerWorker
    from shardmark.workloads.base import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class DDP(CollectiveStrategy):
    """A full replica on every rank, gradients all-reduced (Li et al., VLDB 2020, section 3.2)."""

    name: str = "ddp"
    bucket_mb: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 25.0
    """Gradients in one all-reduce, MiB: smaller overlaps sooner, larger pays less latency."""
    static_graph: bool = False
    """The same parameters are used in every step: DDP may then reorder its buckets once."""

    def unsupported_reason(self, world_size: int, nodes: int = 1) -> str | None:  # noqa: ARG002
        return needs_company(world_size)

    def check(self, world_size: int, machine: Machine, recipe: Recipe) -> None:
        check_devices(self.name, world_size, machine)
        check_precision(self.name, machine, recipe)
        check_no_offload(self.name, recipe, "fsdp or zero-2")

    def layout(self, world_size: int, nodes: int = 1) -> Layout:  # noqa: ARG002
        return replicas(world_size)

    def wire_bytes(
        self,
        size: ModelSize,
        recipe: Recipe,  # noqa: ARG002  (micro-batches before the last are not reduced)
        world_size: int,
        nodes: int = 1,  # noqa: ARG002
    ) -> WireBytes:
        return all_reduced(size, world_size)

    def loads(self) -> tuple[str, ...]:
        return ("torch.nn.parallel",)

    def settings(self, recipe: Recipe) -> Mapping[str, object]:
        return common_settings(recipe) | {"broadcast_buffers": False}

    def start(self, workload: Workload, recipe: Recipe, process: RankContext) -> EagerWorker:
        from torch.nn.parallel import DistributedDataParallel

        from shardmark.strategies.blocks import build_on
        from shardmark.strategies.step import EagerWorker

        model = build_on(process.device, workload, recipe)
        names = inspect.signature(DistributedDataParallel).parameters
        # Its name up to torch 2.14, and since.
        renamed = "forward_sync_buffers" in names
        buffers: dict[str, Any] = {
            "forward_sync_buffers" if renamed else "broadcast_buffers": False
        }
        ddp = DistributedDataParallel(
            model,
            bucket_cap_mb=self.bucket_mb,
            gradient_as_bucket_view=True,
            static_graph=self.static_graph,
            **buffers,
        )
        trained = [p for p in model.parameters() if p.requires_grad]
        gradient_bytes = sum(p.numel() * p.element_size() for p in trained)

        def synchronise(last: bool) -> AbstractContextManager[object]:
            return nullcontext() if last else ddp.no_sync()

        return EagerWorker(
            model=ddp,
            module=model,
            workload=workload,
            recipe=recipe,
            device=process.device,
            synchronise=synchronise,
            # Gradients are views of the buckets, which the reducer keeps when they are dropped.
            untracked_bytes=lambda: 0 if trained[0].grad is not None else gradient_bytes,
        )
