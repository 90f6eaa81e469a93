"""The order of samples in steps and shards, the same for every strategy and number of ranks."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self, TypeVar

import numpy as np

from shardmark.base.errors import DataError, InputError
from shardmark.base.layout import StepShard

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import ArrayLike, NDArray

    from shardmark.base.layout import Shard
    from shardmark.ranks.workloads.base import BatchPlan

_STREAMS = {
    "order": 1,
    "augment": 2,
    "subset": 3,
    "pictures": 4,
    "proposals": 5,
    "masks": 6,
    "evaluation": 7,
    "own": 20,
    "after_step": 21,
}


class Source(Protocol):
    """A split of a data set: training or validation."""

    def __len__(self) -> int: ...

    def select(self, ids: NDArray[np.int64]) -> Self:
        """Source of these samples only, numbered from 0."""


Sampled = TypeVar("Sampled", bound=Source)


def every_step(shard: Shard) -> Iterator[StepShard]:
    """Yield the same shard of every step, endlessly."""
    return (StepShard(step=step, shard=shard) for step in itertools.count())


def generator(seed: int, stream: str, *more: int) -> np.random.Generator:
    """Random generator that depends on the arguments alone; streams are independent."""
    entropy = np.random.SeedSequence((seed, _STREAMS[stream], *more))
    return np.random.Generator(np.random.Philox(entropy))


def epoch_order(seed: int, epoch: int, samples: int) -> NDArray[np.int64]:
    """Sample index at each position of the epoch: a random permutation."""
    return generator(seed, "order", epoch).permutation(samples).astype(np.int64, copy=False)


def reduced(source: Sampled, wanted: int | None, *, seed: int, split: int) -> Sampled:
    """Random subset of `wanted` samples, in their original order; None returns the source."""
    available = len(source)
    if wanted is None or wanted >= available:
        return source
    return source.select(np.sort(generator(seed, "subset", split).permutation(available)[:wanted]))


def seed_of(seed: int, stream: str, *more: int) -> int:
    """A 63-bit seed for torch that depends on the arguments alone."""
    entropy = np.random.SeedSequence((seed, _STREAMS[stream], *more))
    return int(entropy.generate_state(1, np.uint64)[0] >> np.uint64(1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The samples of a shard in a step."""

    epoch: int
    positions: slice
    """Positions in the order of the epoch."""
    ids: NDArray[np.int64]
    step_weight: float
    """Sum of the sample weights of the step, over all shards."""
    weights: tuple[float, ...] | None = None
    """Weight of each sample; None if each weighs 1."""


class ShardOrder:
    """The samples of every step, as a pure function of the step.

    `weights` has the weight of each sample; None means that each weighs 1.
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
        """The samples of the shard in the step.  The number of shards must not change."""
        epoch, step_of_epoch = divmod(step, self._samples // self._plan.global_batch)
        if epoch != self._epoch:
            self._order = epoch_order(self._plan.seed, epoch, self._samples)
            self._epoch = epoch
        global_batch = self._plan.global_batch
        per_shard = global_batch // shard.count
        step_start = step_of_epoch * global_batch
        start = step_start + shard.index * per_shard
        positions = slice(start, start + per_shard)
        ids = self._order[positions]
        if self._weights is None:
            weight = float(global_batch)
            return Share(epoch=epoch, positions=positions, ids=ids, step_weight=weight)
        step_ids = self._order[step_start : step_start + global_batch]
        step_weight = float(self._weights[step_ids].sum())
        if step_weight == 0:
            raise DataError(
                "training set",
                f"the weights of the {global_batch} samples of step {step + 1} sum to 0",
                "remove samples of weight 0, or use a larger batch",
            )
        return Share(
            epoch=epoch,
            positions=positions,
            ids=ids,
            step_weight=step_weight,
            weights=tuple(self._weights[ids].tolist()),
        )


def checked_weights(values: ArrayLike, samples: int, name: str = "weights") -> NDArray[np.float64]:
    """Convert to one finite, non-negative number per sample; raises `DataError` otherwise."""
    numbers = np.asarray(values, np.float64)
    if numbers.shape != (samples,):
        raise DataError(
            "training set",
            f"{name} of shape {numbers.shape} for {samples} samples",
            "one number for each sample",
        )
    if not (np.isfinite(numbers) & (numbers >= 0)).all():
        problem = f"one of its {name} is negative or not finite"
        raise DataError("training set", problem, "use finite numbers of at least 0")
    return numbers
