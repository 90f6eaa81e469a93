"""Which samples a shard takes in which step: the same for every strategy and number of ranks."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self, TypeVar

import numpy as np

from shardmark.core.errors import DataError, InputError
from shardmark.core.shares import StepShard

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import ArrayLike, NDArray

    from shardmark.core.shares import Shard
    from shardmark.workloads.base import BatchPlan

_STREAMS = {
    "order": 1,
    "augment": 2,
    "subset": 3,
    "pictures": 4,
    "proposals": 5,
    "masks": 6,
    "evaluation": 7,
    "own": 20,
}


class Source(Protocol):
    """One split of a data set."""

    def __len__(self) -> int: ...

    def select(self, ids: NDArray[np.int64]) -> Self:
        """Only these samples, numbered anew from 0."""


Sampled = TypeVar("Sampled", bound=Source)


def every_step(shard: Shard) -> Iterator[StepShard]:
    """The same share of step after step, endlessly."""
    return (StepShard(step=step, shard=shard) for step in itertools.count())


def generator(seed: int, stream: str, *more: int) -> np.random.Generator:
    """Random numbers that depend on the arguments alone; one independent stream for each use."""
    entropy = np.random.SeedSequence((seed, _STREAMS[stream], *more))
    return np.random.Generator(np.random.Philox(entropy))


def epoch_order(seed: int, epoch: int, samples: int) -> NDArray[np.int64]:
    """Sample index at each position of the epoch."""
    return generator(seed, "order", epoch).permutation(samples).astype(np.int64, copy=False)


def reduced(source: Sampled, wanted: int | None, *, seed: int, split: int) -> Sampled:
    """`wanted` of the source's samples, drawn from the seed and in their order; None takes all."""
    available = len(source)
    if wanted is None or wanted >= available:
        return source
    return source.select(np.sort(generator(seed, "subset", split).permutation(available)[:wanted]))


def seed_of(seed: int, stream: str, *more: int) -> int:
    """A seed, 63 bits as torch takes them, that depends on the arguments alone."""
    entropy = np.random.SeedSequence((seed, _STREAMS[stream], *more))
    return int(entropy.generate_state(1, np.uint64)[0] >> np.uint64(1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One shard's part of one step."""

    epoch: int
    positions: slice
    """Places in the epoch's order."""
    ids: NDArray[np.int64]
    step_weight: float
    """Of the whole step, all shards together."""
    weights: tuple[float, ...] | None = None
    """Of each sample; None where each weighs 1."""


class ShardOrder:
    """A pure function of the step; the epoch's order is kept while it lasts.

    `weights` has one of each sample; without, each weighs 1.
    """

    def __init__(
        self,
        samples: int,
        plan: BatchPlan,
        shard: Shard,
        weights: NDArray[np.float64] | None = None,
    ) -> None:
        if plan.global_batch % shard.count:
            raise InputError(
                "recipe.global_batch",
                f"{plan.global_batch} samples cannot be shared equally by {shard.count} ranks",
                f"a multiple of {shard.count}",
            )
        if samples < plan.global_batch:
            raise DataError(
                "training set",
                f"{samples} samples are fewer than one step of {plan.global_batch}",
                "use a smaller batch or more data",
            )
        self._samples = samples
        self._plan = plan
        self._weights = None if weights is None else checked_weights(weights, samples)
        self._epoch = -1
        self._order = np.empty(0, np.int64)

    def at(self, step: int, shard: Shard) -> Share:
        """That shard's part of that step; as many shards as were announced."""
        epoch, step_of_epoch = divmod(step, self._samples // self._plan.global_batch)
        if epoch != self._epoch:
            self._order = epoch_order(self._plan.seed, epoch, self._samples)
            self._epoch = epoch
        whole, per_shard = self._plan.global_batch, self._plan.global_batch // shard.count
        step_start = step_of_epoch * whole
        start = step_start + shard.index * per_shard
        positions = slice(start, start + per_shard)
        ids = self._order[positions]
        if self._weights is None:
            return Share(epoch=epoch, positions=positions, ids=ids, step_weight=float(whole))
        step_weight = float(self._weights[self._order[step_start : step_start + whole]].sum())
        if step_weight == 0:
            raise DataError(
                "training set",
                f"the {whole} samples of step {step + 1} weigh 0 together",
                "leave out samples that weigh nothing, or use a larger batch",
            )
        return Share(
            epoch=epoch,
            positions=positions,
            ids=ids,
            step_weight=step_weight,
            weights=tuple(self._weights[ids].tolist()),
        )


def checked_weights(given: ArrayLike, samples: int, what: str = "weights") -> NDArray[np.float64]:
    """One number for each sample, finite and at least 0; `DataError` where not."""
    numbers = np.asarray(given, np.float64)
    if numbers.shape != (samples,):
        raise DataError(
            "training set",
            f"{what} of shape {numbers.shape} for {samples} samples",
            "one number for each sample",
        )
    if not (np.isfinite(numbers) & (numbers >= 0)).all():
        found = f"one of its {what} is negative or not finite"
        raise DataError("training set", found, "numbers of 0 and more")
    return numbers
