"""Kind, arithmetic and hidden memory of one traced operation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, shape_wrapper

from shardmark.predict.profile import Kind
from shardmark.predict.trace.live_bytes import tensors_of
from shardmark.predict.trace.tensor_sharding import storage_key
from shardmark.ranks.workloads.flops import UNKNOWN_TO_TORCH

aten = torch.ops.aten
WINDOW: ContextVar[int | None] = ContextVar("window", default=None)
"""Number of keys that each query of the attention that runs now sees; None for all."""
FLOPS: Mapping[Any, Callable[..., int]] = {
    **flop_registry,
    **{operator: shape_wrapper(formula) for operator, formula in UNKNOWN_TO_TORCH.items()},  # type: ignore[no-untyped-call]
}
CONVOLUTIONS = {aten.convolution: 1, aten.convolution_backward: 2}
"""Position of the weight among the arguments, behind the input."""
AFTER_WEIGHT = (2, 4, 7)
"""Positions of strides, dilations and groups behind the weight."""


def computes_nothing(function: Any, read: Sequence[Tensor], written: Sequence[Tensor]) -> bool:
    """True for a view, and for an operator that returns its inputs, such as `_unsafe_view`."""
    if function.is_view:
        return True
    inputs = {storage_key(tensor) for tensor in read}
    return not function._schema.is_mutable and all(storage_key(t) in inputs for t in written)


def workspace_bytes(packet: Any, args: Any, device_type: str) -> int:
    """Bytes that the kernel allocates internally, which torch does not see."""
    if device_type == "cpu" and packet in CONVOLUTIONS:
        weight: Tensor = args[CONVOLUTIONS[packet]]
        return weight.nbytes  # a copy in oneDNN's format
    return 0


def kind_of(packet: Any, args: Any) -> Kind:
    if packet in CONVOLUTIONS:
        at = CONVOLUTIONS[packet]
        strides, dilations, groups = (args[at + after] for after in AFTER_WEIGHT)
        if groups == args[at - 1].shape[1] > 1:
            return "depthwise"
        if groups > 1:
            return "grouped"
        is_small = (*args[at].shape[2:], *strides, *dilations) == (3, 3, 1, 1, 1, 1)
        return "convolution_3x3" if is_small else "convolution"
    if packet in FLOPS:
        return "attention" if "attention" in str(packet) else "product"
    return "other"


def flops_of(
    function: Any, args: Any, kwargs: Any, outputs: Any, *, window: int | None = None
) -> int:
    """FLOPs of an operation; attention computes a `window` of keys for each query."""
    packet = function.overloadpacket
    if packet not in FLOPS:
        return sum(tensor.numel() for tensor in tensors_of(outputs))
    flops = FLOPS[packet](*args, **kwargs, out_val=outputs)
    names = [argument.name for argument in function._schema.arguments]
    causal = False
    if "is_causal" in names:
        at = names.index("is_causal")
        causal = args[at] if at < len(args) else kwargs.get("is_causal", False)
    if not (causal or window):
        return flops
    # Kernels skip what the mask hides.
    length: int = args[0].shape[-2]
    reach = min(window or length, length)
    pairs = reach * length - reach**2 / 2 if causal else (2 * reach + 1) * length - reach**2
    return round(flops * min(1.0, pairs / length**2))
