"""The interface of a workload: a model, its data, its loss and its quality.  Knows no ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, Self

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from shardmark.base.layout import Shard, StepShard
    from shardmark.base.metrics import Better


class Batch(Protocol):
    """Some samples of one step, ready for the model."""

    @property
    def sample_ids(self) -> tuple[int, ...]:
        """Index of each sample in the training set, in the order of the batch."""

    @property
    def weight(self) -> float:
        """Divisor that turns the summed loss into a mean: number of samples, tokens, ..."""

    @property
    def step_weight(self) -> float:
        """Sum of the weights of all ranks and micro-batches of the step."""

    def __len__(self) -> int: ...

    def to(self, device: torch.device) -> Self:
        """Copy the batch to the device, asynchronously from pinned memory."""

    def split(self, parts: int) -> Sequence[Self]:
        """Split into consecutive micro-batches of equal size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSum:
    """A summed loss, not yet divided by its weight."""

    total: Tensor
    """Summed loss, shape (), fp32."""
    weight: Tensor | float
    """Divisor of the sum; equals the weight of the batch if `known_before`."""
    known_before: bool = True
    """True if the batch already has the weight; else the ranks sum it up in each step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """The division of the training set into steps, the same for every strategy."""

    global_batch: int
    """Samples per optimizer step over all ranks."""
    seed: int
    """Seed of the order of samples in each epoch, and of their augmentation."""
    draws: int = 0
    """Another number draws other proposals and masks; used only to find causes of deviations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterGroup:
    """Parameters with optimizer options of their own, like one of torch's parameter groups."""

    names: frozenset[str]
    options: Mapping[str, Any]
    """`lr`, `weight_decay`, ... that replace the options of the recipe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPlan:
    """A tensor-parallel plan: the way each layer is sharded over ranks with the same samples.

    Modules without an entry are replicated and compute the same result on every rank.
    """

    styles: Mapping[str, str]
    """Module name, with `*` as a wildcard -> sharding style.  `column`: the rank holds some of the
    outputs, and the next layer computes on them.  `row`: it holds some of the inputs, or some
    tokens of an embedding, and the outputs are all-reduced.  `gathered`: it holds some of the
    outputs, which are all-gathered.  `summed`: the module is replicated but sees sharded
    activations, so its gradients are all-reduced."""
    units: Mapping[str, int] = field(default_factory=dict)
    """Numbers that the tensor ranks must divide evenly, by name, e.g. {"heads": 8}."""
    sequence_length: int | None = None
    """Length of the sequences if replicated modules can be sharded along them, else None."""


class Exchange(Protocol):
    """An all-to-all between ranks with parts of the same sequences.

    `positions` and `heads` are axes of the tensor.
    """

    def to_heads(self, part: Tensor, *, positions: int, heads: int) -> Tensor:
        """Turn a part of each sequence into full sequences of some of the heads."""

    def to_positions(self, full: Tensor, *, positions: int, heads: int) -> Tensor:
        """Turn full sequences of some of the heads back into a part of each sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequencePlan:
    """A sequence-parallel plan: ranks compute parts of sequences, and attention exchanges them."""

    attend: Callable[[Exchange], object]
    """Makes the attention of the model exchange its inputs and outputs."""
    part: Callable[[Any, int, int], Any]
    """(batch, index of the part, number of parts) -> the batch with that part of every sequence."""
    units: Mapping[str, int] = field(default_factory=dict)
    """Numbers that the ranks must divide evenly, by name, e.g. {"heads": 8, "positions": 1024}."""


@dataclass(frozen=True, slots=True)
class CannotShard:
    """The reason why a model's layers or sequences cannot be sharded, and the remedy."""

    reason: str
    remedy: str


NOT_DIVIDED = CannotShard(
    "tensor parallelism divides no matrices of an adapter", "use fsdp, or leave out the adapter"
)


