"""Training on a single device, the baseline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardmark.ranks.strategies.base import RankContext, Strategy

if TYPE_CHECKING:
    from shardmark.base.recipe import Recipe
    from shardmark.ranks.strategies.step import EagerWorker
    from shardmark.ranks.workloads.base import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Single(Strategy):
    """A single device trains alone, as the baseline."""

    costs = "shardmark.ranks.costs.replicas:ReplicaCosts"

    name: str = "single"

    def unsupported_reason(self, world_size: int, nodes: int = 1) -> str | None:
        return None if world_size == 1 else "single is one device"

    def start(self, workload: Workload, recipe: Recipe, context: RankContext) -> EagerWorker:
        from shardmark.ranks.strategies.execution import build_on
        from shardmark.ranks.strategies.step import EagerWorker

        model = build_on(context.device, workload, recipe)
        return EagerWorker(model, workload=workload, recipe=recipe, device=context.device, shares=1)
