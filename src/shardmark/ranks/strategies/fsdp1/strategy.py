"""torch's first FSDP (`FullyShardedDataParallel`), for code that still uses it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from shardmark.base.layout import Fractions, Layout, data_parallel
from shardmark.base.machine import Machine
from shardmark.ranks.strategies.base import (
    RankContext,
    Strategy,
    check_machine,
    common_settings,
    refuse,
    refuse_full_tensor_optimizers,
)

if TYPE_CHECKING:
    from shardmark.base.recipe import Recipe
    from shardmark.ranks.strategies.fsdp1.worker import FullyShardedWorker
    from shardmark.ranks.workloads.base import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class FullyShardedFirst(Strategy):
    """Parameters, gradients and optimizer state are sharded as flat vectors (torch's first FSDP).

    Source: Zhao et al., VLDB 2023.  A parameter that no rank uses has a gradient of zero, and is
    updated with it.
    """

    costs = "shardmark.ranks.costs.sharded:FSDP1Costs"
    library = "FSDP"
    refused_parameters = ("scalar", "sparse", "mixed types, frozen", "hooks", "strides")
    refuses_after_step = "a copy of a layer may lie on other ranks than the layer"

    name: str = "fsdp1"
    reshard_after_forward: bool = True
    """Free the gathered parameters of a block after its forward pass: FULL_SHARD, otherwise
    SHARD_GRAD_OP."""
    wrap: Literal["blocks", "root"] = "blocks"
    """Units that are gathered together: repeated blocks, or the full model at once."""
    reduce_each_pass: bool = False
    """Reduce gradients in each micro-batch of gradient accumulation, as in `fsdp`."""

    def check(self, world_size: int, machine: Machine, recipe: Recipe) -> None:
        check_machine(self.name, world_size, machine, recipe)
        refuse_full_tensor_optimizers(self.name, recipe)
        refuse(
            self.name,
            (
                recipe.compile != "none",
                "torch's compiler is only tested with its second FSDP",
                "set recipe.compile to none, or use fsdp",
            ),
            (
                (recipe.precision, recipe.optimizer.implementation) == ("fp16", "fused"),
                "a fused optimizer skips a step that overflows on its own rank alone",
                "set recipe.optimizer.implementation to foreach or default",
            ),
        )

    def layout(self, world_size: int, nodes: int = 1) -> Layout:
        part = 1 / world_size
        parameters = part if self.reshard_after_forward else 1.0
        holds = Fractions(parameters=parameters, gradients=part, optimizer_state=part)
        return data_parallel(world_size, nodes=nodes, group=world_size, holds=holds)

    def loads(self) -> tuple[str, ...]:
        return ("torch.distributed.fsdp",)

    def settings(self, recipe: Recipe) -> Mapping[str, object]:
        return {**self.arguments(), **common_settings(recipe)}

    def start(self, workload: Workload, recipe: Recipe, context: RankContext) -> FullyShardedWorker:
        from torch.distributed.fsdp import (
            BackwardPrefetch,
            FullyShardedDataParallel,
            ShardingStrategy,
        )
        from torch.distributed.fsdp.wrap import CustomPolicy

        from shardmark.ranks.strategies.blocks import sharding_units
        from shardmark.ranks.strategies.execution import prepared_on
        from shardmark.ranks.strategies.fsdp1.worker import (
            FullyShardedWorker,
            without_shared_parameters,
        )

        model = workload.build_model()
        self.check_model(workload, model, context.world_size, context.nodes)
        model = prepared_on(context.device, model, workload, recipe, keeps_strides=False)
        shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        units = without_shared_parameters(
            model, sharding_units(model, self.wrap, workload.blocks(model))
        )
        arguments = self.arguments()
        arguments["sharding_strategy"] = ShardingStrategy[arguments["sharding_strategy"]]
        arguments["backward_prefetch"] = BackwardPrefetch[arguments["backward_prefetch"]]
        sharded = FullyShardedDataParallel(
            model,
            auto_wrap_policy=CustomPolicy(lambda module: module in units),
            device_id=context.device,
            **arguments,
        )
        return FullyShardedWorker(
            sharded,
            workload=workload,
            recipe=recipe,
            device=context.device,
            shares=context.world_size,
            shapes=shapes,
            reduces_each_pass=self.reduce_each_pass,
            sharded_by=self.name,
        )

    def arguments(self) -> dict[str, Any]:
        """Arguments of the wrapper, its defaults included."""
        return {
            "sharding_strategy": "FULL_SHARD" if self.reshard_after_forward else "SHARD_GRAD_OP",
            "mixed_precision": None,
            "cpu_offload": None,
            "backward_prefetch": "BACKWARD_PRE",
            "forward_prefetch": False,
            "limit_all_gathers": True,
            "sync_module_states": False,  # equal seeds make equal weights
            "use_orig_params": True,  # names, groups and each parameter's state hold
        }
