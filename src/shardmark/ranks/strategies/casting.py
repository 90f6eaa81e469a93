"""Casts for computation with 16-bit parameters that libraries leave to the model."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.utils._pytree as pytree  # torch has no public one
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from shardmark.base.errors import StrategyUnavailable

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

ABOUT_TYPES = re.compile(r"dtype|scalar type|to have type|not implemented for|BFloat16|Half")
"""Words in the errors of torch's operators about tensors of unsupported types."""


def lossless_copy(tensor: Tensor) -> Tensor:
    """Return a dense copy on the CPU with the same values: 16-bit floats become fp32.

    Other types, such as float64, complex and integers, are not converted.
    """
    dense = tensor.detach()
    dense = dense.to_dense() if dense.is_sparse else dense
    if dense.is_floating_point() and dense.element_size() < 4:
        dense = dense.float()
    return dense.to("cpu", copy=True)


def cast_floats(values: Any, dtype: torch.dtype) -> Any:
    """Return the same structure with its floating-point tensors cast to the type."""

    def cast(value: Any) -> Any:
        floating = isinstance(value, Tensor) and value.is_floating_point()
        return value.to(dtype) if floating else value

    return pytree.tree_map(cast, values)


def cast_inputs(module: nn.Module, dtype: torch.dtype) -> RemovableHandle:
    """Cast the floating-point inputs of the module to the type."""

    def before_forward(_: nn.Module, *inputs: Any) -> Any:
        return cast_floats(inputs, dtype)

    return module.register_forward_pre_hook(before_forward, with_kwargs=True)


def widen_outputs(module: nn.Module) -> RemovableHandle:
    """Cast the outputs of the module to fp32, in which every loss is summed."""
    return module.register_forward_hook(lambda _, __, returned: cast_floats(returned, torch.float))


def narrow_weights(model: nn.Module) -> None:
    """Cast every parameter of 32 bits to bf16, in place; types of fewer bits stay."""
    for parameter in model.parameters():
        if parameter.dtype is torch.float32:
            parameter.data = parameter.data.to(torch.bfloat16)


def compute_in_bf16(model: nn.Module) -> None:
    """Have a model of bf16 weights take inputs and return outputs in fp32, with fp32 buffers."""
    cast_inputs(model, torch.bfloat16)
    allow_mixed_dtype_batch_norm(model)
    widen_outputs(model)


def allow_mixed_dtype_batch_norm(model: nn.Module) -> None:
    """Let batch norms with 16-bit weights compute with fp32 statistics, which torch refuses.

    They compute with fp32 copies of the weights, as torch's kernels do for supported types.
    """
    for norm in model.modules():
        if isinstance(norm, _BatchNorm):
            wide = partial(_with_wide_weights, norm, norm.forward)
            norm.forward = wide  # type: ignore[method-assign]  # as activation checkpointing does


def _with_wide_weights(
    norm: nn.Module, forward: Callable[[Tensor], Tensor], features: Tensor
) -> Tensor:
    weights = {name: getattr(norm, name) for name in ("weight", "bias")}
    wide = {name: tensor.float() for name, tensor in weights.items() if tensor is not None}
    # Attributes of a module take precedence over its parameters.
    vars(norm).update(wide)
    try:
        return forward(features)
    finally:
        for name in wide:
            del vars(norm)[name]


@contextmanager
def cast_parameters(
    model: nn.Module, units: Iterable[nn.Module], dtype: torch.dtype
) -> Iterator[None]:
    """Compute with copies of the parameters in the type, and cast the units' inputs.

    Gradients also have the type, so they must be removed before the context ends.
    """
    fp32 = [(parameter, parameter.data) for parameter in model.parameters()]
    hooks = [*(cast_inputs(unit, dtype) for unit in (*units, model)), widen_outputs(model)]
    for parameter, values in fp32:
        parameter.data = values.to(dtype)
    try:
        yield
    finally:
        for parameter, values in fp32:
            parameter.data = values
        for hook in hooks:
            hook.remove()


@contextmanager
def refuse_unsupported_types(subject: str, precision: str, remedy: str) -> Iterator[None]:
    """Raise `StrategyUnavailable` if the model cannot compute with 16-bit parameters."""
    try:
        yield
    except (RuntimeError, TypeError) as error:
        if not ABOUT_TYPES.search(str(error)):
            raise
        raise StrategyUnavailable(
            subject,
            f"this model does not compute with {precision} parameters here ({error})",
            remedy,
        ) from error
