"""Worker of DDP that holds the optimizer state of some parameters only."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from torch.distributed.optim import ZeroRedundancyOptimizer

from shardmark.ranks.strategies.step import (
    EagerWorker,
    build_optimizer,
    create_optimizer,
    refuse_switched_weights,
)
from shardmark.ranks.strategies.zro.strategy import SETTINGS

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(kw_only=True, eq=False)
class ZeroRedundancyWorker(EagerWorker):
    """Trains with an optimizer whose state covers only the rank's own parameters."""

    def _built_optimizer(self) -> torch.optim.Optimizer:
        spec = self.recipe.optimizer
        full = build_optimizer(self._trained, self.recipe, self.workload.parameter_groups)

        def of_this_rank(groups: Iterable[Any], **_: object) -> torch.optim.Optimizer:
            return create_optimizer(groups, spec)  # the groups already have every option

        sharded = ZeroRedundancyOptimizer(
            full.param_groups, optimizer_class=cast("Any", of_this_rank), **SETTINGS
        )
        refuse_switched_weights("zro", sharded.optim)
        sharded.state = sharded.optim.state
        return sharded

    def full_optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        state = super().full_optimizer_state()
        of_ranks = cast("list[dict[str, dict[str, Tensor]]]", self.group.gather(state))
        return {name: next(filter(None, (rank[name] for rank in of_ranks)), {}) for name in state}
