"""DistributedDataParallel: a replica on every rank, gradients all-reduced."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import version
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from shardmark.core.layout import Layout
from shardmark.core.wire import ModelSize, WireBytes
from shardmark.strategies.base import (
    LaunchConfiguration,
    RankContext,
    Strategy,
    common_settings,
)

if TYPE_CHECKING:
    from shardmark.core.recipe import Recipe
    from shardmark.strategies.step import EagerWorker
    from shardmark.workloads.base import Workload

UNUSED_NOTE = "find_unused_parameters also all-reduces 4 bytes for each parameter tensor"


@dataclass(frozen=True, slots=True, kw_only=True)
class DDP(Strategy):
    """A full replica on every rank, gradients all-reduced (Li et al., VLDB 2020, section 3.2)."""

    name: str = "ddp"
    bucket_mb: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 25.0
    """Gradients in one all-reduce, MiB: smaller overlaps sooner, larger pays less latency."""
    static_graph: bool = False
    """The same parameters are used in every step: DDP may then reorder its buckets once."""
    find_unused_parameters: bool = False
    """Look in each step for parameters that the loss does not depend on, which DDP else waits for.
    Those that no rank used have no gradient, and are not updated."""

    def wire_bytes(
        self, size: ModelSize, recipe: Recipe, world_size: int, nodes: int = 1
    ) -> WireBytes:
        """Unused parameters are sent as zeros."""
        needed = Strategy.wire_bytes(self, size, recipe, world_size, nodes)
        return replace(needed, note=UNUSED_NOTE) if self.find_unused_parameters else needed

    def loads(self) -> tuple[str, ...]:
        return ("torch.nn.parallel",)

    def settings(self, recipe: Recipe) -> Mapping[str, object]:
        return common_settings(recipe) | {"broadcast_buffers": False}

    def start(self, workload: Workload, recipe: Recipe, context: RankContext) -> EagerWorker:
        from shardmark.strategies.blocks import build_on
        from shardmark.strategies.replicas import DistributedReplicas
        from shardmark.strategies.step import EagerWorker

        model = build_on(context.device, workload, recipe)
        ddp = DistributedReplicas(model, **self._arguments(_buffers_option()))
        trained = [p for p in model.parameters() if p.requires_grad]
        gradient_bytes = sum(p.numel() * p.element_size() for p in trained)

        def synchronise(last: bool) -> None:
            ddp.require_backward_grad_sync = last  # what `no_sync` sets

        return EagerWorker(
            model,
            called=ddp,
            workload=workload,
            recipe=recipe,
            device=context.device,
            shares=context.world_size,
            synchronise=synchronise,
            # Gradients are views of the buckets, which the reducer keeps when they are dropped.
            untracked_bytes=lambda: (
                0 if any(p.grad is not None for p in trained) else gradient_bytes
            ),
        )

    def launch_configuration(
        self, recipe: Recipe, layout: Layout, device_type: str
    ) -> LaunchConfiguration:
        return LaunchConfiguration(
            wrapper="torch.nn.parallel.DistributedDataParallel",
            arguments=self._arguments(_buffers_option()),
            # Its launcher starts one process alone for MULTI_CPU, which is for MPI.
            accelerate={"distributed_type": "MULTI_GPU"},
            accelerate_arguments=self._arguments("broadcast_buffers"),
            notes=("Accelerate takes the wrapper's arguments as DistributedDataParallelKwargs.",),
        )

    def _arguments(self, buffers_option: str) -> dict[str, Any]:
        """Of DistributedDataParallel, whose option for buffers has that name."""
        return {
            "bucket_cap_mb": self.bucket_mb,
            "gradient_as_bucket_view": True,
            "static_graph": self.static_graph,
            "find_unused_parameters": self.find_unused_parameters,
            buffers_option: False,
        }


@cache
def _buffers_option() -> str:
    """What the installed torch calls the option, without importing it; 2.13 renamed it."""
    major, minor = version("torch").split(".")[:2]
    return "forward_sync_buffers" if (int(major), int(minor)) >= (2, 13) else "broadcast_buffers"
