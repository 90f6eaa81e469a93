"""Parameters that a strategy's library cannot train, recognised before the training."""

from __future__ import annotations

from torch import nn

from shardmark.core.errors import StrategyUnavailable

SHOWN = 3
"""Names in a message."""


def check_parameters(
    strategy: str, model: nn.Module, *, scalars: str | None = None, sparse: str | None = None
) -> None:
    """Raise `StrategyUnavailable` for parameters of no axes, and for sparse gradients.

    `scalars` and `sparse` are the libraries that do not take these; None where they are taken.
    """
    if scalars is not None:
        names = [name for name, p in model.named_parameters() if p.dim() == 0]
        if names:
            which = listed(names)
            raise StrategyUnavailable(
                strategy,
                f"{scalars} takes no parameters without axes, such as {which}",
                f"give {which} the shape (1,), or use ddp",
            )
    if sparse is not None:
        names = [
            name
            for name, module in model.named_modules()
            if isinstance(module, nn.Embedding | nn.EmbeddingBag)
            and module.sparse
            and module.weight.requires_grad
        ]
        if names:
            raise StrategyUnavailable(
                strategy,
                f"{sparse} takes no sparse gradients, and {listed(names)} has sparse=True",
                "set sparse=False, or use ddp",
            )


def listed(names: list[str]) -> str:
    """The first names, and how many more there are."""
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")
