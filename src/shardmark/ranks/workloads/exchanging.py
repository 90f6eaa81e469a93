"""Makes layers exchange activations so that attention sees full sequences.  Imports torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from shardmark.ranks.workloads.base import CannotShard

if TYPE_CHECKING:
    from torch import Tensor, nn

    from shardmark.ranks.workloads.base import Exchange

AXES = {"positions": 1, "heads": 2}
"""Axes of a layer's activations, (batch, positions, features); a head's features are adjacent."""


def problem_between(model: nn.Module, layers: Mapping[str, str]) -> CannotShard | None:
    """The reason why `exchanging` cannot be applied to these layers, or None."""
    for pattern, side in layers.items():
        if not any(True for _ in _named(model, {pattern: side})):
            remedy = "name modules as model.named_modules() does"
            return CannotShard(f"its sequence_plan names {pattern}, which the model lacks", remedy)
        if side not in {"after", "before"}:
            reason = f"its sequence_plan has {side!r} for {pattern}"
            return CannotShard(reason, "use after or before")
    return None


def exchanging(model: nn.Module, layers: Mapping[str, str], exchange: Exchange) -> None:
    """Add exchanges after layers marked `after` and before layers marked `before`.

    The modules between them compute full sequences of some of the heads.
    """

    def after(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        return exchange.to_heads(output, **AXES)

    def before(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (exchange.to_positions(inputs[0], **AXES), *inputs[1:])

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
