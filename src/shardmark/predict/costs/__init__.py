"""The table of cost models, by class of strategy.  Importing it imports no torch."""

from __future__ import annotations

from typing import Any

from shardmark.base.errors import InputError
from shardmark.extras.local_steps.strategy import DiLoCo, LocalSGD
from shardmark.extras.parameter_server.costs import ParameterServerCosts
from shardmark.extras.parameter_server.strategy import (
    AsynchronousServer,
    BoundedServer,
    ParameterServer,
)
from shardmark.predict.costs.base import Costs
from shardmark.predict.costs.layers import LayeredCosts, UlyssesCosts
from shardmark.predict.costs.replicas import (
    DataParallelCosts,
    DDPCosts,
    LocalStepsCosts,
    ReplicaCosts,
    ZeroRedundancyCosts,
)
from shardmark.predict.costs.sharded import FSDP1Costs, FSDPCosts, ZeroCosts
from shardmark.ranks.strategies.base import Strategy
from shardmark.ranks.strategies.data_parallel import DataParallel
from shardmark.ranks.strategies.ddp import DDP
from shardmark.ranks.strategies.deepspeed.strategy import Zero
from shardmark.ranks.strategies.fsdp import FSDP, HybridFSDP
from shardmark.ranks.strategies.fsdp1.strategy import FullyShardedFirst
from shardmark.ranks.strategies.layers.strategies import (
    PipelineParallel,
    ReplicatedPipeline,
    ShardedPipeline,
    ShardedTensorParallel,
    ShardedTensorPipeline,
    TensorParallel,
)
from shardmark.ranks.strategies.layers.ulysses import Ulysses
from shardmark.ranks.strategies.script import ScriptVariant
from shardmark.ranks.strategies.single import Single
from shardmark.ranks.strategies.zro.strategy import ZeroRedundancy

COSTS: dict[type[Any], type[Costs[Any]]] = {
    Single: ReplicaCosts,
    DataParallel: DataParallelCosts,
    DDP: DDPCosts,
    ZeroRedundancy: ZeroRedundancyCosts,
    LocalSGD: LocalStepsCosts,
    DiLoCo: LocalStepsCosts,
    FSDP: FSDPCosts,
    HybridFSDP: FSDPCosts,
    FullyShardedFirst: FSDP1Costs,
    Zero: ZeroCosts,
    TensorParallel: LayeredCosts,
    ShardedTensorParallel: LayeredCosts,
    PipelineParallel: LayeredCosts,
    ReplicatedPipeline: LayeredCosts,
    ShardedPipeline: LayeredCosts,
    ShardedTensorPipeline: LayeredCosts,
    Ulysses: UlyssesCosts,
    ParameterServer: ParameterServerCosts,
    AsynchronousServer: ParameterServerCosts,
    BoundedServer: ParameterServerCosts,
}
"""Cost models by the exact class: a subclass may send something else than its parent."""


def costs_of(strategy: Strategy) -> Costs[Any] | None:
    """Return the cost model of a strategy; None if it has none."""
    model = COSTS.get(type(strategy))
    return None if model is None else model(strategy)


def cost_model(strategy: Strategy) -> Costs[Any]:
    """Return the cost model of a strategy.  Raises `InputError` if it has none."""
    costs = costs_of(strategy)
    if isinstance(strategy, ScriptVariant):
        raise InputError(
            f"variant {strategy.name}",
            "a script distributes its training itself, and nothing predicts it",
            "measure it with run or time, or write a task (`shardmark init`)",
        )
    if costs is None:
        raise InputError(
            f"strategy {strategy.name}",
            f"there is no cost model for {strategy.name}",
            "measure it with run, or add a class to shardmark.predict.costs.COSTS",
        )
    return costs
