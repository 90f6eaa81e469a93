"""Traces a step of the user's own model and loss, without memory or really on the CPU."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardmark.base.errors import InputError, ShardmarkError
from shardmark.base.layout import REPLICATED_ACTIVATIONS, ActivationSharding, Shard
from shardmark.base.recipe import Optimizer, Recipe
from shardmark.base.traffic import ELEMENT_BYTES, stored_element_bytes
from shardmark.predict.profile import Profile
from shardmark.predict.trace.fakes import (
    FastFakes,
    delta_rules,
    flash_attention,
    gpu_kernels,
    make_fake,
    quiet,
    routed_experts,
    unpacked,
)
from shardmark.predict.trace.optimizers import trained_shapes, with_optimizer
from shardmark.predict.trace.repeated_layers import Repetition, expand, shortened_copy
from shardmark.predict.trace.step_trace import StepTrace
from shardmark.predict.trace.tensor_sharding import TensorSharding
from shardmark.predict.trace.two_steps import TwoSteps
from shardmark.ranks.strategies.blocks import sharding_units
from shardmark.ranks.strategies.casting import (
    allow_mixed_dtype_batch_norm,
    cast_inputs,
    widen_outputs,
)
from shardmark.ranks.strategies.execution import prepare
from shardmark.ranks.strategies.layers.divided import styled_modules
from shardmark.ranks.strategies.step import AUTOCAST_DTYPES, autocast, share_of_step
from shardmark.ranks.workloads.base import BatchPlan, TensorPlan, Workload
from shardmark.ranks.workloads.model_building import (
    build_on_meta,
    preserved_generators,
    seed_generators,
)
from shardmark.ranks.workloads.sampled_task import with_tensors

logger = logging.getLogger(__name__)

CPU = torch.device("cpu")
SAMPLES = (4, 8)
"""Samples of the two traced steps.  Other sizes are extrapolated linearly."""
REAL_SAMPLES = (1, 2)
"""The same of steps that really compute, which take the time and memory of a step on the CPU."""
REAL_PARAMETERS = 10**9
"""Largest model whose steps really compute: with its gradients it takes 8 GB."""


def traced(
    workload: Workload,
    recipe: Recipe,
    *,
    casts: bool = False,
    model: nn.Module | None = None,
    device_type: str = "cuda",
    activations: ActivationSharding = REPLICATED_ACTIVATIONS,
    flash: bool = False,
    routed: bool = False,
) -> Profile | None:
    """Trace two steps of few samples each, on fake tensors, or really on the CPU if these fail.

    The steps are under autocast, or `casts` their parameters: None if the model refuses that.
    `model` is the workload's, if it is built already; it stays as it is.  `device_type` chooses the
    kernels, `activations` the activations that tensor parallelism shards, `flash` the library
    FlashAttention for models of transformers, `routed` experts that compute what is sent to them.
    """
    if model is None and workload.equal_blocks:
        model = build_on_meta(workload)
    precision = "bf16" if recipe.precision == "fp16" else recipe.precision  # CPUs are slow in fp16
    steps = partial(
        _steps,
        workload,
        recipe.model_copy(update={"weights": "fp32", "precision": precision}),
        device_type=device_type,
        activations=activations,
        casts=AUTOCAST_DTYPES[precision] if casts else None,
        flash=flash,
        routed=routed or flash,
    )
    gc.disable()  # its collections would go through the model again and again
    with preserved_generators():
        try:
            with quiet() if casts else nullcontext():
                profile = _on_any_tensors(steps, workload, recipe, model).profile()
        except Exception as error:  # strategies that cast parameters refuse this model
            if not casts:
                raise
            logger.info("the model does not compute with 16-bit parameters: %s", error)
            return None
        finally:
            gc.enable()
    return with_optimizer(profile, recipe.optimizer, device_type, recipe.weights)


def untraced(workload: Workload, recipe: Recipe, model: nn.Module) -> Profile:
    """Return a profile with the parameters of each block and no operations."""
    blocks = sharding_units(model, "blocks", workload.blocks(model))
    batch = next(iter(workload.batches(BatchPlan(global_batch=1, seed=0), Shard(index=0, count=1))))
    step = StepTrace(model, blocks, batch, recipe, device_type="cuda", sharding=None)
    step.list_blocks(blocks)
    step.assign_rest(model)
    shapes = trained_shapes(model, workload.blocks(model))
    steps = TwoSteps(
        samples=(1, 1), first=step, second=step, trained_shapes=shapes, buffer_bytes=0, limited=()
    )
    profile = with_optimizer(steps.profile(), recipe.optimizer, "cuda", recipe.weights)
    return replace(profile, active_parameters=workload.active_parameters(model))


def _on_any_tensors(
    steps: Callable[..., TwoSteps], workload: Workload, recipe: Recipe, built: nn.Module | None
) -> TwoSteps:
    """Trace the steps on fake tensors, or really on the CPU if these fail.

    Raises `InputError` for a model that is too large for real steps.
    """
    every_nth = recipe.activation_checkpointing not in (False, True, "selective")
    shortened = built if workload.equal_blocks and not every_nth else None
    fake = FastFakes(allow_non_fake_inputs=True)
    failure: Exception | None = None
    for model in dict.fromkeys((shortened, None)):
        try:
            with quiet():
                return steps(SAMPLES, fake=fake, shortened=model)
        except Exception as error:  # two layers differ, or shapes depend on values, for example
            logger.info("all layers, or real steps, are traced: %s", error)
            failure = error
    count = 0 if built is None else sum(p.numel() for p in built.parameters())
    if count > REAL_PARAMETERS:
        if isinstance(failure, ShardmarkError):
            raise failure
        message = f"it cannot be traced without weights ({type(failure).__name__}: {failure})"
        size = f"its {count / 1e9:,.3g} billion weights could fill the memory of this machine"
        allowed = f"plan a configuration with fewer layers, or measure it with run: {size}"
        raise InputError("the model", message, allowed) from failure
    for invents in (True, False):  # random results may be refused, as by a Cholesky factorisation
        try:
            return steps(REAL_SAMPLES, fake=None, invents=invents)
        except ValueError:  # a batch norm refuses a single value
            return steps(SAMPLES, fake=None, invents=invents)
        except Exception as error:
            if not invents:
                raise
            logger.info("products are computed: %s", error)
    raise AssertionError("the last of them returns or raises")


def _steps(
    workload: Workload,
    recipe: Recipe,
    samples: Sequence[int],
    *,
    device_type: str,
    activations: ActivationSharding,
    casts: torch.dtype | None,
    fake: FastFakes | None,
    flash: bool,
    routed: bool,
    shortened: nn.Module | None = None,
    invents: bool = False,
) -> TwoSteps:
    """Trace a step of each number of samples, of a new model or of some layers of `shortened`."""
    # The update is measured apart from the step.
    eager = recipe.model_copy(update={"compile": "none", "optimizer": Optimizer()})
    model = shortened or (build_on_meta(workload) if fake else None) or workload.build_model()
    traced = partial(
        TwoSteps,
        trained_shapes=trained_shapes(model, workload.blocks(model)),
        buffer_bytes=sum(buffer.nbytes for buffer in model.buffers()),
        limited=tuple(limited_heads(model)),
    )
    repetitions: list[Repetition] = []
    if shortened is not None:
        model, repetitions = shortened_copy(model, workload.blocks(model))
    for parameter in model.parameters():  # which may be cast below
        setattr(parameter, ELEMENT_BYTES, stored_element_bytes(parameter))
    plan = workload.tensor_plan(model)  # it refers to the names of modules before they are wrapped
    styled = [*styled_modules(model, plan).values()] if isinstance(plan, TensorPlan) else None
    prepare(model, workload, eager)
    blocks = sharding_units(model, "blocks", workload.blocks(model))
    if fake is not None:
        make_fake(model, fake, casts)
    if casts is not None:
        for parameter in () if fake else model.parameters():
            parameter.data = parameter.data.to(casts)
        for unit in (*blocks, model):
            cast_inputs(unit, casts)
        allow_mixed_dtype_batch_norm(model)
        widen_outputs(model)
    flash = flash and fake is not None and getattr(model, "_supports_flash_attn", False)
    steps = []
    first, second = (min(count, workload.training_samples) for count in samples)
    for size in (first, second):
        batch_plan = BatchPlan(global_batch=size, seed=recipe.seed)
        batch = next(iter(workload.batches(batch_plan, Shard(index=0, count=1)))).to(CPU)
        if fake is not None:
            batch = with_tensors(batch, fake.from_tensor)
        sharding = None if styled is None else TensorSharding(styled, activations)
        step = StepTrace(
            *(model, blocks, batch, recipe),
            device_type=device_type,
            sharding=sharding,
            invents=invents,
        )
        kernels = gpu_kernels() if device_type == "cuda" and fake else nullcontext()
        seed_generators(recipe.seed)  # a model that skips layers by chance skips the same ones
        limits = unpacked() if fake else at_their_limits(model)
        attention = flash_attention() if flash else nullcontext()
        rules = delta_rules(model) if fake else nullcontext()
        experts = routed_experts(model) if routed and fake else nullcontext()
        with fake or nullcontext(), kernels, attention, rules, experts, limits, step:
            with nullcontext() if casts else autocast(recipe, CPU):
                loss = workload.loss(model, batch)
                share = share_of_step(loss, batch.step_weight, 1)
            del loss
            step.backward(share)
        step.assign_rest(model)
        model.zero_grad(set_to_none=True)
        for repetition in repetitions:
            step.units = expand(step.units, repetition)
        steps.append(step)
    return traced(samples=(first, second), first=steps[0], second=steps[1])


def limited_heads(model: nn.Module) -> dict[str, Any]:
    """Return torchvision's region heads that compute masks or keypoints, by their names.

    These compute positive proposals alone.  Weights from the seed find almost none, trained ones
    about as many as are sampled at most.
    """
    return {
        name: module
        for name, module in model.named_modules()
        if hasattr(module, "assign_targets_to_proposals")
        and (module.has_mask() or module.has_keypoint())
    }


@contextmanager
def at_their_limits(model: nn.Module) -> Iterator[None]:
    """Let region heads sample as many positive proposals as they may."""
    heads = limited_heads(model).values()
    for head in heads:
        head.assign_targets_to_proposals = partial(
            _assigned, head.assign_targets_to_proposals, head
        )
    try:
        yield
    finally:
        for head in heads:
            del head.assign_targets_to_proposals


def _assigned(
    original: Any,
    head: Any,
    proposals: Sequence[Tensor],
    boxes: Sequence[Tensor],
    labels: Sequence[Tensor],
) -> tuple[list[Tensor], list[Tensor]]:
    """Match the first proposals of each image to its first box."""
    indices, assigned = original(proposals, boxes, labels)
    sampler = head.fg_bg_sampler
    most = int(sampler.batch_size_per_image * sampler.positive_fraction)
    for index, label, of_picture in zip(indices, assigned, labels, strict=True):
        if len(of_picture):
            index[:most] = 0
            label[:most] = of_picture[0]
    return indices, assigned
