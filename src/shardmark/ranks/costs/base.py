"""The cost model of a strategy: what a step sends, holds and runs, by formulas.

Importing it imports no torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from shardmark.base.layout import ActivationSharding, Layout
from shardmark.base.recipe import Recipe
from shardmark.base.traffic import FROZEN_ELEMENT_BYTES, ModelSize, RequiredTraffic, Traffic
from shardmark.ranks.strategies.base import Strategy, samples_of_share

if TYPE_CHECKING:
    from torch import nn

    from shardmark.ranks.workloads.base import Workload

FP32_BYTES = 4
PRECISION_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
BUCKET_MB = 25.0
"""MiB of gradients in one message, by default, of DDP and of our options for DeepSpeed."""
NO_MODEL = ModelSize(parameters=0, trained_parameters=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitSize:
    """Layers of a model whose parameters are gathered together.  Sizes count elements."""

    parameters: int
    trained_parameters: int
    sizes: tuple[int, ...] = ()
    """Number of elements of each trained parameter."""
    block: bool = True
    """True for a unit that is gathered by itself.

    Layers between blocks belong to the root, which stays gathered for a full pass."""
    frozen_element_bytes: float = FROZEN_ELEMENT_BYTES
    """Mean bytes of an element of its frozen parameters, as they are stored."""
    replicated_fraction: float = 0.0
    """Fraction of its parameters that tensor parallelism replicates on every rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitState:
    """Bytes on a rank's device that are allocated and freed with one unit of the model."""

    entering_forward: float = 0.0
    """Gathered parameters and messages when the unit's forward pass begins."""
    forward: float = 0.0
    """Gathered parameters and messages during the unit's forward pass."""
    entering_backward: float = 0.0
    """Gathered parameters and messages when the unit's backward pass begins."""
    backward: float = 0.0
    """Gathered parameters and messages during the unit's backward pass."""
    copied: float = 0.0
    """Bytes of copies that exist when one of the unit's gradients is complete."""
    reducing: float = 0.0
    """Bytes beside the unit's gradients while they are reduced together after its backward pass."""
    retained_gradients: float = 0.0
    """Bytes of the unit's gradients that the rank retains until the update."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostState:
    """Bytes of a rank's offloaded state in host memory, and bytes that a step moves to and fro."""

    resident: float
    """Bytes on the host without the optimizer's own state, which is on the host as well."""
    fetched: float = 0.0
    """Bytes of parameters that are fetched ahead of the layers that use them."""
    handed_back: float = 0.0
    """Bytes of gradients moved to the host while gradients of earlier layers are computed."""
    returned: float = 0.0
    """Bytes of parameters that are moved to the device after their update."""
    fused_update: bool = False
    """True if the library updates on the host by one kernel, whatever the recipe's optimizer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepState:
    """Bytes of model state that a training rank holds in a step."""

    parameters: float
    optimizer_state: float = 0.0
    """Copies of parameters that the optimizer updates, beside the optimizer's own state."""
    optimizer_share: float = 1.0
    """Fraction of the optimizer's own state that the rank holds."""
    gradients: float = 0.0
    """Gradients that exist already when the forward pass begins."""
    fresh_gradients: float = 1.0
    """Fraction of a unit's gradients that exists while they are computed, before reduction."""
    buffers: float = 0.0
    """Communication buffers, which exist all the time."""
    updating: float | None = None
    """Bytes of gradients during the update; None if all retained gradients still exist."""
    flat_update: bool = False
    """True if the optimizer updates all parameters as one tensor."""
    units: tuple[UnitState, ...]
    host: HostState | None = None
    """None without offload; otherwise `optimizer_share` is a fraction in host memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A model under a recipe on a number of ranks: the argument of every cost function."""

    recipe: Recipe
    world_size: int
    nodes: int = 1
    size: ModelSize = NO_MODEL
    """Elements of the full model.  Costs that depend on the schedule alone do not read it."""
    units: Sequence[UnitSize] = ()
    """Units of the model in the order of the forward pass; only `step_state` reads them."""
    device_type: str = "cuda"

    def samples(self, shares: int) -> int:
        """Samples of a step on each rank, if the batch is divided into so many shares."""
        return samples_of_share(self.recipe, shares)

    @property
    def weight_bytes(self) -> int:
        """Bytes of an element of the trained parameters, of their gradients, and in messages."""
        return PRECISION_BYTES[self.recipe.weights]

    @property
    def stored_bytes(self) -> float:
        """Bytes of all units' parameters."""
        return sum(stored_bytes(unit, self.weight_bytes) for unit in self.units)

    @property
    def all_trained_parameters(self) -> int:
        """Elements of all units' trained parameters."""
        return sum(unit.trained_parameters for unit in self.units)


