"""Layouts: the samples that each rank of a strategy processes, and the state that it holds."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import NamedTuple

from pydantic import Field

from shardmark.base.recipe import Model


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """A share of every global batch: slice `index` of `count` equal slices."""

    index: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShard:
    """The samples that a rank processes in one step: a share of that step's global batch."""

    step: int
    shard: Shard


class Mesh(Model):
    """Sizes of the parallel dimensions; their product is the number of ranks."""

    data: int = Field(default=1, ge=1)
    """Number of model replicas."""
    shard: int = Field(default=1, ge=1)
    """Ranks over which the state of one replica is sharded, each with its own samples."""
    tensor: int = Field(default=1, ge=1)
    """Ranks over which each layer is split; they process the same samples."""
    pipeline: int = Field(default=1, ge=1)
    """Stages of consecutive layers; they process the same samples."""
    sequence: int = Field(default=1, ge=1)
    """Ranks over which every sequence is split; they process the same samples."""

    @property
    def ranks(self) -> int:
        return self.data * self.shard * self.ranks_per_share

    @property
    def ranks_per_share(self) -> int:
        """Number of ranks that process the same samples."""
        return self.tensor * self.pipeline * self.sequence

    def __str__(self) -> str:
        """Format the sizes above 1, such as `shard 2 x tensor 2`."""
        factors = [f"{name} {size}" for name, size in self if size > 1]
        return " x ".join(factors) or "one rank"


class ActivationSharding(NamedTuple):
    """Sharding of the activations between tensor-parallel layers."""

    sequence_parallel: bool = False
    """Each rank holds a part of every sequence; otherwise activations are replicated."""
    loss_parallel: bool = False
    """Each rank holds a part of the logits; otherwise logits are replicated."""


REPLICATED_ACTIVATIONS = ActivationSharding()


@dataclass(frozen=True, slots=True, kw_only=True)
class Fractions:
    """Fractions of the model's state that a rank holds at the peak of a step, 1 for all of it.

    They follow from the strategy's definition.  Padding, message buffers, blocks gathered for their
    computation, and memory that a library allocates in addition are not included.
    """

    parameters: float = 1.0
    gradients: float = 1.0
    optimizer_state: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLayout:
    """Place of one process in the layout."""

    share: Shard | None
    """Part of every global batch that the rank processes; None for a parameter server."""
    counts_loss: bool = True
    """True for exactly one rank of each share: its loss and samples enter the totals."""
    holds: Fractions = Fractions()
    """Fractions of the model's state that the process holds.  Results are stored with this name."""
    node: int = 0
    on_cpu: bool = False
    """True if the process computes on the CPU even if the others use GPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Places of all processes of a trial, and the sizes of the parallel dimensions.

    Samples are split over `data` and `shard`, layers over `tensor` and `pipeline`, the positions
    of each sample over `sequence`.
    """

    ranks: tuple[RankLayout, ...]
    """Places in order of rank; parameter servers come last."""
    data: int = 1
    """Number of model replicas."""
    shard: int = 1
    """Ranks over which the state of one replica is sharded, each with its own samples."""
    tensor: int = 1
    pipeline: int = 1
    sequence: int = 1

    @property
    def shares(self) -> int:
        """Number of disjoint parts of a global batch, by which `per_rank_batch` is multiplied."""
        return self.data * self.shard

    @property
    def devices(self) -> int:
        """Number of devices that train; a DataParallel process uses several."""
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
    """Return a layout in which every rank has its own samples, with equally many ranks a node.

    The state of each replica is sharded over `group` consecutive ranks.
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
    """Return the layout of a mesh.

    Consecutive ranks split a layer or a sequence; the next dimensions are the pipeline stages, the
    shards of a replica, and the replicas.  The loss is computed, and counts, on the first rank of a
    share's last stage.
    """
    count, share_ranks = mesh.ranks, mesh.ranks_per_share
    ranks = (
        RankLayout(
            share=Shard(index=rank // share_ranks, count=count // share_ranks),
            counts_loss=rank % share_ranks == share_ranks - mesh.tensor * mesh.sequence,
            holds=holds or Fractions(),
            node=rank * nodes // count,
        )
        for rank in range(count)
    )
    return Layout(ranks=tuple(ranks), **mesh.model_dump())
