"""Models as chains of parts, where only their own forward knows how layers are called."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn

from shardmark.workloads.base import CannotShard
from shardmark.workloads.model_building import generators_kept, nonzero_parameters, seeded

TOLERANCE = 1e-5
"""Of the largest output: what rounding may change."""
OTHER_STRATEGY = "use fsdp, or ddp"


@dataclass(frozen=True, slots=True)
class Order:
    """A model's modules with parameters, by when they are called."""

    model: nn.Module
    early: Sequence[nn.Module]
    layers: Sequence[nn.Module]
    late: Sequence[nn.Module]


Call = Callable[[nn.Module], Tensor]
"""What a model, or a chain in its place, gives for the same input each time."""
PartsOf = Callable[[Order], list[nn.Module]]


def checked_parts(
    model: nn.Module, layers: Sequence[nn.Module], call: Call, parts_of: PartsOf
) -> list[nn.Module] | CannotShard:
    """The model's parts, or why it is no chain of them.

    A copy of it is tried: what it calls before its layers, whether it draws random numbers, and
    whether the chain gives the same.
    """
    names = {module: name for name, module in model.named_modules()}
    places = [names[layer] for layer in layers]
    if any(parameter.is_meta for parameter in model.parameters()):
        # Without data it cannot be tried, and is not trained: modules as they are listed will do.
        listed = set(takewhile(lambda name: name != places[0], names.values()))
        return parts_of(_order(model, places, listed))
    try:
        with torch.no_grad(), generators_kept():
            tried = copy.deepcopy(model, dict(nonzero_parameters(model)))
            early, first = _called_before(tried, places, call)
            with seeded(1):
                draws = not torch.equal(first, call(tried))
            chain = _Chain(parts_of(_order(tried, places, early)))
            with seeded(0):
                differs = (call(chain) - first).abs().max() > TOLERANCE * first.abs().max()
    except Exception as error:  # whatever a model raises that is not called as it expects
        return CannotShard(f"its layers are not a chain: {error}", OTHER_STRATEGY)
    if draws:
        config: Any = getattr(model, "config", None)
        options = {} if config is None else config.to_dict()
        keys = [key for key, value in options.items() if "drop" in key and value]
        found = "it would draw random numbers in another order than one device"
        return CannotShard(found, f"set {', '.join(keys) or 'dropout'} to 0 in its model_options")
    if differs:
        return CannotShard("its layers are not a chain: they pass on more", OTHER_STRATEGY)
    return parts_of(_order(model, places, early))


def _called_before(model: nn.Module, places: Sequence[str], call: Call) -> tuple[set[str], Tensor]:
    """Modules that end before the first layer begins, and what the call gives."""
    ended: set[str] = set()
    early: list[set[str]] = []
    handles = [
        module.register_forward_hook(lambda *_, name=name: ended.add(name))
        for name, module in model.named_modules()
    ]
    first = model.get_submodule(places[0])
    handles.append(first.register_forward_pre_hook(lambda *_: early.append(set(ended))))
    with seeded(0):
        given = call(model)
    for handle in handles:
        handle.remove()
    return early[0], given


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
    """Leaves a model's forward."""

    def __init__(self, hidden: Any) -> None:
        super().__init__()
        self.hidden = hidden


class _Given(nn.Module):
    """In the place of modules that another part computes."""

    hidden: Tensor | None = None

    def forward(self, *_: Any, **__: Any) -> Tensor | None:
        return self.hidden


class _Stop(nn.Module):
    """In the place of the last layer that a part computes, or of the first that it does not."""

    def __init__(self, layer: nn.Module | None, given: _Given) -> None:
        super().__init__()
        self.layer, self.given = layer, given

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> None:
        if self.layer is None:
            raise _Reached(hidden_states)
        raise _Reached(self.layer(self.given.hidden, *args, **kwargs))


class Part(nn.Module):
    """Some modules of a model, called by its own forward, in which all others are left out.

    What a layer is called with besides the hidden state is so found out anew.
    """

    def __init__(
        self, order: Order, own: Sequence[nn.Module], stop: nn.Module | None = None
    ) -> None:
        super().__init__()
        self._given = _Given()
        others: dict[nn.Module, nn.Module] = {
            module: self._given
            for module in (*order.early, *order.layers, *order.late)
            if module not in own
        }
        if stop is not None:
            others[stop] = _Stop(stop if stop in own else None, self._given)
        self.model = _with(others, order.model, begins=own is order.early)

    def computed(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        """What the model gives for these arguments, or the layer at which the part stops."""
        self._given.hidden = hidden
        try:
            return self.model(*args, **kwargs)
        except _Reached as reached:
            return reached.hidden
        finally:
            self._given.hidden = None


def _with(others: Mapping[nn.Module, nn.Module], module: nn.Module, *, begins: bool) -> nn.Module:
    """The module with others in the places of some; what is around them is copied.

    Parameters of its own are the same ones where the part begins the model, and missing elsewhere.
    """
    if module in others:
        return others[module]
    children = {
        name: None if child is None else _with(others, child, begins=begins)
        for name, child in module._modules.items()
    }
    if children == module._modules:
        return module
    made = copy.copy(module)
    made._modules = children
    if not begins:
        made._parameters = {}
    return made


class _Chain(nn.Module):
    """In the place of the model."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        first, *others = self.parts
        value = first(*args, **kwargs)
        for part in others:
            value = part(*value) if isinstance(value, tuple) else part(value)
        return value
