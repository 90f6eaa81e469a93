"""Cuts a model into pipeline parts when only its own forward knows how its layers are called."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn

from shardmark.ranks.workloads.base import CannotShard
from shardmark.ranks.workloads.model_building import (
    nonzero_parameters,
    preserved_generators,
    seeded,
)

TOLERANCE = 1e-5
"""Largest deviation that rounding may cause, relative to the largest output."""
OTHER_STRATEGY = "use fsdp, or ddp"


@dataclass(frozen=True, slots=True)
class Order:
    """Modules of a model that have parameters: before, in and after its repeated layers."""

    model: nn.Module
    early: Sequence[nn.Module]
    layers: Sequence[nn.Module]
    late: Sequence[nn.Module]


Call = Callable[[nn.Module], Tensor]
"""Function that calls a model, or a chain of parts, on a fixed input and returns its output."""
PartsOf = Callable[[Order], list[nn.Module]]


def checked_parts(
    model: nn.Module, layers: Sequence[nn.Module], call: Call, parts_of: PartsOf
) -> list[nn.Module] | CannotShard:
    """Cut the model into parts, or return the reason why that is impossible.

    A copy of the model is run to find the modules that it calls before its layers, whether it
    draws random numbers, and whether the chain of parts returns the same output.
    """
    names = {module: name for name, module in model.named_modules()}
    places = [names[layer] for layer in layers]
    if any(parameter.is_meta for parameter in model.parameters()):
        # A model without data cannot be run and is not trained: the order of definition will do.
        listed = set(takewhile(lambda name: name != places[0], names.values()))
        return parts_of(_order(model, places, listed))
    try:
        with torch.no_grad(), preserved_generators():
            copied = copy.deepcopy(model, dict(nonzero_parameters(model)))
            early, first = _called_before(copied, places, call)
            with seeded(1):
                draws = not torch.equal(first, call(copied))
            chain = _Chain(parts_of(_order(copied, places, early)))
            with seeded(0):
                differs = (call(chain) - first).abs().max() > TOLERANCE * first.abs().max()
    except Exception as error:  # any error of a model that is called in an unexpected way
        return CannotShard(
            f"its layers cannot be called one after another: {error}", OTHER_STRATEGY
        )
    if draws:
        config: Any = getattr(model, "config", None)
        options = {} if config is None else config.to_dict()
        keys = [key for key, value in options.items() if "drop" in key and value]
        reason = "its random numbers would come in another order than on one device"
        return CannotShard(reason, f"set {', '.join(keys) or 'dropout'} to 0 in its model_options")
    if differs:
        reason = "its layers pass on more than one tensor, so it cannot be cut into stages"
        return CannotShard(reason, OTHER_STRATEGY)
    return parts_of(_order(model, places, early))


def _called_before(model: nn.Module, places: Sequence[str], call: Call) -> tuple[set[str], Tensor]:
    """Names of the modules that return before the first layer is called, and the output."""
    ended: set[str] = set()
    early: list[set[str]] = []
    handles = [
        module.register_forward_hook(lambda *_, name=name: ended.add(name))
        for name, module in model.named_modules()
    ]
    first = model.get_submodule(places[0])
    handles.append(first.register_forward_pre_hook(lambda *_: early.append(set(ended))))
    with seeded(0):
        output = call(model)
    for handle in handles:
        handle.remove()
    return early[0], output


def _order(model: nn.Module, places: Sequence[str], early: set[str]) -> Order:
    layers = [model.get_submodule(place) for place in places]
    inside = {module for layer in layers for module in layer.modules()}
    others = {
        name: module
        for name, module in model.named_modules()
        if any(True for _ in module.parameters(recurse=False))
        and inside.isdisjoint(module.modules())
    }
    return Order(
        model,
        [module for name, module in others.items() if name in early],
        layers,
        [module for name, module in others.items() if name not in early],
    )


class _Reached(Exception):  # noqa: N818  (no error)
    """Raised to leave a model's forward with the hidden state of a part."""

    def __init__(self, hidden: Any) -> None:
        super().__init__()
        self.hidden = hidden


class _Placeholder(nn.Module):
    """Replaces modules that another part computes; returns the hidden state of the call."""

    hidden: Tensor | None = None

    def forward(self, *_: Any, **__: Any) -> Tensor | None:
        return self.hidden


class _Stop(nn.Module):
    """Ends a part: computes its last layer, or none where the next part computes the layer."""

    def __init__(self, layer: nn.Module | None, placeholder: _Placeholder) -> None:
        super().__init__()
        self.layer, self.placeholder = layer, placeholder

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> None:
        if self.layer is None:
            raise _Reached(hidden_states)
        raise _Reached(self.layer(self.placeholder.hidden, *args, **kwargs))


class Part(nn.Module):
    """Some modules of a model, called by the model's own forward with all others replaced.

    The forward computes the other arguments of a layer, such as masks, again in each part.
    """

    def __init__(
        self, order: Order, modules: Sequence[nn.Module], stop: nn.Module | None = None
    ) -> None:
        super().__init__()
        self._placeholder = _Placeholder()
        replacements: dict[nn.Module, nn.Module] = {
            module: self._placeholder
            for module in (*order.early, *order.layers, *order.late)
            if module not in modules
        }
        if stop is not None:
            replacements[stop] = _Stop(stop if stop in modules else None, self._placeholder)
        self.model = _replaced(order.model, replacements, begins=modules is order.early)

    def computed(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Output of the model for these arguments, or of the layer at which the part stops."""
        self._placeholder.hidden = hidden
        try:
            return self.model(*args, **kwargs)
        except _Reached as reached:
            return reached.hidden
        finally:
            self._placeholder.hidden = None


def _replaced(
    module: nn.Module, replacements: Mapping[nn.Module, nn.Module], *, begins: bool
) -> nn.Module:
    """Copy the module with some of its submodules replaced.

    A copied module shares its own parameters if the part begins the model; else it has none.
    """
    if module in replacements:
        return replacements[module]
    children = {
        name: None if child is None else _replaced(child, replacements, begins=begins)
        for name, child in module._modules.items()
    }
    if children == module._modules:
        return module
    copied = copy.copy(module)
    copied._modules = children
    if not begins:
        copied._parameters = {}
    return copied


class _Chain(nn.Module):
    """Calls the parts one after another, like the model."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        first, *others = self.parts
        value = first(*args, **kwargs)
        for part in others:
            value = part(*value) if isinstance(value, tuple) else part(value)
        return value
