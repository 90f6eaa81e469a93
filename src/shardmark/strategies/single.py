"""Training on a single device, the baseline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardmark.strategies.base import RankContext, Strategy

if TYPE_CHECKING:
    from shardmark.core.recipe import Recipe
    from shardmark.strategies.step import EagerWorker
    from shardmark.workloads.base import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Single(Strategy):
    """A single device trains alone, as the baseline."""

    name: str = "single"

    def unsupported_reason(self, world_size: int, nodes: int = 1) -> str | None:
        return None if world_size == 1 else "single is one device"

    def start(self, workload: Workload, recipe: Recipe, context: RankContext) -> EagerWorker:
        from shardmark.strategies.execution import build_on
        from shardmark.strategies.step import EagerWorker

        model = build_on(context.device, workload, recipe)
        return EagerWorker(model, workload=workload, recipe=recipe, device=context.device, shares=1)
