"""Layers between which sequences are whole, where ranks have parts of them.  Imports torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from shardmark.workloads.base import CannotShard

if TYPE_CHECKING:
    from torch import Tensor, nn

    from shardmark.workloads.base import Exchange

AXES = {"positions": 1, "heads": 2}
"""Of what passes such a layer, (batch, positions, features): those of a head are neighbours."""


def problem_between(model: nn.Module, layers: Mapping[str, str]) -> CannotShard | None:
    """Why `exchanging` cannot take such layers; None where it can."""
    for pattern, side in layers.items():
        if not any(True for _ in _named(model, {pattern: side})):
            remedy = "name modules as model.named_modules() does"
            return CannotShard(f"its sequence_plan names {pattern}, which the model lacks", remedy)
        if side not in {"after", "before"}:
            return CannotShard(
                f"its sequence_plan has {side!r} for {pattern}", "use after or before"
            )
    return None


def exchanging(model: nn.Module, layers: Mapping[str, str], exchange: Exchange) -> None:
    """Exchange what the layers marked `after` give, and what those marked `before` are given.

    What computes between them has whole sequences of some heads.
    """

    def after(_: nn.Module, __: Any, given: Tensor) -> Tensor:
        return exchange.to_heads(given, **AXES)

    def before(_: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (exchange.to_positions(given[0], **AXES), *given[1:])

    for module, side in _named(model, layers):
        if side == "after":
            module.register_forward_hook(after)
        else:
            module.register_forward_pre_hook(before)


def _named(model: nn.Module, layers: Mapping[str, str]) -> Iterator[tuple[nn.Module, str]]:
    for name, module in model.named_modules():
        for pattern, side in layers.items():
            if fnmatchcase(name, pattern):
                yield module, side
