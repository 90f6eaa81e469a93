"""How a model computes its steps, and not what: memory format, compiler, checkpointing."""

from __future__ import annotations

import os
import shutil
from typing import Any

import torch
from torch import Tensor, nn

from shardmark.core.errors import InputError, StrategyUnavailable
from shardmark.core.recipe import Recipe
from shardmark.strategies.batch_norm import synchronise_batch_norms
from shardmark.strategies.blocks import blocks, checkpoint_blocks
from shardmark.workloads.base import Workload

MOST_COMPILERS = 32
"""torch's own limit."""
RECOMPILED = 4
"""Versions of a block: training, evaluation, full and smaller batches.  Blocks of a class share
torch's limit, and unlike sizes must not become dynamic: Inductor fails with those of FSDP."""


def build_on(
    device: torch.device, workload: Workload, recipe: Recipe, *, keeps_strides: bool = True
) -> nn.Module:
    """The workload's whole model on the device, prepared."""
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
    """As the recipe asks, in place, before anything is moved, sharded or wrapped.

    Names and values of parameters stay.  `keeps_strides`: the library takes weights that lie in
    memory in another order than their axes have.
    """
    if recipe.channels_last:
        _use_channels_last(model, weights=keeps_strides)
    if recipe.compile != "none":
        _compile(model, workload, recipe)
    if recipe.activation_checkpointing:  # computes again what is compiled
        checkpoint_blocks(model, workload.blocks(model))


def _compile(model: nn.Module, workload: Workload, recipe: Recipe) -> None:
    """Each part's `forward`, which is compiled when it is first called.

    Not the module's call: hooks of libraries and tasks on it stay what they are, and its name and
    those of its parameters too.  Raises `InputError` for a model without blocks, and
    `StrategyUnavailable` without a compiler of C++, which CPUs and GPUs want alike.
    """
    parts = [model]
    if recipe.compile == "blocks":
        own = workload.blocks(model)
        parts = blocks(model) if own is None else list(own)
    if not parts:
        found = "blocks, and the model has no repeated part"
        raise InputError("recipe.compile", found, "model or none")
    if not shutil.which(compiler := os.environ.get("CXX", "g++")):
        asked = f"compile: {recipe.compile}"
        remedy = "install it, or set recipe.compile to none"
        raise StrategyUnavailable(asked, f"there is no {compiler} to compile with", remedy)
    import torch._dynamo.config as dynamo
    import torch._inductor.config as inductor

    inductor.fallback_random = True  # dropout draws as it does without the compiler
    inductor.compile_threads = min(MOST_COMPILERS, torch.get_num_threads())
    dynamo.recompile_limit = max(dynamo.recompile_limit, RECOMPILED * len(parts))
    for part in parts:
        part.forward = torch.compile(part.forward, dynamic=False)


def _use_channels_last(model: nn.Module, *, weights: bool) -> None:
    """Raises `InputError` for a model without convolutions.

    A convolution computes so if its weight or its input does; what follows it keeps the format.
    """
    convolutions = [m for m in model.modules() if any(p.dim() == 4 for p in _own(m))]
    if not convolutions:
        found = "true, and the model has no weight of 4 axes"
        raise InputError("recipe.channels_last", found, "false: it is for convolutions")
    if weights:
        model.to(memory_format=torch.channels_last)
        return
    for convolution in convolutions:
        convolution.register_forward_pre_hook(_to_channels_last)


def _own(module: nn.Module) -> list[nn.Parameter]:
    return list(module.parameters(recurse=False))


def _to_channels_last(_: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(
        value.contiguous(memory_format=torch.channels_last)
        if isinstance(value, Tensor) and value.dim() == 4
        else value
        for value in given
    )
