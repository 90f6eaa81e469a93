"""What a workload is: a model, its data, its loss and its quality.  Knows nothing of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, Self

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from shardmark.core.metrics import Better
    from shardmark.core.shares import Shard, StepShard


class Batch(Protocol):
    """Some samples of one step, ready for the model."""

    @property
    def sample_ids(self) -> tuple[int, ...]:
        """Index of each sample in the training set, in order."""

    @property
    def weight(self) -> float:
        """What the loss of these samples is divided by to be their mean: samples, tokens, ..."""

    @property
    def step_weight(self) -> float:
        """The weight of the whole step, all shares and micro-batches together."""

    def __len__(self) -> int: ...

    def to(self, device: torch.device) -> Self:
        """A copy on the device; asynchronous where the memory is pinned."""

    def split(self, parts: int) -> Sequence[Self]:
        """Consecutive micro-batches of equally many samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSum:
    """A loss before it is divided."""

    total: Tensor
    """Shape (), fp32: the sum over what is weighed."""
    weight: Tensor | float
    """Weight of the samples that were summed over; equals their batch's if that is known."""
    known_before: bool = True
    """True if the batch knows the weight; else the ranks add it up in each step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """How the training set is cut into steps: the same for every strategy."""

    global_batch: int
    """Samples per optimizer step over all ranks."""
    seed: int
    """Orders the samples of each epoch and draws their augmentation."""
    draws: int = 0
    """Other numbers draw other proposals for the same samples: only a search for causes does so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterGroup:
    """Parameters that the optimizer treats alike, as one of torch's parameter groups."""

    names: frozenset[str]
    options: Mapping[str, Any]
    """`lr`, `weight_decay`, ...: in place of the recipe's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPlan:
    """How a model's layers are divided over ranks that see the same samples.

    All modules that it does not name are whole on every rank, and compute the same there.
    """

    styles: Mapping[str, str]
    """By the module's name, with `*` for any part of it.  `column`: the rank has some outputs, and
    what follows computes on them; `row`: some inputs, or tokens of an embedding, and the outputs
    are summed up; `gathered`: some outputs, which are then gathered; `summed`: the module is whole
    and sees a part of what is computed, so that its gradients are summed up."""
    units: Mapping[str, int] = field(default_factory=dict)
    """What is divided besides, and how many there are, e.g. {"heads": 8}."""
    sequence_length: int | None = None
    """Positions that whole modules could be divided by; None where they need all."""


class Exchange(Protocol):
    """Between ranks with parts of the same sequences; `positions` and `heads` are axes."""

    def to_heads(self, part: Tensor, *, positions: int, heads: int) -> Tensor:
        """A part of each sequence -> whole sequences of some of the heads."""

    def to_positions(self, whole: Tensor, *, positions: int, heads: int) -> Tensor:
        """Back: whole sequences of some of the heads -> a part of each sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequencePlan:
    """How a model computes a part of every sequence, of which attention alone needs the whole."""

    attend: Callable[[Exchange], object]
    """Has the model's attention exchange what it is given, and what it gives."""
    part: Callable[[Any, int, int], Any]
    """A batch, which part of how many -> the batch with that part of every sequence."""
    units: Mapping[str, int] = field(default_factory=dict)
    """What is divided inside of attention, e.g. {"heads": 8}, and {"positions": 1024}."""


@dataclass(frozen=True, slots=True)
class CannotShard:
    """Why a model's layers or sequences cannot be divided, and what to do."""

    reason: str
    remedy: str