S = TypeVar("S", bound=Strategy)


class Costs(ABC, Generic[S]):
    """The cost model of one strategy.  All bytes and counts are those of one training rank."""

    def __init__(self, strategy: S) -> None:
        self.strategy = strategy

    def layout(self, cell: Cell) -> Layout:
        """The strategy's layout on the cell's ranks."""
        return self.strategy.layout(cell.world_size, cell.nodes)

    @abstractmethod
    def required_traffic(self, cell: Cell) -> RequiredTraffic:
        """Bytes that the strategy's definition needs the network to carry in a step."""

    def library_traffic(self, cell: Cell) -> tuple[Traffic, ...]:
        """Collectives that the library calls in a step; by default the required ones."""
        return self.required_traffic(cell).traffic

    def library_work(self, cell: Cell) -> Mapping[str, float]:
        """Number of the library's own operations on the host processor in a step.

        Keys are names in `predict/library.py`.  By default the optimizer updates full tensors.
        """
        return {updated_tensor(cell.recipe): cell.size.trained_tensors}

    def driven_devices(self, cell: Cell) -> int:  # noqa: ARG002
        """Number of devices whose operations one process launches."""
        return 1

    def step_state(self, cell: Cell) -> StepState:
        """Bytes of model state in a step; by default the fractions that the layout gives."""
        holds = self.strategy.holds(cell.world_size, cell.nodes)
        width = holds.gradients * cell.weight_bytes
        gradients = [width * unit.trained_parameters for unit in cell.units]
        accumulates = cell.recipe.gradient_accumulation * self.num_microbatches(cell) > 1
        return StepState(
            parameters=holds.parameters * cell.stored_bytes,
            optimizer_share=holds.optimizer_state,
            gradients=sum(gradients) if accumulates else 0.0,
            fresh_gradients=0.0 if accumulates else holds.gradients,
            units=tuple(
                UnitState(retained_gradients=0.0 if accumulates else size) for size in gradients
            ),
        )

    def bubble(self, cell: Cell) -> float:  # noqa: ARG002 (one signature)
        """Idle time of a pipeline's rank over its computing time."""
        return 0.0

    def num_microbatches(self, cell: Cell) -> int:  # noqa: ARG002
        """Number of micro-batches into which a pipeline cuts the samples of a pass."""
        return 1

    def in_flight(self, cell: Cell) -> float:  # noqa: ARG002
        """Largest fraction of a pass's samples whose activations a rank holds at once."""
        return 1.0

    def activation_sharding(self) -> ActivationSharding:
        """Sharding of the activations between tensor-parallel layers."""
        return ActivationSharding()

    def activation_traffic(
        self,
        workload: Workload,  # noqa: ARG002
        model: nn.Module,  # noqa: ARG002
        cell: Cell,  # noqa: ARG002
    ) -> Mapping[str, Any]:
        """Fields of `ModelSize` about activations that ranks exchange inside the model.

        The model may be without data.  It is only called for layouts that divide layers or
        sequences.
        """
        return {}


def stored_bytes(part: UnitSize | ModelSize, width: float = FP32_BYTES) -> float:
    """Return the bytes of parameters whose elements have `width` bytes at most."""
    frozen = part.parameters - part.trained_parameters
    return width * part.trained_parameters + min(width, part.frozen_element_bytes) * frozen


def updated_tensor(recipe: Recipe) -> str:
    """Name of the update of one tensor in `Costs.library_work`."""
    return "sgd tensor" if recipe.optimizer.name == "sgd" else "adam tensor"


def all_reduced(cell: Cell, *, bucket_mb: float = BUCKET_MB) -> RequiredTraffic:
    """Traffic of all-reduces of all gradients in the type of the weights, one for each bucket."""
    payload = cell.size.trained_parameters * cell.weight_bytes
    traffic = Traffic(
        kind="all_reduce",
        payload_bytes=payload,
        ranks=cell.world_size,
        calls=buckets(payload, bucket_mb),
    )
    return RequiredTraffic(traffic=(traffic,), formula="all-reduce: 2 (n-1)/n G")


def buckets(payload_bytes: float, bucket_mb: float = BUCKET_MB) -> int:
    """Number of messages of at most `bucket_mb` MiB."""
    return max(1, ceil(payload_bytes / (bucket_mb * 2**20)))


def times(count: int) -> str:
    """A factor in front of a term of a formula; empty for one."""
    return "" if count == 1 else f"{count} x "
