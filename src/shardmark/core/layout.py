"""How a strategy factors its ranks: who sees which samples, and who holds what."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import NamedTuple

from pydantic import Field

from shardmark.core.recipe import Model
from shardmark.core.shares import Shard


class Mesh(Model):
    """How ranks are factored; their product is the number of ranks."""

    data: int = Field(default=1, ge=1)
    """Copies of the model."""
    shard: int = Field(default=1, ge=1)
    """Parts of one copy's state, each with samples of its own."""
    tensor: int = Field(default=1, ge=1)
    """Ranks that divide each layer; they see the same samples."""
    pipeline: int = Field(default=1, ge=1)
    """Stages of consecutive layers; they see the same samples."""
    sequence: int = Field(default=1, ge=1)
    """Ranks with a part of every sequence; they see the same samples."""

    @property
    def ranks(self) -> int:
        return self.data * self.shard * self.of_a_share

    @property
    def of_a_share(self) -> int:
        """Ranks that see the same samples."""
        return self.tensor * self.pipeline * self.sequence

    def __str__(self) -> str:
        """`shard 2 x tensor 2`."""
        factors = [f"{name} {size}" for name, size in self if size > 1]
        return " x ".join(factors) or "one rank"


class LayerDivision(NamedTuple):
    """What ranks that divide each layer have of activations between those layers."""

    sequence_parallel: bool = False
    """A part of every sequence; else all."""
    loss_parallel: bool = False
    """A part of the logits; else all."""


WHOLE_BETWEEN = LayerDivision()


@dataclass(frozen=True, slots=True, kw_only=True)
class Fractions:
    """The part of the model's state that a rank holds where a step holds most, 1 for all of it.

    By the strategy's definition: padding, message buffers, single blocks that are gathered for
    their computation, and what a library keeps besides come on top.
    """

    parameters: float = 1.0
    gradients: float = 1.0
    optimizer_state: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLayout:
    """One started process."""

    share: Shard | None
    """The part of every step's batch that it sees; None for a server.  Processes with the same
    share see the same samples."""
    counts_loss: bool = True
    """Whether its loss and its samples count: exactly one process of each share."""
    holds: Fractions = Fractions()
    node: int = 0
    on_cpu: bool = False
    """It computes on the CPU, whatever device the others use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """All processes of a trial.  The product of all sizes is how many devices train.

    Samples are divided over `data` and `shard`; layers over `tensor` and `pipeline`; the positions
    of each sample over `sequence`.
    """

    ranks: tuple[RankLayout, ...]
    """In order of rank; servers last."""
    data: int = 1
    """Copies of the model's state."""
    shard: int = 1
    """Parts of one copy, each of which sees samples of its own."""
    tensor: int = 1
    pipeline: int = 1
    sequence: int = 1

    @property
    def shares(self) -> int:
        """Distinct parts of a step's batch: what `per_rank_batch` is multiplied by."""
        return self.data * self.shard

    @property
    def devices(self) -> int:
        """Devices that train; a process may have several (DataParallel)."""
        return prod((self.data, self.shard, self.tensor, self.pipeline, self.sequence))

    @property
    def processes(self) -> int:
        return len(self.ranks)

    @property
    def training_ranks(self) -> tuple[int, ...]:
        return tuple(rank for rank, at in enumerate(self.ranks) if at.share is not None)

    @property
    def server_ranks(self) -> tuple[int, ...]:
        return tuple(rank for rank, at in enumerate(self.ranks) if at.share is None)

    @property
    def ranks_by_node(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each node, in order of local rank."""
        nodes = 1 + max(at.node for at in self.ranks)
        return tuple(
            tuple(rank for rank, at in enumerate(self.ranks) if at.node == node)
            for node in range(nodes)
        )


@lru_cache(maxsize=8)
def data_parallel(
    count: int, *, nodes: int = 1, group: int = 1, holds: Fractions | None = None
) -> Layout:
    """Every rank has samples of its own; neighbours sit together on equally many nodes.

    Each copy of the state is divided over `group` neighbouring ranks; `holds` is each rank's.
    """
    ranks = (
        RankLayout(
            share=Shard(index=rank, count=count),
            holds=holds or Fractions(),
            node=rank * nodes // count,
        )
        for rank in range(count)
    )
    return Layout(ranks=tuple(ranks), data=count // group, shard=group)


@lru_cache(maxsize=8)
def on_mesh(mesh: Mesh, *, nodes: int = 1, holds: Fractions | None = None) -> Layout:
    """Neighbours divide a layer or a sequence; then come a share's stages, the shards of a copy,
    the copies.

    The loss is known, and counts, on the first rank of a share's last stage.
    """
    count, together = mesh.ranks, mesh.of_a_share
    ranks = (
        RankLayout(
            share=Shard(index=rank // together, count=count // together),
            counts_loss=rank % together == together - mesh.tensor * mesh.sequence,
            holds=holds or Fractions(),
            node=rank * nodes // count,
        )
        for rank in range(count)
    )
    return Layout(ranks=tuple(ranks), **mesh.model_dump())
