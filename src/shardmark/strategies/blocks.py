"""Which parts of a model are blocks: units of sharding and of activation checkpointing."""

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
"""A single layer with so many parameter elements is a block of its own (VGG's classifier)."""


def blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated parts of a model, outermost first found, none inside another.

    A block is a child of a plain container that is no plain container itself and has children
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


def checkpoint_blocks(model: nn.Module, own: Iterable[nn.Module] | None = None) -> None:
    """Keep only each block's input for the backward pass and compute the rest again there.

    `own` are the workload's blocks; without, what looks like blocks.

    Source: Chen et al., arXiv 1604.06174 (2016).  Batch norm's running statistics are updated
    in the first pass alone: torch would otherwise count every batch twice.
    """
    for block in blocks(model) if own is None else own:
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
    """With a momentum of zero the second pass saves the same tensors and changes no statistic."""
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


def wrapped(
    model: nn.Module, policy: str, own: Iterable[nn.Module] | None = None
) -> list[nn.Module]:
    """The parts that FSDP shards together; the root, which takes the rest, is not among them.

    `own` are the workload's blocks; without, what looks like blocks.
    """
    if policy == "blocks":
        return blocks(model) if own is None else list(own)
    if policy == "layers":
        leaves = [module for module in model.modules() if not list(module.children())]
        return [leaf for leaf in leaves if list(leaf.parameters())]
    return []
