"""Profile of a model's step: computation, memory and communication.  Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Literal

from shardmark.base.traffic import ModelSize
from shardmark.ranks.costs.base import UnitSize


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """A quantity that grows linearly with the samples of a forward and backward pass."""

    fixed: float = 0.0
    per_sample: float = 0.0
    replicated_fraction: float = 0.0
    """Fraction that every tensor-parallel rank has or computes in full."""

    def at(self, samples: float, tensor: int = 1) -> float:
        """Return the amount on one of `tensor` tensor-parallel ranks."""
        on_rank = self.replicated_fraction + (1 - self.replicated_fraction) / tensor
        return on_rank * (self.fixed + self.per_sample * samples)

    def times(self, count: float) -> Amount:
        return replace(self, fixed=count * self.fixed, per_sample=count * self.per_sample)


values_of = attrgetter("fixed", "per_sample", "replicated_fraction")
"""The numbers of an amount."""

Kind = Literal[
    "product",
    "attention",
    "convolution",
    "convolution_3x3",
    "grouped",
    "depthwise",
    "other",
    "fp8_product",
]
"""Kind of an operation: all but `other` multiply, and reach unlike fractions of a card's peak.
Stored profiles have the number of a kind in this order, so that new kinds come last.

`grouped` and `depthwise` are convolutions; `convolution_3x3` are dense ones of stride 1, for which
ordinary cores use the algorithm of Winograd.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """Operations of a pass that are alike, with their sums."""

    kind: Kind
    flops: Amount = Amount()
    bytes: Amount = Amount()
    """Bytes read from and written to the device's memory."""
    calls: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """Live bytes at one operation, without parameters, buffers and optimizer state."""

    bytes: Amount
    """Bytes of the batch, all units' activations, and temporaries, without complete gradients."""
    gradient_bytes: float = 0.0
    """Bytes of the unit's gradients that are complete."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit(UnitSize):
    """Consecutive layers whose parameters are gathered together: a block, or layers between two."""

    name: str
    forward: tuple[Operation, ...]
    backward: tuple[Operation, ...]
    repeated: tuple[Operation, ...] = ()
    """Operations of the forward pass that the backward pass computes again."""
    saved_bytes: Amount = Amount()
    """Activations that the forward pass saves for the backward pass."""
    gradient_bytes: float = 0.0
    """Bytes of all its gradients, in the type in which they are computed."""
    forward_moments: tuple[Moment, ...] = ()
    """Moments of the forward pass that can have the most live bytes at some number of samples."""
    backward_moments: tuple[Moment, ...] = ()
    gradient_moments: tuple[Moment, ...] = ()
    """Moments at which a gradient becomes complete, with that gradient in `bytes`."""
    begun_bytes: Amount = Amount()
    """Live bytes when its forward pass begins."""
    entered_bytes: Amount = Amount()
    """Live bytes when its backward pass begins."""
    reduced_bytes: Amount = Amount()
    """Live bytes after its last gradient, without complete gradients."""


Shapes = tuple[tuple[tuple[int, ...], bool, int], ...]
"""Shapes of trained parameters, whether they are matrices of a block, and their numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Profile of a model and its loss in the recipe's precision."""

    units: tuple[Unit, ...]
    """Units in the order of the forward pass."""
    size: ModelSize
    active_parameters: int | None = None
    """Number of parameters that compute a token; None unless tokens are sent to some experts."""
    tokens_per_sample: float | None = None
    """Mean number of tokens of a sample; None for a task without tokens."""
    buffer_bytes: float = 0.0
    """Bytes of the model's buffers, such as statistics of batch norms."""
    data_bytes: float = 0.0
    """Bytes of the data set's tensors, if they are in the same memory as the model."""
    batch_bytes: Amount = Amount()
    trained_shapes: Shapes = ()
    state_values: float = 0.0
    """Mean number of optimizer state values, of 32 bits like the next two, for each trained
    parameter."""
    update_values: float = 0.0
    """Number of temporary values for each element that is updated at once."""
    update_accesses: float | None = None
    """Number of reads and writes of values for each element in an update, an operator after the
    other; None if it was not counted."""
    updates_together: bool = False
    """True if the optimizer updates all parameters at once, false if one after the other."""
    update_products: Operation = Operation(kind="product", calls=0.0)
    """Products, in bf16, of an update of all parameters."""
    reference_bytes: float = 0.0
    """Bytes of a frozen copy of the model beside it, as DPO needs one."""
    host_prepares_samples: bool = False
    """True if no workers of a loader prepare the samples, but the process that trains."""
    unused: tuple[str, ...] = ()
    """Blocks that the traced step skipped, by a random draw or a condition."""
    limited: tuple[str, ...] = ()
    """Heads of a detector that were traced with as many proposals as they sample at most."""
    native: Profile | None = None
    """Profile with 16-bit parameters, for strategies whose library casts them; None in fp32, or if
    the model does not compute so.  The outer profile is under autocast."""