class Workload(Protocol):
    """A model, its data and its loss.  Made anew in every rank from the same options and seed."""

    @property
    def training_samples(self) -> int: ...

    @property
    def validation_samples(self) -> int: ...

    @property
    def validation_batches(self) -> int:
        """Batches of the validation set: a shard beyond their number has nothing to evaluate."""
        return self.validation_samples

    @property
    def synthetic(self) -> bool:
        """True where the data are made up; every table says so."""

    @property
    def not_additive(self) -> str | None:
        """Why the loss of a batch is not the sum of its samples' losses; None where it is."""
        return None

    @property
    def weights_known(self) -> bool:
        """True if batches know the weight of their samples; else the first loss decides."""
        return True

    @property
    def not_additive_declared(self) -> bool:
        """True if the user says so of a loss: a sum divided by a constant is still refused."""
        return False

    @property
    def data_errors(self) -> Sequence[str]:
        """One line for each unreadable sample skipped so far in this process."""

    def build_model(self) -> nn.Module:
        """The same initial weights in every process; on the CPU, in training mode."""

    def blocks(self, model: nn.Module) -> Sequence[nn.Module] | None:  # noqa: ARG002
        """Units of sharding and of activation checkpointing; None leaves them to the strategy."""
        return None

    def tensor_plan(self, model: nn.Module) -> TensorPlan | CannotShard:  # noqa: ARG002
        """How tensor parallelism divides the model's layers, or why it cannot."""
        return CannotShard(
            "its model says nowhere how its layers are divided",
            "use fsdp, or an own task with tensor_plan(model)",
        )

    def sequence_plan(self, model: nn.Module) -> SequencePlan | CannotShard:  # noqa: ARG002
        """How ranks share each sequence, or why they cannot."""
        return CannotShard(
            "its model says nowhere which layers need whole sequences",
            "use fsdp, or an own task with sequence_plan(model)",
        )

    def pipeline_parts(self, model: nn.Module) -> Sequence[nn.Module] | CannotShard:
        """Modules whose chain is the model, with all of its parameters; or why there are none.

        The first one takes what the model is called with, each other one what the one before gives:
        a tensor, or several as a tuple.
        """
        from torch import nn

        if type(model) is nn.Sequential:
            return list(model)
        return CannotShard(
            "its model says nowhere of which parts it is a chain",
            "use fsdp, or an own task with pipeline_parts(model)",
        )

    @property
    def parameter_groups(self) -> Sequence[ParameterGroup]:
        """The optimizer's, of the last model that was built; none: all parameters are one group."""
        return ()

    def batches(
        self, plan: BatchPlan, shard: Shard, step_shards: Iterable[StepShard] | None = None
    ) -> Iterator[Batch]:
        """On the CPU: the shard's part of every step, endless, epoch after epoch; or `step_shards`.

        The incomplete last batch of each epoch is left out.

        The shards of a step concatenate, in order of their index, to exactly its unsharded batch.
        """

    def loss(self, model: nn.Module, batch: Batch) -> LossSum:
        """Over the batch's samples; calls the model only by `model(...)`."""

    def watch_draws(self) -> Callable[[], tuple[str, ...]]:
        """Record from now on what the last model that was built draws for each sample.

        The function tells what was drawn since it was last asked, in an order that does not depend
        on how samples are shared out.  Nothing, where only torch's own generators draw.
        """
        return tuple

    def evaluate(self, model: nn.Module, shard: Shard, device: torch.device) -> object:
        """This shard's part of one pass over the validation set, each sample once.

        Batches and random draws do not depend on the number of shards.

        The model is in evaluation mode and whole.  The result can be pickled.
        """

    def quality(self, parts: Iterable[object]) -> Mapping[str, float | None]:
        """Metrics of the catalogue from all shards' parts: `validation_loss`, ..."""

    def sample_input_flops(self, model: nn.Module) -> int | None:
        """Operations of one forward and backward pass per sample; None if unknown."""

    def tokens_in(self, sample_ids: Iterable[Sequence[int]]) -> int | None:  # noqa: ARG002
        """Tokens of training samples, given step by step, padding left out; None without any."""
        return None

    @property
    def better(self) -> Mapping[str, Better]:
        """Which values of a metric that the catalogue does not know are better."""
        return {}

    @property
    def corpora(self) -> Mapping[str, str]:
        """SHA-256 of the text that comes with this installation, by name; others have other text.

        Empty where nothing such is trained on.
        """
        return {}
