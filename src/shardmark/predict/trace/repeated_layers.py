"""Traces a few of many equal layers: what the others add follows from the difference of two.

A language model of 80 layers would be traced layer by layer, two steps for each precision.  Layers
of equal structure do equal work, and each leaves as many saved bytes behind as the one before.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from torch import nn

if TYPE_CHECKING:
    from shardmark.predict.trace.chains import Total
    from shardmark.predict.trace.unit_trace import UnitTrace


@dataclass(frozen=True, slots=True, kw_only=True)
class Repetition:
    """Layers that were removed from a model, in groups of one or more that follow each other."""

    layers: str
    """Name of the list of layers."""
    start: int
    """Number of layers before the two groups that are compared."""
    period: int
    """Layers of a group: more than one if kinds of attention alternate."""
    removed: int
    """Number of groups."""


def shortened_copy(
    model: nn.Module, blocks: Sequence[nn.Module] | None
) -> tuple[nn.Module, list[Repetition]]:
    """Copy the model without most of the equal layers of its lists.

    The remaining layers get new names.  Parameters of the copy share the memory of the model's, so
    that a large model is copied at once; the model itself does not change.
    """
    members = {id(block) for block in blocks or ()}
    repetitions: list[Repetition] = []
    removed: list[nn.Module] = []
    cuts: dict[str, slice] = {}
    for name, layers in model.named_modules():
        if not isinstance(layers, nn.ModuleList) or not {id(one) for one in layers} <= members:
            continue
        start, period, count = _groups([*map(_structure, layers)])
        if count > 0:
            repetitions.append(Repetition(layers=name, start=start, period=period, removed=count))
            cuts[name] = slice(start + period, start + (1 + count) * period)
            removed += layers[cuts[name]]
    shared = {id(parameter): _alias(parameter) for parameter in model.parameters()}
    copied = copy.deepcopy(model, {**shared, **{id(layer): nn.Identity() for layer in removed}})
    for name, cut in cuts.items():
        del copied.get_submodule(name)[cut]  # type: ignore[operator]
    return copied, repetitions


def _alias(parameter: nn.Parameter) -> nn.Parameter:
    """Return another parameter with the same memory and attributes."""
    alias = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
    vars(alias).update(vars(parameter))
    return alias


def _groups(structures: Sequence[object]) -> tuple[int, int, int]:
    """Return the start of equal groups that reach to the last layer, the layers of a group, and how
    many groups can be removed.

    The first layers may be unlike the others, such as dense ones before those with experts, and
    the first of a kind frees what the others share, such as a mask.  A layer of each kind remains
    before the two groups that are compared, and one behind them.
    """
    count = len(structures)
    kinds = [structures.index(one) for one in structures]
    equal = (
        (start, size, (count - start - 1) // size - 2)
        for start in range(1, count)
        for size in range(1, (count - start - 1) // 3 + 1)
        if kinds[start + size :] == kinds[start:-size] and {*kinds[start:]} <= {*kinds[:start]}
    )
    return max(equal, key=lambda groups: groups[1] * groups[2], default=(0, 1, 0))


def _structure(layer: nn.Module) -> tuple[object, ...]:
    """Return what layers have in common that do equal work."""
    parameters = (
        (name, tuple(parameter.shape), parameter.dtype, parameter.requires_grad)
        for name, parameter in layer.named_parameters()
    )
    kinds = (
        getattr(module, name, None)
        for module in layer.modules()
        for name in ("attention_type", "layer_type", "is_sliding", "sliding_window", "use_rope")
    )
    return type(layer), repr(layer), tuple(parameters), tuple(kinds)


def expand(units: Sequence[UnitTrace], repetition: Repetition) -> list[UnitTrace]:
    """Insert what the removed layers would have measured.

    Raises `ValueError` if the two layers that are compared differ.
    """
    period = repetition.period
    first = [unit.name for unit in units].index(f"{repetition.layers}.{repetition.start}")
    last = first + 2 * period  # a layer, and what follows it
    group, following = units[first:last], units[last : last + 2 * period]
    saved = following[0].begun_bytes.minus(group[0].begun_bytes)
    entered = following[0].entered_bytes.minus(group[0].entered_bytes)
    for one, other in zip(group, following, strict=True):
        if _measured(_moved(one, saved, entered)) != _measured(other):
            raise ValueError(f"{one.name} and {other.name} differ by more than their place")
    # Fewer bytes are alive in the backward pass: casts of weights are freed after the forward pass.
    inserted = [
        replace(
            _moved(unit, saved.times(number), entered.times(number)),
            name=f"{unit.name} and {number * period} layers",
        )
        for number in range(1, repetition.removed + 1)
        for unit in group
    ]
    count = repetition.removed
    later = [_moved(unit, saved.times(count), entered.times(count)) for unit in units[last:]]
    freed = entered.minus(saved).times(count)  # the last unit ends with the pass
    later[-1] = replace(later[-1], saved_bytes=later[-1].saved_bytes.plus(*freed))
    return [*units[:last], *inserted, *later]


def _moved(unit: UnitTrace, forward: Total, backward: Total) -> UnitTrace:
    """Return the unit with more bytes alive at each moment of its forward and backward pass."""
    by_pass = {"forward": forward, "backward": backward, "gradient": backward}
    arrays = {
        name: moments + np.array([*by_pass[name], 0])
        for name, moments in unit.moment_arrays.items()
    }
    entered, reduced = unit.entered_bytes, unit.reduced_bytes
    return replace(
        unit,
        begun_bytes=unit.begun_bytes.plus(*forward),
        # Without an operation or a gradient in the backward pass these stay 0.
        entered_bytes=entered.plus(*backward) if "backward" in arrays else entered,
        reduced_bytes=reduced.plus(*backward) if unit.gradient_bytes else reduced,
        moment_arrays=arrays,
    )


def _measured(unit: UnitTrace) -> tuple[object, ...]:
    """Return all but the unit's name and place."""
    moments = {name: of_pass.tolist() for name, of_pass in unit.moment_arrays.items()}
    live = (unit.begun_bytes, unit.entered_bytes, unit.reduced_bytes, unit.saved_bytes)
    return live, moments, unit.operations, unit.gradient_bytes, unit.replicated_fraction
