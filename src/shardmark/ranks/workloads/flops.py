"""Counts a model's floating-point operations from its operators, without computing anything."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode


def convolution_backward_flops(
    grad_output: Sequence[int],
    inputs: Sequence[int],
    weight: Sequence[int],
    *rest: object,
    **_: object,
) -> int:
    """Operations of a convolution's backward pass: those of forward for each requested gradient.

    torch's own formula multiplies the gradient of the weight by the number of groups, which counts
    a depthwise convolution up to a thousand times too high.
    """
    transposed, output_mask = rest[4], rest[7]
    assert isinstance(output_mask, Sequence)
    batch, _channels, *places = inputs if transposed else grad_output
    forward = 2 * batch * prod(places) * prod(weight)  # weight: (out, in / groups, *kernel)
    return forward * sum(map(bool, output_mask[:2]))


def grouped_product_flops(
    first: Sequence[int], second: Sequence[int], *_: object, **__: object
) -> int:
    """Operations of a product of groups of rows, such as tokens, each with its own matrix.

    One of the two has a matrix for each group, or the result has one.
    """
    rows = first[1:] if len(first) > len(second) else first
    return 2 * prod(rows) * second[-1]


UNKNOWN_TO_TORCH: Mapping[Any, Callable[..., int]] = {
    torch.ops.aten.convolution_backward: convolution_backward_flops,
    torch.ops.aten._grouped_mm: grouped_product_flops,
}
"""Formulas that torch lacks, or has for other cases only, by operator."""


class _OnMeta(nn.Module):
    """Holds a model while its parameters are replaced, until backward passes have recomputed."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, loss: Callable[[], Tensor]) -> int | None:
        return counted_flops(self.model, loss)


def flops_on_meta(model: nn.Module, loss: Callable[[], Tensor]) -> int | None:
    """Count operations like `counted_flops`, with the model's tensors on the meta device."""
    holder = _OnMeta(model)
    stand_ins = {
        name: torch.empty_like(tensor, device="meta").requires_grad_(tensor.requires_grad)
        for name, tensor in (*holder.named_parameters(), *holder.named_buffers())
    }
    counted: int | None = functional_call(holder, stand_ins, (loss,))
    return counted


def counted_flops(model: nn.Module, loss: Callable[[], Tensor]) -> int | None:
    """Count the operations of `loss` and its backward pass in training mode; None if it fails.

    Recomputation by activation checkpointing is included.
    """
    modes = {module: module.training for module in model.modules()}
    counter = FlopCounterMode(display=False, custom_mapping=dict(UNKNOWN_TO_TORCH))
    try:
        model.train()
        with torch.enable_grad(), counter:
            loss().backward()  # type: ignore[no-untyped-call]
    except Exception:
        return None  # the model reads values, or uses an operator without a meta version
    finally:
        for module, training in modes.items():
            module.training = training
    return counter.get_total_flops()
