"""torch.nn.DataParallel: a single process with several devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from shardmark.base.layout import Layout, RankLayout, Shard
from shardmark.base.machine import Machine
from shardmark.ranks.strategies.base import (
    RankContext,
    Strategy,
    check_machine,
    common_settings,
    refuse,
)

if TYPE_CHECKING:
    from shardmark.base.recipe import Recipe
    from shardmark.ranks.strategies.step import EagerWorker
    from shardmark.ranks.workloads.base import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class DataParallel(Strategy):
    """A single process copies the model to every device in each step (`torch.nn.DataParallel`).

    A world size of n means n devices of one process, so there is one training rank.
    """

    costs = "shardmark.ranks.costs.replicas:DataParallelCosts"

    name: str = "dp"

    def check(self, world_size: int, machine: Machine, recipe: Recipe) -> None:
        refuse(
            self.name,
            (
                machine.device_type != "cuda",
                "DataParallel copies the model over CUDA devices, and the device here is the CPU",
                "use ddp, which also runs on the CPU",
            ),
            *(
                (
                    is_set,
                    f"with {key}, DataParallel's copies would use the first device's parameters",
                    f"set recipe.{key} to {unset}, or use ddp",
                )
                for key, is_set, unset in (
                    ("activation_checkpointing", recipe.activation_checkpointing, "false"),
                    ("compile", recipe.compile != "none", "none"),
                    ("weights", recipe.weights != "fp32", "fp32"),
                )
            ),
        )
        check_machine(
            self.name,
            world_size,
            machine,
            recipe,
            no_sync_batch_norm="DataParallel's copies compute batch norm's statistics separately",
        )

    def layout(self, world_size: int, nodes: int = 1) -> Layout:
        """Layout of one process, which splits the full batch over its devices."""
        return Layout(ranks=(RankLayout(share=Shard(index=0, count=1)),), data=world_size)

    def settings(self, recipe: Recipe) -> Mapping[str, object]:
        return common_settings(recipe) | {
            "batch_norm": "statistics of each device's share; the first device's are evaluated"
        }

    def start(self, workload: Workload, recipe: Recipe, context: RankContext) -> EagerWorker:
        from shardmark.ranks.strategies.execution import build_on
        from shardmark.ranks.strategies.replicas import Replicas
        from shardmark.ranks.strategies.step import EagerWorker, autocast

        model = build_on(context.device, workload, recipe)
        return EagerWorker(
            model,
            wrapped_model=Replicas(
                model,
                device_ids=list(range(context.devices)),
                precision=partial(autocast, recipe, context.device),
            ),
            workload=workload,
            recipe=recipe,
            device=context.device,
            shares=1,  # one loss over the outputs of all devices
        )
