"""Parameters that a strategy's library cannot train, recognised before the training."""

from __future__ import annotations

from torch import nn

from shardmark.core.errors import StrategyUnavailable

SHOWN = 3
"""Names in a message."""


def check_parameters(
    strategy: str,
    model: nn.Module,
    *,
    scalars: str | None = None,
    sparse: str | None = None,
    instead: str = "use ddp",
) -> None:
    """Raise `StrategyUnavailable` for scalar parameters, and for those with sparse gradients.

    `scalars` and `sparse` are the libraries that do not take these; None where they are taken.
    """
    if scalars is not None:
        names = [name for name, p in model.named_parameters() if p.dim() == 0]
        if names:
            which = listed(names)
            raise StrategyUnavailable(
                strategy,
                f"{scalars} takes no scalar parameters, which have the shape (), such as {which}",
                f"give {which} the shape (1,), or {instead}",
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
                f"{sparse} takes no sparse gradients, and sparse=True makes those of "
                f"{listed(names)} sparse",
                f"set sparse=False, or {instead}",
            )


def listed(names: list[str]) -> str:
    """The first names, and how many more there are."""
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")
