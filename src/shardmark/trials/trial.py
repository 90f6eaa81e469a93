"""One trial: all that a fresh process group needs to know.  Imports no torch."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt

from shardmark.core.recipe import Limits, Measure, Model, Recipe
from shardmark.strategies import build_strategy
from shardmark.strategies.base import Strategy
from shardmark.strategies.layout import Layout


class StrategySpec(Model):
    """A strategy's name and its own options, already checked against the strategy."""

    name: str
    options: dict[str, Any] = Field(default_factory=dict)


class Trial(Model):
    """One cell of the matrix, one repeat: all that a fresh process group needs to know."""

    id: str
    """Readable and unique in the run; the same for the same content."""
    experiment: str
    workload: dict[str, Any]
    recipe: Recipe
    strategy: StrategySpec
    world_size: PositiveInt
    nodes: PositiveInt = 1
    """Machines that the training ranks are shared out to equally, neighbours together."""
    measure: Measure
    limits: Limits
    device_type: Literal["cuda", "cpu"]
    slow_ranks: dict[int, float] = Field(default_factory=dict)
    repeat: Annotated[int, Field(ge=0)] = 0
    varied: dict[str, Any] = Field(default_factory=dict)
    """The other axes' values in this cell, by dotted key, e.g. {"recipe.precision": "bf16"}."""

    @cached_property
    def built_strategy(self) -> Strategy:
        """The strategy with its options, built once in each process."""
        return build_strategy(self.strategy.name, self.strategy.options)

    @cached_property
    def layout(self) -> Layout:
        return self.built_strategy.layout(self.world_size, self.nodes)

    @property
    def batch_per_step(self) -> int:
        """Samples per optimizer step over all ranks."""
        if self.recipe.global_batch is not None:
            return self.recipe.global_batch
        assert self.recipe.per_rank_batch is not None
        return self.recipe.per_rank_batch * self.layout.shares
