"""What all tasks do alike: batches in order, made ahead where asked, weighed, errors noted."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, Protocol, Self, TypeVar, cast

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from shardmark.core.errors import ShardmarkError
from shardmark.workloads.base import Workload
from shardmark.workloads.order import ShardOrder, Share, every_step, micro_batches

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from shardmark.core.shares import Shard, StepShard
    from shardmark.workloads.base import BatchPlan
    from shardmark.workloads.options import WorkloadOptions


class Splits(Protocol):
    """A data set."""

    @property
    def training(self) -> Sized: ...

    @property
    def validation(self) -> Sized: ...

    @property
    def synthetic(self) -> bool: ...


class Reading(Protocol):
    """Some samples as they are stored, or a batch made of them."""

    @property
    def errors(self) -> tuple[str, ...]:
        """One line for each unreadable sample met while making it."""


Item = TypeVar("Item")
Made = TypeVar("Made", bound=Reading)
BatchMade = TypeVar("BatchMade", bound="SampledBatch")


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledBatch:
    """Some samples of one step, ready for the model."""

    sample_ids: tuple[int, ...]
    """Index of each sample in the training set, in order."""
    step_weight: float
    """Of the whole step, all shares and micro-batches together."""
    sample_weights: tuple[float, ...] | None = None
    """Of each sample; None where each weighs 1."""
    errors: tuple[str, ...] = ()

    @property
    def weight(self) -> float:
        return float(len(self) if self.sample_weights is None else sum(self.sample_weights))

    def __len__(self) -> int:
        return len(self.sample_ids)

    @abstractmethod
    def to(self, device: torch.device) -> Self:
        """A copy on the device; asynchronous where the memory is pinned."""

    def split(self, parts: int) -> tuple[Self, ...]:
        """Consecutive micro-batches of equally many samples."""
        if parts == 1:
            return (self,)
        return tuple(self._cut(which) for which in micro_batches(len(self), parts))

    def _cut(self, which: slice) -> Self:
        weights = None if self.sample_weights is None else self.sample_weights[which]
        return replace(
            self,
            sample_ids=self.sample_ids[which],
            sample_weights=weights,
            errors=(),
            **self._contents_of(which),
        )

    @abstractmethod
    def _contents_of(self, which: slice) -> dict[str, Any]:
        """The other fields, cut to these samples."""


class SampledTask(Workload, Generic[BatchMade]):
    """The part of a `Workload` that does not depend on what is to be learned.

    `training_weights` has one of each training sample; without, each weighs 1.
    """

    def __init__(
        self,
        options: WorkloadOptions,
        data: Splits,
        notes: Iterable[str] = (),
        training_weights: NDArray[np.float64] | None = None,
    ) -> None:
        self._workers = options.loader_workers
        self._splits = data
        self._training_weights = training_weights
        self._errors = dict.fromkeys(notes)  # a set that keeps its order

    @property
    def training_samples(self) -> int:
        return len(self._splits.training)

    @property
    def validation_samples(self) -> int:
        return len(self._splits.validation)

    @property
    def synthetic(self) -> bool:
        return self._splits.synthetic

    @property
    def data_errors(self) -> tuple[str, ...]:
        return tuple(self._errors)

    def batches(
        self, plan: BatchPlan, shard: Shard, step_shards: Iterable[StepShard] | None = None
    ) -> Iterator[BatchMade]:
        """Raises `DataError` at once for a training set smaller than one step."""
        order = ShardOrder(self.training_samples, plan, shard, self._training_weights)

        def make(step_shard: StepShard) -> BatchMade:
            return self._training_batch(plan, order.at(step_shard.step, step_shard.shard))

        return self._in_order(make, every_step(shard) if step_shards is None else step_shards)

    @abstractmethod
    def _training_batch(self, plan: BatchPlan, share: Share) -> BatchMade:
        """Read and augment one shard's part of one step; perhaps in another process."""

    def _in_order(self, make: Callable[[Item], Made], items: Iterable[Item]) -> Iterator[Made]:
        """`make(item)` for each of the items; notes what could not be read."""
        for made in _made_ahead(make, items, self._workers):
            self._errors.update(dict.fromkeys(made.errors))
            yield made


def gpu_in_use() -> bool:
    """Whether this process has set up CUDA; asking does not."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


class _Items(Dataset[Made | ShardmarkError], Generic[Item, Made]):
    """What is made of an item, or the error it met: a loader loses an error's type."""

    def __init__(self, make: Callable[[Item], Made]) -> None:
        self._make = make

    def __getitem__(self, item: Item) -> Made | ShardmarkError:
        try:
            return self._make(item)
        except ShardmarkError as error:
            return error


def _made_ahead(
    make: Callable[[Item], Made], items: Iterable[Item], workers: int
) -> Iterator[Made]:
    """Two batches ahead in each of the worker processes, or in this one when asked for."""
    if workers == 0:
        yield from map(make, items)
        return
    loader = DataLoader(
        _Items(make),
        batch_size=None,  # an item is a batch already
        sampler=cast("Sampler[int]", items),
        num_workers=workers,
        prefetch_factor=2,
        persistent_workers=True,
        pin_memory=gpu_in_use(),
        multiprocessing_context="fork",
        generator=torch.Generator(),  # else it draws from the generator that dropout uses
    )
    for made in loader:
        if isinstance(made, ShardmarkError):
            break
        yield made
    else:
        return
    # Ends its processes.  An error's traceback would keep them until garbage is collected, when
    # they no longer hear that they are to end, and are waited for in vain for 5 seconds each.
    del loader
    raise made
