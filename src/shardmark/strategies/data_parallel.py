"""torch.nn.DataParallel: one process, several devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardmark.errors import StrategyUnavailable
from shardmark.strategies._checks import (
    check_devices,
    check_no_offload,
    check_precision,
    needs_company,
)
from shardmark.strategies._collective import CollectiveStrategy
from shardmark.strategies._protocol import Machine, Process, Shard
from shardmark.strategies._settings import common_settings
from shardmark.strategies._wire import SILENT, ModelSize, WireBytes

if TYPE_CHECKING:
    from shardmark.experiment.schema import Recipe
    from shardmark.strategies._eager import EagerWorker
    from shardmark.workloads._protocol import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class DataParallel(CollectiveStrategy):
    """One process copies the model to every device at each step (`torch.nn.DataParallel`).

    A world size of n is n devices of one process, so there is one training rank.
    """

    name: str = "dp"

    def makes_sense(self, world_size: int, nodes: int = 1) -> str | None:  # noqa: ARG002
        return needs_company(world_size)

    def check(self, world_size: int, machine: Machine, recipe: Recipe) -> None:
        if machine.device_type != "cuda":
            raise StrategyUnavailable(
                self.name,
                "DataParallel copies the model over CUDA devices, and the device here is the CPU",
                "use ddp, which also runs on the CPU",
            )
        if recipe.activation_checkpointing:
            raise StrategyUnavailable(
                self.name,
                "DataParallel's copies would recompute with the first device's parameters",
                "set recipe.activation_checkpointing to false, or use ddp",
            )
        check_devices(self.name, world_size, machine)
        check_precision(self.name, machine, recipe)
        check_no_offload(self.name, recipe, "fsdp or zero-2")

    def placement(self, world_size: int) -> tuple[Shard | None, ...]:  # noqa: ARG002  (protocol)
        return (Shard(index=0, count=1),)

    def nodes_of(self, world_size: int, nodes: int) -> tuple[int, ...]:  # noqa: ARG002
        return (0,)

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
        return common_settings(recipe) | {
            "batch_norm": "statistics of each device's share; the first device's are evaluated"
        }

    def start(self, workload: Workload, recipe: Recipe, process: Process) -> EagerWorker:
        from shardmark.strategies._blocks import build_on
        from shardmark.strategies._eager import EagerWorker
        from shardmark.strategies._replicas import Replicas

        model = build_on(process.device, workload, recipe)
        return EagerWorker(
            model=Replicas(model, device_ids=list(range(process.devices))),
            module=model,
            workload=workload,
            recipe=recipe,
            device=process.device,
        )
