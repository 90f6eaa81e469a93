"""The base class of all tasks: ordered, weighted batches, prefetched by worker processes."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections import UserDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, Self, TypeVar, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from shardmark.base.errors import InputError, ShardmarkError
from shardmark.ranks.workloads.base import BatchPlan, Workload
from shardmark.ranks.workloads.flops import counted_flops
from shardmark.ranks.workloads.model_building import seed_generators
from shardmark.ranks.workloads.order import ShardOrder, Share, Source, every_step, reduced, seed_of

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import nn

    from shardmark.base.layout import Shard, StepShard
    from shardmark.ranks.workloads.options import WorkloadOptions


class Reading(Protocol):
    """Samples read from a data set, or a batch made of them."""

    @property
    def errors(self) -> tuple[str, ...]:
        """Messages about unreadable samples, one line each."""


Item = TypeVar("Item")
Made = TypeVar("Made", bound=Reading)
Split = TypeVar("Split", bound=Source)
BatchMade = TypeVar("BatchMade", bound="SampledBatch")


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledBatch:
    """Samples of one step, ready for the model.  Tasks derive from it and add the contents."""

    sample_ids: tuple[int, ...]
    """Index of each sample in the training set."""
    step_weight: float
    """Sum of the weights of all ranks and micro-batches of the step."""
    sample_weights: tuple[float, ...] | None = None
    """Weight of each sample; None if each weighs 1."""
    errors: tuple[str, ...] = ()

    @property
    def weight(self) -> float:
        return float(len(self) if self.sample_weights is None else sum(self.sample_weights))

    def __len__(self) -> int:
        return len(self.sample_ids)

    def to(self, device: torch.device) -> Self:
        """Copy the batch to the device, asynchronously from pinned memory."""

        def moved(tensor: Tensor) -> Tensor:
            return tensor.to(device, non_blocking=tensor.is_pinned())

        return self if device.type == "cpu" else self._with_contents(moved)

    def pin_memory(self) -> Self:
        """Copy the batch to page-locked memory; called by the pinning thread of the data loader."""
        return self._with_contents(Tensor.pin_memory)

    def split(self, parts: int) -> tuple[Self, ...]:
        """Split into consecutive micro-batches of equal size; `InputError` if that fails."""
        if parts == 1:
            return (self,)
        samples = len(self)
        if samples % parts:
            raise InputError(
                "recipe.gradient_accumulation",
                f"a rank's {samples} samples cannot be split into {parts} equal micro-batches",
                f"a divisor of {samples}",
            )
        size = samples // parts
        return tuple(self._slice(slice(at, at + size)) for at in range(0, samples, size))

    def _slice(self, rows: slice) -> Self:
        return replace(
            self,
            sample_ids=self.sample_ids[rows],
            sample_weights=None if self.sample_weights is None else self.sample_weights[rows],
            errors=(),
            **self._sliced_contents(rows),
        )

    def _sliced_contents(self, rows: slice) -> dict[str, Any]:
        """Return the task's fields for some of the samples; batches of images override it."""
        return {n: slice_samples(v, rows, len(self)) for n, v in self._contents().items()}

    def _contents(self) -> dict[str, Any]:
        """The fields that the task has added."""
        added = fields(self)[len(fields(SampledBatch)) :]
        return {field.name: getattr(self, field.name) for field in added}

    def _with_contents(self, change: Callable[[Tensor], Tensor]) -> Self:
        contents = self._contents().items()
        return replace(self, **{name: with_tensors(value, change) for name, value in contents})


