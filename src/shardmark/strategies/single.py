"""One device: the baseline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardmark.core.machine import Machine
from shardmark.strategies.base import RankContext
from shardmark.strategies.checks import check_devices, check_no_offload, check_precision
from shardmark.strategies.collective import CollectiveStrategy
from shardmark.strategies.layout import Layout, replicas
from shardmark.strategies.settings import common_settings
from shardmark.strategies.wire import SILENT, ModelSize, WireBytes

if TYPE_CHECKING:
    from shardmark.core.recipe import Recipe
    from shardmark.strategies.step import EagerWorker
    from shardmark.workloads.base import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Single(CollectiveStrategy):
    """One device trains alone, the baseline."""

    name: str = "single"

    def unsupported_reason(self, world_size: int, nodes: int = 1) -> str | None:  # noqa: ARG002
        return None if world_size == 1 else "single is one device"

    def check(self, world_size: int, machine: Machine, recipe: Recipe) -> None:
        check_devices(self.name, world_size, machine)
        check_precision(self.name, machine, recipe)
        check_no_offload(self.name, recipe, "fsdp or zero-2")

    def layout(self, world_size: int, nodes: int = 1) -> Layout:  # noqa: ARG002
        return replicas(world_size)

    def wire_bytes(
        self,
        size: ModelSize,  # noqa: ARG002  (one process)
        recipe: Recipe,  # noqa: ARG002
        world_size: int,  # noqa: ARG002
        nodes: int = 1,  # noqa: ARG002
    ) -> WireBytes:
        return SILENT

    def loads(self) -> tuple[str, ...]:
        return ()

    def settings(self, recipe: Recipe) -> Mapping[str, object]:
        return common_settings(recipe)

    def start(self, workload: Workload, recipe: Recipe, process: RankContext) -> EagerWorker:
        from shardmark.strategies.blocks import build_on
        from shardmark.strategies.step import EagerWorker

        model = build_on(process.device, workload, recipe)
        return EagerWorker(
            model=model, module=model, workload=workload, recipe=recipe, device=process.device
        )
