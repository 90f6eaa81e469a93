"""What one step of a model computes, keeps and moves, whatever the machine.  Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shardmark.core.traffic import ModelSize


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """Something that grows linearly with the samples of a pass."""

    fixed: float = 0.0
    per_sample: float = 0.0
    whole: float = 0.0
    """Share of it that each of the ranks that divide layers has, or computes."""

    def of(self, samples: float, tensor: int = 1) -> float:
        """On one of so many ranks that divide layers."""
        divided = self.whole + (1 - self.whole) / tensor
        return divided * (self.fixed + self.per_sample * samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """Calls of one kind in a pass, added up."""

    kind: Literal["product", "convolution", "other"]
    """The first two have units of their own on a card, which convolutions fill less well."""
    flops: Amount = Amount()
    bytes: Amount = Amount()
    """Read from and written to the device's memory."""
    calls: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """What lives at one operation, beside parameters, buffers and optimizer state."""

    bytes: Amount
    """The batch, activations of all units, temporaries: all but gradients that are complete."""
    gradient_bytes: float = 0.0
    """Of the unit's own parameters, complete by now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Consecutive layers whose parameters are gathered together: a block, or what is between."""

    name: str
    parameters: int
    """Elements."""
    trained_parameters: int
    forward: tuple[Operation, ...]
    backward: tuple[Operation, ...]
    saved_bytes: Amount = Amount()
    """Activations kept from the forward for the backward pass."""
    block: bool = True
    """Whether it is gathered by itself; what is between blocks is gathered for the whole pass."""
    sizes: tuple[int, ...] = ()
    """Elements of each trained parameter."""
    replicated_fraction: float = 0.0
    """Share of its parameters that each of the ranks that divide layers has."""
    gradient_bytes: float = 0.0
    """Of all of them, in the type that they are computed in."""
    forward_moments: tuple[Moment, ...] = ()
    """Among which is the fullest one, whatever the batch."""
    backward_moments: tuple[Moment, ...] = ()
    gradient_moments: tuple[Moment, ...] = ()
    """As each of its gradients is complete, which counts among what lives."""
    begun_bytes: Amount = Amount()
    """What lives as its forward pass begins."""
    entered_bytes: Amount = Amount()
    """The same of its backward pass."""
    reduced_bytes: Amount = Amount()
    """What lives after the last of them, all complete gradients left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A model and its loss, in the recipe's precision."""

    units: tuple[Unit, ...]
    """In the order of the forward pass."""
    size: ModelSize
    buffer_bytes: float = 0.0
    """Of the model's own buffers: statistics of batch norms, masks."""
    data_bytes: float = 0.0
    """Of the data set's tensors, where they are in the memory that the model is in."""
    batch_bytes: Amount = Amount()
    state_values: float = 0.0
    """Of the optimizer, for each trained parameter."""
    update_values: float = 0.0
    """Temporary ones, for each element that is updated at once."""
    updates_together: bool = False
    """All parameters; else one after the other."""
    unused: tuple[str, ...] = ()
    """Blocks that the traced step did not pass: a draw or a condition skipped them."""
    native: Profile | None = None
    """The same computed with parameters in 16 bits, where the recipe's precision and the model
    allow it, for strategies whose library casts them; this one is under autocast."""