def with_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Apply `change` to every tensor of a nested structure; other values are kept."""
    if isinstance(value, Tensor):
        return change(value)
    return _with_items(value, lambda item: with_tensors(item, change))


def _with_items(value: Any, change: Callable[[Any], Any]) -> Any:
    """Apply `change` to the items of a container; a value that is none is returned unchanged."""
    if isinstance(value, dict | UserDict):
        copied = copy.copy(value)
        for key, item in value.items():
            copied[key] = change(item)
        return copied
    if isinstance(value, Mapping):  # a shallow copy might share its items
        return {key: change(item) for key, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in fields(value) if field.init]
        return replace(value, **{name: change(getattr(value, name)) for name in names})
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(change, value))
    if isinstance(value, list | tuple):
        return type(value)(map(change, value))
    return value


def slice_samples(value: Any, rows: slice, samples: int) -> Any:
    """Select some samples of a batch's content; single numbers and strings are kept.

    A sequence has either one item per sample, or items that each hold all samples.  Raises
    `InputError` if neither is true, or both.
    """
    if isinstance(value, _SINGLE):
        return value
    if isinstance(value, _ARRAY):
        if value.ndim > 0 and len(value) == samples:
            return value[rows]
        raise _cannot_split(f"a tensor of shape {tuple(value.shape)}", samples)
    slice_item = partial(slice_samples, rows=rows, samples=samples)
    sequence = isinstance(value, list | tuple) and not hasattr(value, "_fields")
    single = sequence and all(isinstance(item, _SINGLE) for item in value)
    if not sequence or len(value) != samples:
        supported = isinstance(value, Mapping | list | tuple) or is_dataclass(value)
        if not supported or (single and value):
            items = f" of {len(value)} items" if single else ""
            raise _cannot_split(f"a {type(value).__name__}{items}", samples)
        return _with_items(value, slice_item)
    homogeneous = len(set(map(_signature, value))) == 1
    if single or (homogeneous and isinstance(value[0], Mapping)):
        return value[rows]
    try:
        sliced = _with_items(value, slice_item)
    except InputError:
        return value[rows]
    if homogeneous:
        name = type(value).__name__
        raise _cannot_split(f"a {name} of {samples} items that have {samples} each", samples)
    return sliced


_ARRAY = (Tensor, np.ndarray)
_SINGLE = (str, bytes, int, float, complex, np.generic, type(None))


def _signature(item: Any) -> Hashable:
    """A key that is equal for items that may belong to different samples of one content."""
    if isinstance(item, _ARRAY):
        return (item.ndim, item.dtype)
    if isinstance(item, Mapping):
        return frozenset(item)
    first = _signature(item[0]) if isinstance(item, list | tuple) and item else None
    return (type(item), first)


def _cannot_split(content: str, samples: int) -> InputError:
    return InputError(
        "recipe.gradient_accumulation",
        f"a batch of {samples} samples has {content}, which cannot be split into micro-batches",
        "let collate return dictionaries of tensors whose first axis is the sample",
    )


class SampledTask(Workload, Generic[Split, BatchMade]):
    """Implements the parts of a `Workload` that all tasks share.

    If the options ask for fewer samples, a random subset is drawn from the seed.
    """

    _training_weights: NDArray[np.float64] | None = None
    """Weight of each training sample; None if each weighs 1."""
    _counted_samples: ClassVar[int] = 4
    """Number of training samples whose operations are counted."""
    _evaluation_batch: int
    """Number of validation samples in a batch."""

    def __init__(
        self,
        options: WorkloadOptions,
        seed: int,
        training: Split,
        validation: Split,
        *,
        synthetic: bool = False,
        notes: Iterable[str] = (),
    ) -> None:
        self._seed = seed
        self._workers = options.loader_workers
        self._available = len(training), len(validation)
        self._training = reduced(training, options.training_samples, seed=seed, split=0)
        self._validation = reduced(validation, options.validation_samples, seed=seed, split=1)
        self.training_samples, self.validation_samples = len(self._training), len(self._validation)
        self.synthetic = synthetic
        self._errors = dict.fromkeys(notes)  # an ordered set

    @property
    def available_samples(self) -> tuple[int, int]:
        return self._available

    @property
    def validation_batches(self) -> int:
        return -(-self.validation_samples // self._evaluation_batch)

    @property
    def data_errors(self) -> tuple[str, ...]:
        return tuple(self._errors)

    def batches(
        self, plan: BatchPlan, shard: Shard, step_shards: Iterable[StepShard] | None = None
    ) -> Iterator[BatchMade]:
        """Yield the shard's batches; raises `DataError` if the data are smaller than one step."""
        order = ShardOrder(self.training_samples, plan, shard, self._training_weights)

        def make(step_shard: StepShard) -> BatchMade:
            return self._training_batch(plan, order.at(step_shard.step, step_shard.shard))

        return self._in_order(make, every_step(shard) if step_shards is None else step_shards)

    @abstractmethod
    def _training_batch(self, plan: BatchPlan, share: Share) -> BatchMade:
        """Read and augment the samples of one shard and step; may run in a worker process."""

    def _validated(self, make: Callable[[NDArray[np.int64]], Made], shard: Shard) -> Iterator[Made]:
        """Yield the shard's validation batches: `make(ids)` of consecutive samples.

        Batch i belongs to shard i modulo `count`, so that batches do not depend on the number of
        ranks.  The generators are seeded before each batch by its first sample, so that a loss or
        a model draws the same random numbers on whichever rank evaluates the batch.
        """
        size = self._evaluation_batch
        starts = range(shard.index * size, self.validation_samples, shard.count * size)

        def make_batch(start: int) -> Made:
            return make(np.arange(start, min(start + size, self.validation_samples)))

        for start, batch in zip(starts, self._in_order(make_batch, starts), strict=True):
            seed = seed_of(self._seed, "evaluation", start)
            seed_generators(seed, on_gpu=gpu_in_use())
            yield batch

    def _in_order(self, make: Callable[[Item], Made], items: Iterable[Item]) -> Iterator[Made]:
        """Yield `make(item)` for each item, and collect the errors."""
        for batch in _prefetched(make, items, self._workers):
            self._errors.update(dict.fromkeys(batch.errors))
            yield batch

    def sample_input_flops(self, model: nn.Module) -> int | None:
        """Count the operations while real samples are passed: a task may depend on the data."""
        spread = np.linspace(0, self.training_samples - 1, self._counted_samples)
        ids = np.unique(spread.astype(np.int64))
        count, weights = len(ids), self._training_weights
        share = Share(
            epoch=0,
            positions=slice(0, count),
            ids=ids,
            step_weight=1.0,  # nothing is trained
            weights=None if weights is None else tuple(weights[ids].tolist()),
        )
        plan = BatchPlan(global_batch=count, seed=self._seed)
        batch = self._training_batch(plan, share).to(torch.device("cpu"))
        copied = copy.deepcopy(model)  # the passes change gradients and batch norm statistics
        total = counted_flops(copied, lambda: self.loss(copied, batch).total)
        return None if total is None else total // count or None


