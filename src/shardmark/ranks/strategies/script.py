"""The variant of a training script, in the place of a strategy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardmark.ranks.strategies.base import RankContext, Server, Strategy, Worker

if TYPE_CHECKING:
    from shardmark.base.recipe import Recipe
    from shardmark.ranks.workloads.base import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptVariant(Strategy):
    """A variant of a script, which distributes its training itself.  Every rank counts samples."""

    def unsupported_reason(self, world_size: int, nodes: int = 1) -> str | None:
        return None

    def start(self, workload: Workload, recipe: Recipe, context: RankContext) -> Worker | Server:
        raise AssertionError("`train.script` runs a script; no strategy starts it")
