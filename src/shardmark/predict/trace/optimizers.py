"""Measures an optimizer on small tensors: its state, temporaries and accesses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import ceil, prod
from typing import Any

import torch
from torch import Tensor, nn

from shardmark.base.recipe import Optimizer, Weights
from shardmark.predict.profile import Amount, Operation, Profile, Shapes
from shardmark.predict.trace.live_bytes import LiveBytes, tensors_of
from shardmark.predict.trace.tensor_sharding import storage_key
from shardmark.ranks.costs.base import FP32_BYTES
from shardmark.ranks.strategies.blocks import hidden_matrices
from shardmark.ranks.strategies.optimizers import HIDDEN_MATRIX, check_hidden_matrices
from shardmark.ranks.strategies.step import create_optimizer

Blocks = Sequence[nn.Module] | None
ELEMENTS = 2**12
"""Elements of the tensors on which an optimizer is measured.  Optimizers in 8 bits need so many."""


def with_optimizer(
    profile: Profile, spec: Optimizer, device_type: str, weights: Weights = "fp32"
) -> Profile:
    """Return the profile of a model that is trained by another optimizer, or in another type."""
    native = profile.native and with_optimizer(profile.native, spec, device_type, weights)
    update = _update_values(profile.trained_shapes, spec, device_type, weights)
    return replace(profile, **update, native=native)


def trained_shapes(model: nn.Module, blocks: Blocks) -> Shapes:
    """Return the shapes of the model's trained parameters."""
    hidden = {*hidden_matrices(model, blocks)}
    counts = Counter((tuple(p.shape), p in hidden) for p in model.parameters() if p.requires_grad)
    return tuple((*key, count) for key, count in counts.items())


class _Accesses(LiveBytes):  # type: ignore[no-untyped-call]  # torch's
    """Counts the tensors of a number of elements that operations read and write."""

    def __init__(self, elements: int, uncounted: Iterable[Tensor]) -> None:
        super().__init__(uncounted)
        self._elements = elements
        self.count = 0

    def after_operation(self, function: Any, args: Any, kwargs: Any, outputs: Any) -> None:
        if function.is_view:
            return
        named = zip(function._schema.arguments, args, strict=False)
        changed = [value for argument, value in named if argument.is_write]
        for tensors in ((args, kwargs), (changed, outputs)):
            stored = {storage_key(t) for t in tensors_of(tensors) if t.numel() == self._elements}
            self.count += len(stored)


def _update_values(
    shapes: Shapes, spec: Optimizer, device_type: str, weights: Weights
) -> dict[str, Any]:
    """Return the fields of a profile about an update of parameters of these shapes and the type.

    An optimizer is measured on small tensors: its state by the number of axes, since some store
    sums of rows and columns, and the rest on a matrix, as nearly all parameters are.
    """
    dtype = torch.bfloat16 if weights == "bf16" else torch.float32
    sized = [(shape, spec.name == "muon" and hidden, count) for shape, hidden, count in shapes]
    if spec.name == "muon":
        check_hidden_matrices(hidden for _, hidden, _ in sized if hidden)
    total = sum(count * prod(shape) for shape, _, count in sized)
    if not total:
        return {}
    if spec.state_bits == 8:
        in_8_bits = sum(count * bytes_in_8_bits(prod(shape)) for shape, _, count in sized)
        return {
            "state_values": in_8_bits / (FP32_BYTES * total),
            "update_values": 0.0,  # one kernel
            "update_accesses": None,
            "updates_together": False,
            "update_products": _orthogonalised(sized),
        }
    chooses = spec.implementation == "default" and "implementation" in spec.KEYS[spec.name]
    if device_type == "cuda" and chooses:
        spec = spec.model_copy(update={"implementation": "foreach"})  # torch's choice on CUDA
    kinds = {(len(shape), hidden) for shape, hidden, _ in sized}
    stored = {kind: _State(spec, *kind, dtype) for kind in kinds}
    state = sum(
        count * stored[len(shape), hidden].stored_bytes(shape) for shape, hidden, count in sized
    )
    live = accesses = 0.0
    any_together = False
    for hidden in {hidden for _, hidden in kinds}:
        sizes = [(prod(shape), count) for shape, group, count in sized if group == hidden]
        elements = sum(size * count for size, count in sizes)
        temporary, accesses_of_each, together = _measured_update(spec, hidden, dtype)
        live = max(live, temporary * (elements if together else max(sizes)[0]))
        accesses += accesses_of_each * elements
        any_together |= together
    return {
        "state_values": state / (FP32_BYTES * total),
        "update_values": live / (total if any_together else max(prod(s) for s, *_ in sized)),
        "update_accesses": accesses / total,
        "updates_together": any_together,
        "update_products": _orthogonalised(sized),
    }


