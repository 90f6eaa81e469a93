"""Traces a few of many equal layers: what the others add follows from the difference of two.

A language model of 80 layers would be traced layer by layer, two steps for each precision.  Layers
of equal structure do equal work, and each leaves as many saved bytes behind as the one before.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from shardmark.predict.chains import Total
    from shardmark.predict.unit_trace import UnitTrace

TRACED = 4
"""Layers that are traced: the first, two that are compared, and the last."""


class UnequalLayers(Exception):  # noqa: N818  (the full model is traced instead)
    """Two of the traced layers differ by more than their place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Repetition:
    """Layers that were removed from a model."""

    after: str
    """Name of the layer before them, the second of the model."""
    names: tuple[str, ...]
    """Names that the other layers get, which remaining layers do not have."""


def shorten(model: nn.Module, blocks: Sequence[nn.Module] | None) -> list[Repetition]:
    """Remove most of the equal layers of the model's lists in place.

    The remaining layers get new names.
    """
    members = {id(block) for block in blocks or ()}
    repetitions = []
    for name, layers in [*model.named_modules()]:
        if not isinstance(layers, nn.ModuleList) or len(layers) <= TRACED:
            continue
        if not {id(layer) for layer in layers} <= members or len({*map(_structure, layers)}) > 1:
            continue
        count = len(layers) - TRACED
        del layers[2 : 2 + count]
        names = tuple(f"{name}.{TRACED + number}" for number in range(count))
        repetitions.append(Repetition(after=f"{name}.1", names=names))
    return repetitions


def _structure(layer: nn.Module) -> tuple[object, ...]:
    """Return what layers have in common that do equal work."""
    parameters = (
        (name, tuple(parameter.shape), parameter.dtype, parameter.requires_grad)
        for name, parameter in layer.named_parameters()
    )
    kinds = tuple(getattr(layer, name, None) for name in ("attention_type", "layer_type"))
    return type(layer), repr(layer), tuple(parameters), kinds


def expand(units: Sequence[UnitTrace], repetition: Repetition) -> list[UnitTrace]:
    """Insert what the removed layers would have measured.

    Raises `UnequalLayers` if the two layers that are compared differ.
    """
    at = next(i for i, unit in enumerate(units) if unit.name == repetition.after)
    pair, following = units[at : at + 2], units[at + 2 : at + 4]
    saved = following[0].begun_bytes.minus(pair[0].begun_bytes)
    entered = following[0].entered_bytes.minus(pair[0].entered_bytes)
    for one, other in zip(pair, following, strict=True):
        if _measured(_moved(one, saved, entered)) != _measured(other):
            raise UnequalLayers(f"{one.name} and {other.name}")
    # Fewer bytes are alive in the backward pass: casts of weights are freed after the forward pass.
    inserted = []
    for number, name in enumerate(repetition.names, start=1):
        more = saved.times(number), entered.times(number)
        inserted += [
            replace(_moved(pair[0], *more), name=name),
            replace(_moved(pair[1], *more), name=f"after {name}"),
        ]
    count = len(repetition.names)
    later = [_moved(unit, saved.times(count), entered.times(count)) for unit in units[at + 2 :]]
    freed = entered.minus(saved).times(count)  # in the last unit, which ends with the pass
    later[-1] = replace(later[-1], saved_bytes=later[-1].saved_bytes.plus(*freed))
    return [*units[: at + 2], *inserted, *later]


def _moved(unit: UnitTrace, forward: Total, backward: Total) -> UnitTrace:
    """Return the unit with more bytes alive at each moment of its forward and backward pass."""
    by_pass = {"forward": forward, "backward": backward, "gradient": backward}
    moments = {
        name: [(live.plus(*by_pass[name]), gradients) for live, gradients in of_pass]
        for name, of_pass in unit.moments.items()
    }
    entered, reduced = unit.entered_bytes, unit.reduced_bytes
    return replace(
        unit,
        begun_bytes=unit.begun_bytes.plus(*forward),
        # Without an operation or a gradient in the backward pass these stay 0.
        entered_bytes=entered.plus(*backward) if unit.moments.get("backward") else entered,
        reduced_bytes=reduced.plus(*backward) if unit.gradient_bytes else reduced,
        moments=defaultdict(list, moments),
    )


def _measured(unit: UnitTrace) -> tuple[object, ...]:
    """Return all but the unit's name and place, without moments of a pass that has none."""
    moments = {name: of_pass for name, of_pass in unit.moments.items() if of_pass}
    live = (unit.begun_bytes, unit.entered_bytes, unit.reduced_bytes, unit.saved_bytes)
    return live, moments, unit.operations, unit.gradient_bytes, unit.replicated_fraction
