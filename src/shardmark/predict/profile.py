"""What one step of a model computes, keeps and moves, whatever the machine.  Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shardmark.core.wire import ModelSize


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """Something that grows linearly with the samples of a pass."""

    fixed: float = 0.0
    per_sample: float = 0.0

    def of(self, samples: float) -> float:
        return self.fixed + self.per_sample * samples


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
    temporary_bytes: Amount = Amount()
    """Most that it holds at once beside them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A model and its loss, in the recipe's precision."""

    units: tuple[Unit, ...]
    """In the order of the forward pass."""
    size: ModelSize
