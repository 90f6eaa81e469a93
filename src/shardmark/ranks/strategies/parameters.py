"""Refusals, before training, of parameters that a strategy's library cannot train."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from shardmark.base.errors import StrategyUnavailable
from shardmark.ranks.strategies.base import ParameterKind, first_names


@dataclass(frozen=True, slots=True)
class UnsupportedKind:
    """A kind of parameters that some libraries do not support."""

    find: Callable[[nn.Module], list[str]]
    """Returns the names of the model's parameters, or modules, of the kind."""
    reason: str
    remedy: str


def _names_where(applies: Callable[[nn.Parameter], bool]) -> Callable[[nn.Module], list[str]]:
    return lambda model: [name for name, p in model.named_parameters() if applies(p)]


def _sparse(model: nn.Module) -> list[str]:
    tables = (nn.Embedding, nn.EmbeddingBag)
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, tables) and module.sparse and module.weight.requires_grad
    ]


def _has_hooks(parameter: nn.Parameter) -> bool:
    hooks = ("_backward_hooks", "_post_accumulate_grad_hooks")
    return any(getattr(parameter, name, None) for name in hooks)


def _not_float32(model: nn.Module) -> list[str]:
    trained = ((name, p) for name, p in model.named_parameters() if p.requires_grad)
    return [f"{name} ({_type(p)})" for name, p in trained if p.dtype is not torch.float32]


def _mixed(model: nn.Module) -> list[str]:
    trained = {_type(p) for p in model.parameters() if p.requires_grad}
    return _not_float32(model) if len(trained) > 1 else []


def _mixed_with_frozen(model: nn.Module) -> list[str]:
    named = [*model.named_parameters()]
    if len({p.dtype for _, p in named}) < 2:
        return []
    return [f"{name} ({_type(p)})" for name, p in named if p.dtype is not torch.float32]


def _type(parameter: nn.Parameter) -> str:
    return str(parameter.dtype).removeprefix("torch.")


KINDS: dict[ParameterKind, UnsupportedKind] = {
    "scalar": UnsupportedKind(
        _names_where(lambda parameter: parameter.dim() == 0),
        "{library} takes no scalar parameters, which have the shape (), such as {names}",
        "give {names} the shape (1,)",
    ),
    "sparse": UnsupportedKind(
        _sparse,
        "{library} takes no sparse gradients, and sparse=True makes those of {names} sparse",
        "set sparse=False",
    ),
    "empty": UnsupportedKind(
        _names_where(lambda parameter: parameter.numel() == 0),
        "{library} takes no parameters without elements, such as {names}",
        "remove {names}",
    ),
    "mixed types": UnsupportedKind(
        _mixed,
        "{library} takes trained parameters of one type, and beside float32 there are {names}",
        "train parameters of one type",
    ),
    "mixed types, frozen": UnsupportedKind(
        _mixed_with_frozen,
        "{library} takes parameters of one type, frozen ones too, and beside float32 there are "
        "{names}",
        "load the frozen parameters in float32",
    ),
    "hooks": UnsupportedKind(
        _names_where(_has_hooks),
        "{library} trains other tensors in place of parameters, and drops the hooks on the"
        " gradients of {names}",
        "change the gradient inside of the forward pass",
    ),
    "strides": UnsupportedKind(
        _names_where(lambda parameter: not parameter.is_contiguous()),
        "{library} takes parameters that are contiguous in memory, and not {names}, as they are"
        " with channels_last",
        "leave out .to(memory_format=...) in model() and set recipe.channels_last: true",
    ),
    "other types": UnsupportedKind(
        _not_float32,
        "{library} trains float32 parameters here, and not {names}",
        "train parameters in float32",
    ),
}


def check_parameters(
    strategy: str, model: nn.Module, library: str, *kinds: ParameterKind, instead: str = "use ddp"
) -> None:
    """Raise `StrategyUnavailable` for parameters of a kind that the library does not support."""
    for kind in kinds:
        unsupported = KINDS[kind]
        if names := unsupported.find(model):
            words = {"library": library, "names": first_names(names)}
            remedy = f"{unsupported.remedy.format(**words)}, or {instead}"
            raise StrategyUnavailable(strategy, unsupported.reason.format(**words), remedy)
