"""ZeroRedundancyOptimizer: DDP's gradients, and optimizer state divided over the ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from shardmark.core.layout import Fractions, Layout, data_parallel
from shardmark.core.traffic import ModelSize, RequiredTraffic, Traffic
from shardmark.strategies.base import (
    FP32_BYTES,
    LaunchConfiguration,
    RankContext,
    StepState,
    UnitSize,
    updated_tensor,
)
from shardmark.strategies.ddp import DDP

if TYPE_CHECKING:
    from torch import nn

    from shardmark.core.recipe import Recipe
    from shardmark.strategies.step import EagerWorker
    from shardmark.workloads.base import Workload

SETTINGS = {"parameters_as_bucket_view": True, "overlap_with_ddp": False}
"""One broadcast a rank instead of one a parameter.  Overlapping leaves out the first two updates,
clips nothing and takes no parameter groups: other mathematics."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroRedundancy(DDP):
    """Gradients as under `ddp`; each rank updates some parameters, and broadcasts them.

    torch's `ZeroRedundancyOptimizer`; Rajbhandari et al., SC 2020, section 5.1.
    """

    name: str = "zro"

    def layout(self, world_size: int, nodes: int = 1) -> Layout:
        """Parameters are not cut: the fullest rank may hold more than its part of the state."""
        holds = Fractions(optimizer_state=1 / world_size)
        return data_parallel(world_size, nodes=nodes, group=world_size, holds=holds)

    def step_state(
        self,
        units: Sequence[UnitSize],
        recipe: Recipe,
        world_size: int,
        nodes: int = 1,
        *,
        device_type: str = "cuda",
    ) -> StepState:
        """That of `ddp`, and the optimizer's of the rank's own parameters."""
        state = DDP.step_state(self, units, recipe, world_size, nodes, device_type=device_type)
        sizes = [size for unit in units for size in unit.sizes]
        return replace(state, optimizer_share=_largest_share(sizes, world_size))

    def wire_bytes(
        self, size: ModelSize, recipe: Recipe, world_size: int, nodes: int = 1
    ) -> RequiredTraffic:
        gradients = DDP.wire_bytes(self, size, recipe, world_size, nodes)
        payload_bytes = size.trained_parameters * FP32_BYTES
        broadcasts = Traffic(
            kind="broadcast", payload_bytes=payload_bytes, ranks=world_size, waited_for=True
        )
        return replace(
            gradients,
            traffic=(*gradients.traffic, broadcasts),
            formula=f"{gradients.formula}, broadcasts: (n-1)/n G",
        )

    def library_work(
        self, size: ModelSize, recipe: Recipe, world_size: int, nodes: int = 1
    ) -> Mapping[str, float]:
        """Each rank updates a part of the tensors."""
        work = DDP.library_work(self, size, recipe, world_size, nodes)
        updated = updated_tensor(recipe)
        return {**work, updated: work[updated] / world_size, "zro": 1}

    def loads(self) -> tuple[str, ...]:
        return (*DDP.loads(self), "torch.distributed.optim")

    def settings(self, recipe: Recipe) -> Mapping[str, object]:
        return {**DDP.settings(self, recipe), **SETTINGS}

    def check_model(
        self, workload: Workload, model: nn.Module, world_size: int, nodes: int = 1
    ) -> None:
        from shardmark.strategies.parameters import check_parameters

        DDP.check_model(self, workload, model, world_size, nodes)
        check_parameters(self.name, model, "ZeroRedundancyOptimizer", "sparse", "mixed types")

    def start(self, workload: Workload, recipe: Recipe, context: RankContext) -> EagerWorker:
        from shardmark.strategies.zro.worker import ZeroRedundancyWorker

        return self.start_as(ZeroRedundancyWorker, workload, recipe, context)

    def _keeps_strides(self) -> bool:
        """Parameters are views of one flat buffer."""
        return False

    def launch_configuration(
        self, recipe: Recipe, layout: Layout, device_type: str
    ) -> LaunchConfiguration:
        arguments = ", ".join(f"{name}={value}" for name, value in SETTINGS.items())
        return LaunchConfiguration(
            wrapper="torch.nn.parallel.DistributedDataParallel",
            arguments=DDP.launch_configuration(self, recipe, layout, device_type).arguments,
            notes=(
                *self._hook_notes(),
                "Make the optimizer as torch.distributed.optim.ZeroRedundancyOptimizer(parameters,"
                f" optimizer_class=..., {arguments}, **its own arguments).",
            ),
        )


def _largest_share(sizes: Iterable[int], ranks: int) -> float:
    """Of whole parameters, each given to the rank that has least by then, the largest first."""
    held = [0] * ranks
    for size in sorted(sizes, reverse=True):
        held[held.index(min(held))] += size
    return max(held) / max(1, sum(held))