def _orthogonalised(shapes: Iterable[tuple[tuple[int, ...], bool, int]]) -> Operation:
    """Return the products of the Newton-Schulz iterations of `torch.optim.Muon`."""
    iterations, flops, calls = 5, 0.0, 0
    for shape, hidden, count in shapes:
        if hidden:
            short, long = sorted(shape)
            # X X^T, its square, and the sum of both times X.
            flops += count * iterations * 2 * (2 * short * short * long + short**3)
            calls += count * iterations * 3
    return Operation(kind="product", flops=Amount(fixed=flops), calls=calls)


def bytes_in_8_bits(elements: int) -> int:
    """Bytes of both averages of a parameter in AdamW of 8 bits.

    Source: bitsandbytes, `optim/optimizer.py`: small tensors in fp32; others with a scale in fp32
    for each block of 256 values (2048 in old versions).
    """
    if elements < 4096:
        return 2 * FP32_BYTES * elements
    return 2 * (elements + FP32_BYTES * ceil(elements / 256))


def _stepped(
    spec: Optimizer, shape: tuple[int, ...], hidden: bool, count: int, dtype: torch.dtype
) -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
    """Return parameters and their optimizer after its first step."""
    parameters = [nn.Parameter(torch.ones(shape, dtype=dtype)) for _ in range(count)]
    optimizer = create_optimizer([{"params": parameters, HIDDEN_MATRIX: hidden}], spec)
    for parameter in parameters:
        parameter.grad = torch.ones(shape, dtype=dtype)
    optimizer.step()
    return parameters, optimizer


class _State:
    """State of an optimizer for parameters with so many axes."""

    def __init__(self, spec: Optimizer, axes: int, hidden: bool, dtype: torch.dtype) -> None:
        bits = ELEMENTS.bit_length() - 1
        self._shape = tuple(2 ** (bits // axes + (at < bits % axes)) for at in range(axes))
        stored = tensors_of(dict(_stepped(spec, self._shape, hidden, 1, dtype)[1].state))
        self._tensors = [tensor for tensor in stored if tensor.numel()]

    def stored_bytes(self, shape: tuple[int, ...]) -> float:
        """Bytes for a parameter of this shape, without counters and tables."""
        return sum(
            tensor.nbytes / tensor.numel() * self._elements(tensor, shape)
            for tensor in self._tensors
        )

    def _elements(self, tensor: Tensor, shape: tuple[int, ...]) -> int:
        axes = [*zip(tensor.shape, self._shape, shape, strict=False)]
        if tensor.ndim == len(shape) and all(size in (1, full) for size, full, _ in axes):
            return prod(1 if size == 1 else elements for size, _, elements in axes)
        return prod(shape) if tensor.numel() == ELEMENTS else 0


def _measured_update(
    spec: Optimizer, hidden: bool, dtype: torch.dtype
) -> tuple[float, float, bool]:
    """Measure an optimizer step on small matrices.

    Returns temporary values for each element, reads and writes of each element, both in values of
    32 bits, and whether all parameters are updated together.
    """
    peaks = []
    for count in (1, 2, 3):
        parameters, optimizer = _stepped(spec, (64, ELEMENTS // 64), hidden, count, dtype)
        gradients = [p.grad for p in parameters if p.grad is not None]
        averages = [t for t in tensors_of(dict(optimizer.state)) if t.numel() == ELEMENTS]
        live = _Accesses(ELEMENTS, (*parameters, *gradients, *averages))
        with live:
            optimizer.step()
        peaks.append(live.peak / (FP32_BYTES * ELEMENTS))
    # Not the second peak over the first: a loop over parameters holds a temporary of the last one.
    accesses = live.count / count * dtype.itemsize / FP32_BYTES
    return peaks[0], accesses, peaks[2] > 1.25 * peaks[1]
