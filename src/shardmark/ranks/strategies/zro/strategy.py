"""torch's ZeroRedundancyOptimizer: DDP with the optimizer state divided over the ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardmark.base.layout import Fractions, Layout, data_parallel
from shardmark.ranks.strategies.base import RankContext
from shardmark.ranks.strategies.ddp import DDP

if TYPE_CHECKING:
    from shardmark.base.recipe import Recipe
    from shardmark.ranks.strategies.step import EagerWorker
    from shardmark.ranks.workloads.base import Workload

SETTINGS = {"parameters_as_bucket_view": True, "overlap_with_ddp": False}
"""Arguments of the optimizer: a broadcast for each rank instead of each parameter.

Overlapping would change the numerics: it skips the first two updates, does not clip, and supports
no parameter groups.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroRedundancy(DDP):
    """Gradients are reduced as by `ddp`; each rank updates some parameters and broadcasts them.

    torch's `ZeroRedundancyOptimizer`; Rajbhandari et al., SC 2020, section 5.1.
    """

    costs = "shardmark.ranks.costs.replicas:ZeroRedundancyCosts"
    library = "ZeroRedundancyOptimizer"
    refused_parameters = ("sparse", "mixed types")

    name: str = "zro"

    def layout(self, world_size: int, nodes: int = 1) -> Layout:
        """Layout of uncut parameters: a rank may hold more than its fraction of the state."""
        holds = Fractions(optimizer_state=1 / world_size)
        return data_parallel(world_size, nodes=nodes, group=world_size, holds=holds)

    def loads(self) -> tuple[str, ...]:
        return (*DDP.loads(self), "torch.distributed.optim")

    def settings(self, recipe: Recipe) -> Mapping[str, object]:
        return {**DDP.settings(self, recipe), **SETTINGS}

    def start(self, workload: Workload, recipe: Recipe, context: RankContext) -> EagerWorker:
        from shardmark.ranks.strategies.zro.worker import ZeroRedundancyWorker

        return self.start_as(ZeroRedundancyWorker, workload, recipe, context)

    def _keeps_strides(self) -> bool:
        """Parameters become views of one flat buffer, without their own strides."""
        return False