def added(parts: Iterable[object]) -> dict[str, Any]:
    """Add up the values of the same name in all parts, which are mappings of names to sums."""
    sums: dict[str, Any] = {}
    for part in parts:
        for name, value in cast("Mapping[str, Any]", part).items():
            sums[name] = sums[name] + value if name in sums else value
    return sums


def checked_logits(returned: object, shape: tuple[int, ...], model: str) -> Tensor:
    """Return the model's output; `InputError` unless it is one tensor of that shape."""
    if isinstance(returned, Tensor) and tuple(returned.shape) == shape:
        return returned
    description = type(returned).__name__
    if isinstance(returned, Tensor):
        description = f"tensor of shape {tuple(returned.shape)}"
    raise InputError(
        "workload.model",
        f"{model} returns a {description}",
        f"expected one tensor of shape {shape}: the logit of each class in the last axis",
    )


def gpu_in_use() -> bool:
    """True if this process has initialised CUDA.  Does not initialise it."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


class _Items(Dataset[Made | ShardmarkError], Generic[Item, Made]):
    """Makes batches, and returns errors instead of raising them: a loader loses their type."""

    def __init__(self, make: Callable[[Item], Made]) -> None:
        self._make = make

    def __getitem__(self, item: Item) -> Made | ShardmarkError:
        try:
            return self._make(item)
        except ShardmarkError as error:
            return error


def _prefetched(
    make: Callable[[Item], Made], items: Iterable[Item], workers: int
) -> Iterator[Made]:
    """Yield batches that worker processes prepare two ahead each; without workers, in this one."""
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
    # Stop the workers now.  The error's traceback would keep them alive until garbage collection,
    # when they no longer receive the signal to stop and each is waited for 5 seconds in vain.
    del loader
    raise made
