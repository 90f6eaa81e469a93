"""What all tasks do alike: batches in order, made ahead where asked, weighed, errors noted."""

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

from shardmark.core.errors import InputError, ShardmarkError
from shardmark.workloads.base import BatchPlan, Workload
from shardmark.workloads.flops import counted_flops
from shardmark.workloads.model_building import seed_generators
from shardmark.workloads.order import ShardOrder, Share, Source, every_step, reduced, seed_of

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import nn

    from shardmark.core.shares import Shard, StepShard
    from shardmark.workloads.options import WorkloadOptions


class Reading(Protocol):
    """Some samples as they are stored, or a batch made of them."""

    @property
    def errors(self) -> tuple[str, ...]:
        """One line for each unreadable sample met while making it."""


Item = TypeVar("Item")
Made = TypeVar("Made", bound=Reading)
Split = TypeVar("Split", bound=Source)
BatchMade = TypeVar("BatchMade", bound="SampledBatch")


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledBatch:
    """Some samples of one step, ready for the model; tasks add what they consist of."""

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

    def to(self, device: torch.device) -> Self:
        """A copy on the device; asynchronous where the memory is pinned."""

        def moved(tensor: Tensor) -> Tensor:
            return tensor.to(device, non_blocking=tensor.is_pinned())

        return self if device.type == "cpu" else self._with_contents(moved)

    def pin_memory(self) -> Self:
        """A copy in page-locked memory; the loader's pinning thread calls it."""
        return self._with_contents(Tensor.pin_memory)

    def split(self, parts: int) -> tuple[Self, ...]:
        """Consecutive micro-batches of equally many samples; `InputError` if they cannot be."""
        if parts == 1:
            return (self,)
        samples = len(self)
        if samples % parts:
            raise InputError(
                "recipe.gradient_accumulation",
                f"a rank's {samples} samples cannot be cut into {parts} equal micro-batches",
                f"a divisor of {samples}",
            )
        size = samples // parts
        return tuple(self._cut(slice(at, at + size)) for at in range(0, samples, size))

    def _cut(self, which: slice) -> Self:
        weights = None if self.sample_weights is None else self.sample_weights[which]
        return replace(
            self,
            sample_ids=self.sample_ids[which],
            sample_weights=weights,
            errors=(),
            **self._contents_of(which),
        )

    def _contents_of(self, which: slice) -> dict[str, Any]:
        contents = self._contents().items()
        return {name: cut(value, which, len(self)) for name, value in contents}

    def _contents(self) -> dict[str, Any]:
        """The fields that a task adds."""
        added = fields(self)[len(fields(SampledBatch)) :]
        return {field.name: getattr(self, field.name) for field in added}

    def _with_contents(self, change: Callable[[Tensor], Tensor]) -> Self:
        contents = self._contents().items()
        return replace(self, **{name: with_tensors(value, change) for name, value in contents})


