"""What strategies have in common in which every process trains, and all meet in collectives."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardmark.core.recipe import Recipe
    from shardmark.core.shares import StepShard
    from shardmark.results.schema import ExchangeRecord
    from shardmark.strategies.base import TrainingGroup


class CollectiveStrategy:
    """Every process has a device of its own and trains; none can be missed."""

    __slots__ = ()

    def guarantee(self) -> str | None:
        return None

    def tolerates_worker_loss(self) -> bool:
        return False

    def resume_blocker(self, recipe: Recipe) -> str | None:  # noqa: ARG002  (protocol)
        return None

    def nodes_of(self, world_size: int, nodes: int) -> tuple[int, ...]:
        return neighbours_together(world_size, nodes)

    def backend(self, device_type: str) -> str:
        return "nccl" if device_type == "cuda" else "gloo"

    def rank_device(self, rank: int, world_size: int, device_type: str) -> str:  # noqa: ARG002
        return device_type


def neighbours_together(ranks: int, nodes: int) -> tuple[int, ...]:
    """Each rank's node: as many on each, in order of rank."""
    return tuple(rank * nodes // ranks for rank in range(ranks))


class CollectiveWorker:
    """Takes its own share of every step."""

    @cached_property
    def group(self) -> TrainingGroup:
        from shardmark.strategies.training_group import CollectiveGroup

        return CollectiveGroup()

    def step_shards(self, end_step: int) -> Iterator[StepShard] | None:  # noqa: ARG002  (protocol)
        return None

    def close(self) -> None:
        return None

    def checkpoint_servers(self, step: int) -> None:  # noqa: ARG002  (all is held by the workers)
        return None

    def exchange(self) -> ExchangeRecord | None:
        return None
