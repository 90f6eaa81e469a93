"""A worker of DDP's gradients that keeps the optimizer's state of some parameters."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from torch.distributed.optim import ZeroRedundancyOptimizer

from shardmark.strategies.step import EagerWorker, build_optimizer, made_optimizer
from shardmark.strategies.zro.strategy import SETTINGS

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(kw_only=True, eq=False)
class ZeroRedundancyWorker(EagerWorker):
    """Its optimizer shows the state of the rank's own parameters alone."""

    def _built_optimizer(self) -> torch.optim.Optimizer:
        spec = self.recipe.optimizer
        whole = build_optimizer(self._trained, self.recipe, self.workload.parameter_groups)

        def of_this_rank(groups: Iterable[Any], **_: object) -> torch.optim.Optimizer:
            return made_optimizer(groups, spec)  # the groups have every option already

        sharded = ZeroRedundancyOptimizer(
            whole.param_groups, optimizer_class=cast("Any", of_this_rank), **SETTINGS
        )
        sharded.state = sharded.optim.state
        return sharded

    def full_optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        own = super().full_optimizer_state()
        parts = cast("list[dict[str, dict[str, Tensor]]]", self.group.gather(own))
        return {name: next(filter(None, (part[name] for part in parts)), {}) for name in own}
