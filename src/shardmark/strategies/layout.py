"""How a strategy factors its ranks: who sees which samples, and who holds what.  No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

from shardmark.core.shares import Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class Fractions:
    """The part of one model's state that a rank holds between two steps, from 0 to 1.

    Nominal: padding and parameters that are left whole come on top.
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
    """Whether its loss counts: exactly one process of each share."""
    holds: Fractions = Fractions()


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """All processes of a trial.  `data` x `shard` x `tensor` x `pipeline` devices train.

    Samples are divided over `data` and `shard`; layers over `tensor` and `pipeline`.
    """

    ranks: tuple[RankLayout, ...]
    """In order of rank; servers last."""
    data: int = 1
    """Copies of the model's state."""
    shard: int = 1
    """Parts of one copy, each of which sees samples of its own."""
    tensor: int = 1
    pipeline: int = 1

    @property
    def shares(self) -> int:
        """Distinct parts of a step's batch: what `per_rank_batch` is multiplied by."""
        return self.data * self.shard

    @property
    def devices(self) -> int:
        """Devices that train; a process may have several (DataParallel)."""
        return prod((self.data, self.shard, self.tensor, self.pipeline))

    @property
    def processes(self) -> int:
        return len(self.ranks)

    @property
    def training_ranks(self) -> tuple[int, ...]:
        return tuple(rank for rank, one in enumerate(self.ranks) if one.share is not None)

    @property
    def server_ranks(self) -> tuple[int, ...]:
        return tuple(rank for rank, one in enumerate(self.ranks) if one.share is None)


def replicas(
    count: int, *, holds: Callable[[int], Fractions] = lambda _: Fractions(), servers: int = 0
) -> Layout:
    """Every rank a whole copy with samples of its own; `holds` by rank, servers included."""
    shares = [*(Shard(index=rank, count=count) for rank in range(count)), *[None] * servers]
    ranks = (RankLayout(share=share, holds=holds(rank)) for rank, share in enumerate(shares))
    return Layout(ranks=tuple(ranks), data=count)


def sharded(count: int, *, group: int, holds: Fractions) -> Layout:
    """Copies that are each divided over `group` neighbouring ranks."""
    ranks = (RankLayout(share=Shard(index=r, count=count), holds=holds) for r in range(count))
    return Layout(ranks=tuple(ranks), data=count // group, shard=group)