def with_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same structure with every tensor changed; other values stay."""
    if isinstance(value, Tensor):
        return change(value)
    return _with_items(value, lambda item: with_tensors(item, change))


def _with_items(value: Any, change: Callable[[Any], Any]) -> Any:
    """A container of the same type with its items changed; what is none stays."""
    if isinstance(value, dict | UserDict):
        made = copy.copy(value)
        for key, item in value.items():
            made[key] = change(item)
        return made
    if isinstance(value, Mapping):  # a copy may share what it holds
        return {key: change(item) for key, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        given = [field.name for field in fields(value) if field.init]
        return replace(value, **{name: change(getattr(value, name)) for name in given})
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(change, value))
    if isinstance(value, list | tuple):
        return type(value)(map(change, value))
    return value


def cut(value: Any, which: slice, samples: int) -> Any:
    """What some samples have of a batch's content; single numbers and texts stay.

    A sequence holds either an item of each sample or parts that have them.  Raises `InputError`
    where neither is so, or both.
    """
    if isinstance(value, _SINGLE):
        return value
    if isinstance(value, _ARRAY):
        if value.ndim > 0 and len(value) == samples:
            return value[which]
        raise _uncuttable(f"a tensor of shape {tuple(value.shape)}", samples)
    parts = partial(cut, which=which, samples=samples)
    sequence = isinstance(value, list | tuple) and not hasattr(value, "_fields")
    single = sequence and all(isinstance(item, _SINGLE) for item in value)
    if not sequence or len(value) != samples:
        known = isinstance(value, Mapping | list | tuple) or is_dataclass(value)
        if not known or (single and value):
            items = f" of {len(value)} items" if single else ""
            raise _uncuttable(f"a {type(value).__name__}{items}", samples)
        return _with_items(value, parts)
    alike = len(set(map(_kind, value))) == 1
    if single or (alike and isinstance(value[0], Mapping)):
        return value[which]
    try:
        made = _with_items(value, parts)
    except InputError:
        return value[which]
    if alike:
        kind = type(value).__name__
        raise _uncuttable(f"a {kind} of {samples} items that have {samples} each", samples)
    return made


_ARRAY = (Tensor, np.ndarray)
_SINGLE = (str, bytes, int, float, complex, np.generic, type(None))


def _kind(item: Any) -> Hashable:
    """Equal for what may be the same part of several samples."""
    if isinstance(item, _ARRAY):
        return (item.ndim, item.dtype)
    if isinstance(item, Mapping):
        return frozenset(item)
    first = _kind(item[0]) if isinstance(item, list | tuple) and item else None
    return (type(item), first)


def _uncuttable(content: str, samples: int) -> InputError:
    return InputError(
        "recipe.gradient_accumulation",
        f"a batch of {samples} samples has {content}, which cannot be cut into micro-batches",
        "let collate make dictionaries of tensors whose first axis is the sample",
    )


class SampledTask(Workload, Generic[Split, BatchMade]):
    """The part of a `Workload` that does not depend on what is to be learned.

    Where the options ask for fewer samples, they are drawn from the seed.
    """

    _training_weights: NDArray[np.float64] | None = None
    """Of each training sample; without, each weighs 1."""
    _counted_samples: ClassVar[int] = 4
    """Training samples whose operations are counted."""
    _evaluation_batch: int
    """Validation samples in a batch."""

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
        self._training = reduced(training, options.training_samples, seed=seed, split=0)
        self._validation = reduced(validation, options.validation_samples, seed=seed, split=1)
        self._synthetic = synthetic
        self._errors = dict.fromkeys(notes)  # a set that keeps its order

    @property
    def training_samples(self) -> int:
        return len(self._training)

    @property
    def validation_samples(self) -> int:
        return len(self._validation)

    @property
    def validation_batches(self) -> int:
        return -(-self.validation_samples // self._evaluation_batch)

    @property
    def synthetic(self) -> bool:
        return self._synthetic

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

    def _validated(self, make: Callable[[NDArray[np.int64]], Made], shard: Shard) -> Iterator[Made]:
        """`make(ids)` of the shard's batches of consecutive validation samples.

        Batch number i goes to shard i modulo `count`, so that batches do not depend on the number
        of ranks.  Before each one the generators are seeded by its first sample: a loss or a model
        that draws random numbers draws the same ones wherever the batch is evaluated.
        """
        at_once = self._evaluation_batch
        starts = range(shard.index * at_once, self.validation_samples, shard.count * at_once)

        def of(start: int) -> Made:
            return make(np.arange(start, min(start + at_once, self.validation_samples)))

        for start, made in zip(starts, self._in_order(of, starts), strict=True):
            seed = seed_of(self._seed, "evaluation", start)
            seed_generators(seed, on_gpu=gpu_in_use())
            yield made

    def _in_order(self, make: Callable[[Item], Made], items: Iterable[Item]) -> Iterator[Made]:
        """`make(item)` for each of the items; notes what could not be read."""
        for made in _made_ahead(make, items, self._workers):
            self._errors.update(dict.fromkeys(made.errors))
            yield made

    def sample_input_flops(self, model: nn.Module) -> int | None:
        """Counted while some samples are really passed: what a task does may depend on them."""
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
        copied = copy.deepcopy(model)  # the passes leave gradients and batch norms' statistics
        total = counted_flops(copied, lambda: self.loss(copied, batch).total)
        return None if total is None else total // count or None


def added(parts: Iterable[object]) -> dict[str, Any]:
    """The sums of all parts, which each map names to sums."""
    sums: dict[str, Any] = {}
    for part in parts:
        for name, value in cast("Mapping[str, Any]", part).items():
            sums[name] = sums[name] + value if name in sums else value
    return sums


def checked_logits(returned: object, shape: tuple[int, ...], model: str) -> Tensor:
    """What the model returned; `InputError` unless it is one tensor of that shape."""
    if isinstance(returned, Tensor) and tuple(returned.shape) == shape:
        return returned
    kind = type(returned).__name__
    if isinstance(returned, Tensor):
        kind = f"tensor of shape {tuple(returned.shape)}"
    raise InputError(
        "workload.model",
        f"{model} returns a {kind}",
        f"expected one tensor of shape {shape}: the logit of each class in the last axis",
    )


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
