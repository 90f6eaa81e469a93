"""Blocks of a model: the units of sharding and of activation checkpointing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

aten = torch.ops.aten
ATTENTION = {
    aten._scaled_dot_product_efficient_attention,
    aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_for_cpu,
    aten._scaled_dot_product_cudnn_attention,
}
PRODUCTS = {aten.mm, aten.addmm, aten.convolution}
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


def hidden_matrices(
    model: nn.Module, user_blocks: Iterable[nn.Module] | None = None
) -> list[nn.Parameter]:
    """Return the trained matrices in the repeated parts of a model, without embeddings.

    A block that is a single layer may be an embedding or an output layer, and does not count.
    """
    parts = blocks(model) if user_blocks is None else user_blocks
    matrices = {
        parameter: None
        for block in parts
        if any(block.children())
        for module in block.modules()
        if not isinstance(module, nn.Embedding)
        for parameter in module.parameters(recurse=False)
        if parameter.requires_grad and parameter.ndim == 2
    }
    return [*matrices]


Checkpointing = bool | str | int
"""Values of `recipe.activation_checkpointing`."""


def checkpointed_blocks(
    parts: Sequence[nn.Module], checkpointing: Checkpointing
) -> Sequence[nn.Module]:
    """Return the blocks that are computed again: all, or every n-th one, as torchtitan counts."""
    if not checkpointing:
        return []
    period = 1 if isinstance(checkpointing, bool | str) else checkpointing
    return parts[period - 1 :: period]


def checkpoint_blocks(
    model: nn.Module, checkpointing: Checkpointing, user_blocks: Iterable[nn.Module] | None = None
) -> None:
    """Keep only each block's input for the backward pass, and recompute the block there.

    `user_blocks` are the workload's blocks; by default, `blocks` finds them.  Batch norm's running
    statistics are updated in the first pass only: torch would otherwise count every batch twice.

    Source: Chen et al., arXiv 1604.06174 (2016).
    """
    parts = blocks(model) if user_blocks is None else [*user_blocks]
    for block in checkpointed_blocks(parts, checkpointing):
        norms = [m for m in block.modules() if isinstance(m, _BatchNorm)]
        block.forward = partial(
            checkpoint,
            block.forward,
            use_reentrant=False,
            context_fn=partial(_contexts, norms, checkpointing == "selective"),
        )


def _contexts(
    norms: list[_BatchNorm], selective: bool
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return the contexts of the first pass and of the second one."""
    if not selective:
        return nullcontext(), _frozen_statistics(norms)
    first, second = create_selective_checkpoint_contexts(_SavedProducts())  # type: ignore[no-untyped-call]
    return first, _both(_frozen_statistics(norms), second)


@contextmanager
def _both(one: AbstractContextManager[Any], other: AbstractContextManager[Any]) -> Iterator[None]:
    with one, other:
        yield


class _SavedProducts:
    """Saves results of attention and of every second product.

    Source: the default of torchtitan, `distributed/activation_checkpoint.py`.
    """

    def __init__(self) -> None:
        self._products = {False: 0, True: 0}
        """Number of products so far, in the first pass and while it is repeated."""

    def __call__(self, context: Any, operation: Any, *_: object, **__: object) -> CheckpointPolicy:
        packet = operation.overloadpacket
        saved = packet in ATTENTION
        if packet in PRODUCTS:
            self._products[context.is_recompute] += 1
            saved = self._products[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


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
