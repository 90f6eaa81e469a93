"""Blocks of a model: the units of sharding and of activation checkpointing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
LARGE_LEAF_ELEMENTS = 1_000_000
"""Number of elements from which a single layer is a block (VGG's classifier)."""


def blocks(model: nn.Module) -> list[nn.Module]:
    """Return the repeated parts of a model; no block is inside another.

    A block is a child of a plain container that has children and is no plain container itself
    (a residual block, an encoder layer), or a single large layer.
    """
    parts: list[nn.Module] = []

    def visit(module: nn.Module, in_container: bool) -> None:
        is_container = type(module) in CONTAINERS
        children = list(module.children())
        elements = sum(p.numel() for p in module.parameters())
        is_repeated = in_container and not is_container and bool(children)
        is_large_leaf = not children and elements >= LARGE_LEAF_ELEMENTS
        if elements and (is_repeated or is_large_leaf):
            parts.append(module)
            return
        for child in children:
            visit(child, is_container)

    for child in model.children():
        visit(child, in_container=type(model) in CONTAINERS)
    return parts


def checkpoint_blocks(model: nn.Module, user_blocks: Iterable[nn.Module] | None = None) -> None:
    """Keep only each block's input for the backward pass, and recompute the block there.

    `user_blocks` are the workload's blocks; by default, `blocks` finds them.  Batch norm's running
    statistics are updated in the first pass only: torch would otherwise count every batch twice.

    Source: Chen et al., arXiv 1604.06174 (2016).
    """
    for block in blocks(model) if user_blocks is None else user_blocks:
        norms = [m for m in block.modules() if isinstance(m, _BatchNorm)]
        block.forward = partial(
            checkpoint,
            block.forward,
            use_reentrant=False,
            context_fn=partial(_contexts, norms),
        )


def _contexts(
    norms: list[_BatchNorm],
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    return nullcontext(), _frozen_statistics(norms)


@contextmanager
def _frozen_statistics(norms: list[_BatchNorm]) -> Iterator[None]:
    """Set the momentum to zero: a second pass saves the same tensors and changes no statistic."""
    momenta = [norm.momentum for norm in norms]
    counts = [norm.num_batches_tracked for norm in norms]
    before = [None if count is None else count.clone() for count in counts]
    for norm in norms:
        norm.momentum = 0.0
    try:
        yield
    finally:
        for norm, momentum, count, number in zip(norms, momenta, counts, before, strict=True):
            norm.momentum = momentum
            if count is not None and number is not None:
                count.copy_(number)


def sharding_units(
    model: nn.Module, policy: str, user_blocks: Iterable[nn.Module] | None = None
) -> list[nn.Module]:
    """Return the modules that FSDP gathers as units, without the root, which gathers the rest.

    `user_blocks` are the workload's blocks; by default, `blocks` finds them.
    """
    if policy == "blocks":
        return blocks(model) if user_blocks is None else list(user_blocks)
    if policy == "layers":
        leaves = [module for module in model.modules() if not list(module.children())]
        return [leaf for leaf in leaves if list(leaf.parameters())]
    return []
