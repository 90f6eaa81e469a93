"""Execution of a model's steps: type of the weights, memory format, compiler, checkpointing."""

from __future__ import annotations

import os
import shutil
from typing import Any

import torch
from torch import Tensor, nn

from shardmark.base.errors import InputError, StrategyUnavailable
from shardmark.base.recipe import Recipe
from shardmark.ranks.strategies.batch_norm import synchronise_batch_norms
from shardmark.ranks.strategies.blocks import blocks, checkpoint_blocks, hidden_matrices
from shardmark.ranks.strategies.casting import compute_in_bf16, narrow_weights
from shardmark.ranks.strategies.optimizers import HIDDEN_MATRIX, check_hidden_matrices
from shardmark.ranks.workloads.base import Workload

MAX_COMPILE_THREADS = 32
"""Limit of torch on its compiler threads."""
RECOMPILES_PER_BLOCK = 4
"""Compiled versions of a block: training, evaluation, full and smaller batches.

Blocks of a class share torch's limit, and different sizes must not become dynamic: Inductor fails
with dynamic shapes under FSDP.
"""


def build_on(
    device: torch.device, workload: Workload, recipe: Recipe, *, keeps_strides: bool = True
) -> nn.Module:
    """Build the workload's full model, prepare it, and move it to the device."""
    model = workload.build_model()
    return prepared_on(device, model, workload, recipe, keeps_strides=keeps_strides)


def prepared_on(
    device: torch.device,
    model: nn.Module,
    workload: Workload,
    recipe: Recipe,
    *,
    keeps_strides: bool = True,
) -> nn.Module:
    """Prepare the workload's model as the recipe asks, and move it to the device."""
    if recipe.sync_batch_norm:
        model = synchronise_batch_norms(model, device, compiled=recipe.compile != "none")
    prepare(model, workload, recipe, keeps_strides=keeps_strides)
    return model.to(device)


def prepare(
    model: nn.Module, workload: Workload, recipe: Recipe, *, keeps_strides: bool = True
) -> None:
    """Apply the recipe's execution options in place, before the model is moved or sharded.

    Names of parameters stay, and their values unless weights are bf16.  With `keeps_strides` the
    library supports weights whose strides are not in the order of their axes.  Matrices that Muon
    updates are marked.
    """
    if recipe.weights == "bf16":
        narrow_weights(model)
        compute_in_bf16(model)
    if recipe.optimizer.name == "muon":
        matrices = hidden_matrices(model, workload.blocks(model))
        check_hidden_matrices(matrices)
        for parameter in matrices:
            setattr(parameter, HIDDEN_MATRIX, True)
    if recipe.channels_last:
        _use_channels_last(model, weights=keeps_strides)
    if recipe.compile != "none":
        _compile(model, workload, recipe)
    if recipe.activation_checkpointing:  # recomputes compiled blocks
        checkpoint_blocks(model, recipe.activation_checkpointing, workload.blocks(model))


def _compile(model: nn.Module, workload: Workload, recipe: Recipe) -> None:
    """Compile the `forward` of the model or of each block, when it is first called.

    The module's call is not compiled, so that hooks, and names of modules and parameters, stay.
    Raises `InputError` for a model without blocks, and `StrategyUnavailable` without a C++
    compiler, which CPUs and GPUs need.
    """
    parts = [model]
    if recipe.compile == "blocks":
        user_blocks = workload.blocks(model)
        parts = blocks(model) if user_blocks is None else list(user_blocks)
    if not parts:
        raise InputError(
            "recipe.compile", "blocks, and the model has no repeated part", "model or none"
        )
    if not shutil.which(compiler := os.environ.get("CXX", "g++")):
        raise StrategyUnavailable(
            f"compile: {recipe.compile}",
            f"there is no {compiler} to compile with",
            "install it, or set recipe.compile to none",
        )
    import torch._dynamo.config as dynamo
    import torch._inductor.config as inductor

    inductor.fallback_random = True  # dropout draws the same masks as without the compiler
    inductor.compile_threads = min(MAX_COMPILE_THREADS, torch.get_num_threads())
    dynamo.recompile_limit = max(dynamo.recompile_limit, RECOMPILES_PER_BLOCK * len(parts))
    for part in parts:
        part.forward = torch.compile(part.forward, dynamic=False)


def _use_channels_last(model: nn.Module, *, weights: bool) -> None:
    """Make convolutions compute in channels-last.  Raises `InputError` for a model without any.

    A convolution does if its weight or its input has the format; the layers after it keep the
    format.
    """
    convolutions = [
        m for m in model.modules() if any(p.dim() == 4 for p in m.parameters(recurse=False))
    ]
    if not convolutions:
        raise InputError(
            "recipe.channels_last",
            "true, and the model has no weight of 4 axes",
            "false: it is for convolutions",
        )
    if weights:
        model.to(memory_format=torch.channels_last)
        return
    for convolution in convolutions:
        convolution.register_forward_pre_hook(_to_channels_last)


def _to_channels_last(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(
        value.contiguous(memory_format=torch.channels_last)
        if isinstance(value, Tensor) and value.dim() == 4
        else value
        for value in inputs
    )