class Workload(Protocol):
    """A model, its data and its loss.  Every rank creates it from the same options and seed."""

    training_samples: int
    validation_samples: int
    synthetic: bool
    """True if the data are synthetic; every table says so."""
    weights_known: bool = True
    """True if batches know the weight of their samples; else the first loss tells it."""
    not_additive_declared: bool = False
    """True if the user declares the loss not additive; a constant divisor is still an error."""
    equal_blocks: bool = False
    """True if the model calls its blocks in a loop, so that it also runs with fewer of them."""
    has_after_step: bool = False
    """True if the task changes frozen parameters or buffers after each step."""
    parameter_groups: Sequence[ParameterGroup] = ()
    """Parameter groups of the last built model; empty if all parameters are one group."""
    better: Mapping[str, Better] = MappingProxyType({})
    """`lower` or `higher` for each metric that the catalogue does not have."""
    corpora: Mapping[str, str] = MappingProxyType({})
    """SHA-256 of each embedded text corpus, by name; it depends on the installed version.

    Empty if the task trains on no such text."""

    @property
    def available_samples(self) -> tuple[int, int]:
        """Training and validation samples of the data sets, of which options may choose some."""
        return self.training_samples, self.validation_samples

    @property
    def validation_batches(self) -> int:
        """Number of validation batches; shards beyond it evaluate nothing."""
        return self.validation_samples

    @property
    def not_additive(self) -> str | None:
        """The reason why a batch's loss is not the sum of its samples' losses; None if it is."""
        return None

    @property
    def data_errors(self) -> Sequence[str]:
        """Messages about unreadable samples that this process has skipped, one line each."""

    def build_model(self) -> nn.Module:
        """Build the model with the same weights in every process, on the CPU, in training mode."""

    def blocks(self, model: nn.Module) -> Sequence[nn.Module] | None:  # noqa: ARG002
        """Units of sharding and activation checkpointing; None lets the strategy choose them."""
        return None

    def tensor_plan(self, model: nn.Module) -> TensorPlan | CannotShard:  # noqa: ARG002
        """The tensor-parallel plan of the model, or the reason why there is none."""
        return CannotShard(
            "the task has no `tensor_plan` for this model, so its layers cannot be sharded",
            "use fsdp, or write a task of your own with a method tensor_plan(model)",
        )

    def sequence_plan(self, model: nn.Module) -> SequencePlan | CannotShard:  # noqa: ARG002
        """The sequence-parallel plan of the model, or the reason why there is none."""
        return CannotShard(
            "the task has no `sequence_plan` for this model, so its sequences cannot be sharded",
            "use fsdp, or write a task of your own with a method sequence_plan(model)",
        )

    def pipeline_parts(self, model: nn.Module) -> Sequence[nn.Module] | CannotShard:
        """Modules that compute the model when they are called in a row, or the reason why not.

        Together they hold all parameters.  The first module takes the model's arguments, every
        other one the output of the module before it: a tensor, or a tuple of tensors.
        """
        from torch import nn

        if type(model) is nn.Sequential:
            return list(model)
        return CannotShard(
            "the task has no `pipeline_parts` for this model, so it cannot be cut into stages",
            "use fsdp, or write a task of your own with a method pipeline_parts(model)",
        )

    def batches(
        self, plan: BatchPlan, shard: Shard, step_shards: Iterable[StepShard] | None = None
    ) -> Iterator[Batch]:
        """Yield the shard's batch of every step, on the CPU, endlessly, or of `step_shards`.

        The incomplete last batch of each epoch is dropped.  The shards of a step concatenate, in
        order of their index, to exactly its unsharded batch.
        """

    def loss(self, model: nn.Module, batch: Batch) -> LossSum:
        """Summed loss of the batch's samples; calls the model only by `model(...)`."""

    def after_step(self, model: nn.Module, step: int) -> None:  # noqa: ARG002
        """Change frozen parameters and buffers after `step` optimizer steps, without gradients.

        Every training rank calls it.  Parameters may be shards of the rank.
        """
        return

    def watch_draws(self) -> Callable[[], tuple[str, ...]]:
        """Record from now on the random draws of the last built model for each sample.

        The returned function returns the draws since its last call, in an order that does not
        depend on the sharding; empty if only torch's own generators draw.
        """
        return tuple

    def evaluate(self, model: nn.Module, shard: Shard, device: torch.device) -> object:
        """Evaluate this shard of the validation set, each sample once.

        Batches and random draws do not depend on the number of shards.  The model is unsharded
        and in evaluation mode.  The result can be pickled.
        """

    def quality(self, parts: Iterable[object]) -> Mapping[str, float | None]:
        """Quality metrics, such as `validation_loss`, from the results of all shards."""

    def sample_input_flops(self, model: nn.Module) -> int | None:
        """Floating-point operations per sample, forward and backward; None if unknown."""

    def active_parameters(self, model: nn.Module) -> int | None:  # noqa: ARG002
        """Number of parameters that compute a token; None unless it is sent to some experts."""
        return None

    def tokens_in(self, sample_ids: Iterable[Sequence[int]]) -> int | None:  # noqa: ARG002
        """Number of tokens, without padding, in the training samples of some steps, or None."""
        return None

    @property
    def settings(self) -> Mapping[str, object]:
        """Facts about the last built model that are stored with a trial."""
        return {}
