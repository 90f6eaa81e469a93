"""Worker of DeepSpeed's engine, with names of private attributes of DeepSpeed 0.19."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import shardmark.ranks.strategies.deepspeed.preload  # noqa: F401  # isort: skip  (chooses its accelerator)
import deepspeed
import torch
import torch.utils._pytree as pytree  # torch has no public one
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_local_fp32_param,
)
from torch import Tensor, nn

from shardmark.base.errors import StrategyUnavailable
from shardmark.base.recipe import Optimizer, Recipe
from shardmark.ranks.strategies.base import LOSS_SCALE, HeldState, RankContext
from shardmark.ranks.strategies.blocks import sharding_units
from shardmark.ranks.strategies.casting import (
    allow_mixed_dtype_batch_norm,
    cast_inputs,
    lossless_copy,
    widen_outputs,
)
from shardmark.ranks.strategies.execution import prepared_on
from shardmark.ranks.strategies.initial_weights import build_in_parts
from shardmark.ranks.strategies.step import (
    AUTOCAST_DTYPES,
    StepWorker,
    build_optimizer,
    refuse_switched_weights,
    scale,
    set_learning_rates,
    state_keys,
    state_tensors,
)
from shardmark.ranks.workloads.base import Workload

# A test looks for each of these attributes in the source of the installed version.
REPLICATED_PARAMETERS = "bit16_groups_flat"
"""Stages 1 and 2: all parameters, flat."""
COMPUTED_PARTITIONS = "fp16_partitioned_groups_flat"
"""Stage 3: this rank's partitions, in the precision of the computation."""
PARAMETERS = (REPLICATED_PARAMETERS, COMPUTED_PARTITIONS)
MASTERS = ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat")
"""Stages 1 and 2, stage 3: this rank's fp32 partitions."""
GRADIENTS = (
    "averaged_gradients",
    "all_grad_tensors",
    "ipg_buckets",
    "grad_partitions_flat_buffer",
    "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition",
)
ENGINE_SCALER = "torch_autocast_z0_gradscaler"
"""Stage 0, of the engine itself."""
OPTIMIZER_SCALER = "loss_scaler"
"""The other stages, of its optimizer, with what else `scale_losses` replaces."""
REPLACED = ("torch_autocast_gradscaler", OPTIMIZER_SCALER, "dynamic_loss_scale")
STATES_LINKED, LINK_STATES = "_hp_optimizer_states_linked", "_lazy_init_hp_params_optimizer_state"
"""Stages 1 and 2: whether parameters know their parts of the state, and what makes them know."""


def start_engine(
    workload: Workload,
    recipe: Recipe,
    context: RankContext,
    *,
    config: dict[str, Any],
    check: Callable[[nn.Module], object],
    casts: bool = False,
    scales_otherwise: bool = False,
    cpu_adam: Mapping[str, Any] | None = None,
) -> ZeroWorker:
    """Start DeepSpeed with the model and the recipe's optimizer; the process group exists.

    With `casts` its engine computes in the recipe's 16 bits.
    """
    stage = config["zero_optimization"]["stage"]
    dtype = AUTOCAST_DTYPES[recipe.precision] if casts else None
    first: dict[nn.Parameter, Tensor] = {}
    if stage == 3:
        model, large = build_in_parts(
            workload,
            recipe,
            context,
            check=check,
            parts=lambda model: sharding_units(model, "blocks", workload.blocks(model)),
            shard=lambda part: _partition(part, config, context, dtype, first),
            shards_small=False,
        )
    else:
        model = workload.build_model()
        check(model)
        model = prepared_on(context.device, model, workload, recipe, keeps_strides=False)
        large = False
    if casts and not large:
        first = {p: p.detach().to("cpu", copy=True) for p in model.parameters()}
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    made = None if cpu_adam is None else partial(made_cpu_adam, **cpu_adam)
    optimizer = build_optimizer(trained, recipe, workload.parameter_groups, made)
    refuse_switched_weights(f"zero-{stage}", optimizer)
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=list(trained.values()),
        optimizer=optimizer,
        config=config,
        dist_init_required=False,
    )
    if len(engine.optimizer.param_groups) != len(optimizer.param_groups):
        kind = type(optimizer).__name__
        reason = f"DeepSpeed makes {kind} anew, without its parameter groups"
        raise StrategyUnavailable(f"zero-{stage}", reason, "use another optimizer, or no groups")
    if scales_otherwise:
        scale_losses(engine.optimizer)
    # DeepSpeed makes its fp32 parameters from 16-bit ones: all strategies begin with the same.
    for parameter, values in first.items():
        if not parameter.requires_grad:
            continue
        if stage == 3:
            part = values if large else _padded_part(values, parameter, context.rank)
            safe_set_local_fp32_param(parameter, part)
        else:
            safe_set_full_fp32_param(parameter, values)
    if dtype is not None:
        # It casts parameters alone.
        cast_inputs(engine.module, dtype)
        allow_mixed_dtype_batch_norm(engine.module)
        widen_outputs(engine.module)
    return ZeroWorker(
        engine.module,
        wrapped_model=engine,
        workload=workload,
        recipe=recipe,
        device=context.device,
        shares=context.world_size,
        casts_of=f"zero-{stage}" if casts else None,
        large=large,
        sharded_by=f"zero-{stage}" if stage else None,
        frozen={p: values for p, values in first.items() if not p.requires_grad},
    )


def made_cpu_adam(
    parameters: Iterable[nn.Parameter] | list[dict[str, Any]], spec: Optimizer, **settings: Any
) -> torch.optim.Optimizer:
    """Create DeepSpeed's Adam.  Raises `StrategyUnavailable` if it cannot be compiled."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    of_recipe = spec.model_dump(include={"lr", "betas", "eps", "weight_decay"})
    try:
        made: torch.optim.Optimizer = DeepSpeedCPUAdam(parameters, **of_recipe, **settings)
    except RuntimeError as error:
        cause = error.__cause__ or error
        reason = f"DeepSpeed cannot compile its Adam: {type(cause).__name__}: {cause}"
        remedy = "install a C++ compiler and ninja, or set cpu_adam to false"
        raise StrategyUnavailable("cpu_adam", reason, remedy) from error
    return made


def _partition(
    part: nn.Module,
    config: dict[str, Any],
    context: RankContext,
    dtype: torch.dtype | None,
    first: dict[nn.Parameter, Tensor],
) -> None:
    """Partition a part of the model as DeepSpeed does, with parameters cast to `dtype`.

    Adds this rank's fp32 values of each parameter that is cast to `first`.
    """
    parameters = [p for p in part.parameters() if dtype is not None and not hasattr(p, "ds_id")]
    wide = [parameter.detach().flatten() for parameter in parameters]
    for parameter in parameters:
        parameter.data = parameter.data.to(dtype)
    deepspeed.zero.Init(module=part, config_dict_or_path=config)
    for parameter, values in zip(parameters, wide, strict=True):
        first[parameter] = _padded_part(values, parameter, context.rank)
    for buffer in part.buffers():
        buffer.data = buffer.data.to(context.device)


def _padded_part(values: Tensor, parameter: Any, rank: int) -> Tensor:
    """Return the rank's part of a parameter's values, padded like DeepSpeed's partition."""
    size = parameter.ds_tensor.numel()
    part = torch.zeros(size)
    unpadded = values.flatten()[rank * size : (rank + 1) * size]
    part[: unpadded.numel()] = unpadded
    return part


@dataclass(kw_only=True, eq=False)
class ZeroWorker(StepWorker):
    """Trains through DeepSpeed's engine, which reduces gradients itself."""

    frozen: Mapping[nn.Parameter, Tensor] = field(default_factory=dict)
    """The fp32 values of frozen parameters: a 16-bit engine stores rounded values only.

    In a large model, the rank's flat part of them.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self._engine: Any = self.wrapped_model
        self._count_updates_of(self._base_optimizer())

    def _sharded_units(self) -> dict[str, nn.Module]:
        if self.sharded_by is None or self.recipe.compile != "none":
            return {}  # a compiled part would be compiled with the hooks, and again without
        return {
            n: m for n, m in self.module.named_modules() if n and [*m.parameters(recurse=False)]
        }

    def _loss_scaler(self) -> torch.amp.GradScaler | LossScale | None:
        """Return the scaler of autocast's fp16; None in other precisions and 16-bit engines."""
        scaler = getattr(self._engine, ENGINE_SCALER, None)
        scaler = scaler or getattr(self._engine.optimizer, OPTIMIZER_SCALER, None)
        return scaler if isinstance(scaler, torch.amp.GradScaler | LossScale) else None

    def _backward(self, share: Tensor, last: bool) -> None:
        self._engine.backward(share, scale_wrt_gas=False)
        if not last:
            self._engine.step()  # only counts the micro-batch

    def _scale_gradients(self, factor: Tensor) -> None:
        """Scale the gradients of the rank's partitions, before the update takes their norm."""
        if not self._engine.zero_optimization():
            scale([p.grad for p in self.module.parameters() if p.grad is not None], factor)
            return
        if self.recipe.cpu_offload:
            raise StrategyUnavailable(
                f"zero-{self._engine.zero_optimization_stage()}",
                "with cpu_offload DeepSpeed has taken the norm of the gradients before all weights"
                " of an accumulated step are known",
                "give the task weights(data), or set recipe.gradient_accumulation to 1",
            )
        scale(held_by(self._engine.optimizer, GRADIENTS[:1]), factor)

    def _update(self) -> None:
        self._steps_called += 1
        self._engine.step()

    def _base_optimizer(self) -> torch.optim.Optimizer:
        optimizer = self._engine.optimizer
        base = getattr(optimizer, "optimizer", optimizer)
        assert isinstance(base, torch.optim.Optimizer)
        return base

    def set_learning_rate(self, learning_rate: float) -> None:
        set_learning_rates(self._engine.optimizer.param_groups, learning_rate)

    def each_parameter(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in sorted(self.module.named_parameters()):
            yield name, self._full(parameter)

    def _full(self, parameter: Any) -> Tensor:
        if parameter.requires_grad and self._engine.zero_optimization():
            return lossless_copy(safe_get_full_fp32_param(parameter))
        if (values := self.frozen.get(parameter)) is None:
            with deepspeed.zero.GatheredParameters([parameter]):
                return lossless_copy(parameter)
        if not self.large:
            return lossless_copy(values)
        parts = cast("list[Tensor]", self.group.gather(values))
        return torch.cat(parts)[: parameter.ds_numel].view(parameter.ds_shape)

    def full_gradients(self) -> dict[str, Tensor]:
        sharded = self._engine.zero_optimization()
        gradients = {
            name: safe_get_full_grad(parameter) if sharded else parameter.grad
            for name, parameter in self.module.named_parameters()
        }
        # Loss-scaled gradients are unscaled in the optimizer step, which is still to come.
        scaler = self._loss_scaler()
        native_scale = float(getattr(self._engine.optimizer, "loss_scale", 1.0))
        scale = native_scale if scaler is None else scaler.get_scale()
        return {
            name: lossless_copy(gradient) / scale
            for name, gradient in gradients.items()
            if gradient is not None
        }

    def full_optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        sharded, optimizer = self._engine.zero_optimization(), self._engine.optimizer
        if self.skipped_steps() == self._steps_called:
            return {name: {} for name, _ in self.module.named_parameters()}
        if hasattr(optimizer, STATES_LINKED):
            # Done after the first group's update, when others have no state yet.
            setattr(optimizer, STATES_LINKED, False)
            getattr(optimizer, LINK_STATES)()
        state: dict[str, dict[str, Tensor]] = {}
        keys = state_keys(self.recipe.optimizer)
        for name, parameter in self.module.named_parameters():
            if sharded:
                tensors = {key: safe_get_full_optimizer_state(parameter, key) for key in keys}
            else:
                tensors = self._base_optimizer().state.get(parameter, {})
            state[name] = {
                key: lossless_copy(value)
                for key, value in tensors.items()
                if isinstance(value, Tensor)
            }
        return state

    def held_state(self) -> HeldState:
        optimizer = self._engine.optimizer
        parameters = list(self.module.parameters())
        masters = held_by(optimizer, MASTERS)
        shards = [p.ds_tensor for p in parameters if hasattr(p, "ds_tensor")]
        gradients = [p.grad for p in (*parameters, *masters) if p.grad is not None]
        return HeldState(
            parameters=(*parameters, *shards, *held_by(optimizer, PARAMETERS)),
            gradients=(*gradients, *held_by(optimizer, GRADIENTS)),
            # ZeRO counts its fp32 partition as optimizer state (Rajbhandari et al., section 3.1).
            optimizer_state=(*state_tensors(self._base_optimizer()), *masters),
        )


def held_by(owner: object, names: Iterable[str]) -> list[Tensor]:
    """Return every tensor in the owner's attributes of these names, and in buckets there."""
    leaves = pytree.tree_leaves([getattr(owner, name, None) for name in names])
    leaves = pytree.tree_leaves([getattr(value, "buffer", value) for value in leaves])
    return [value for value in leaves if isinstance(value, Tensor)]


class LossScale:
    """`torch.amp.GradScaler`'s rule behind the interface of DeepSpeed's scalers.

    DeepSpeed calls `update_scale` before it divides the gradients, so growth waits for the next
    loss.
    """

    dynamic = True

    def __init__(self) -> None:
        self.cur_scale = LOSS_SCALE["initial"]
        self._good_steps = 0

    @property
    def loss_scale(self) -> float:
        return self.cur_scale

    def get_scale(self) -> float:
        return self.cur_scale

    def scale_loss(self, loss: Tensor) -> Tensor:
        if self._good_steps == LOSS_SCALE["growth_interval"]:
            self._good_steps = 0
            self.cur_scale *= LOSS_SCALE["growth_factor"]
        return loss * self.cur_scale

    def update_scale(self, overflow: bool) -> None:
        self._good_steps = 0 if overflow else self._good_steps + 1
        if overflow:
            self.cur_scale *= LOSS_SCALE["backoff_factor"]


def scale_losses(optimizer: Any) -> None:
    """Have a ZeRO optimizer of stage 1 to 3 scale autocast's fp16 as all strategies do.

    DeepSpeed 0.19 has a `GradScaler` of torch's there, but clips and looks for overflow before it
    is asked: gradients are clipped while they are scaled, and after an overflow the scale never
    falls, so that every later step is skipped.
    """
    optimizer.torch_autocast_gradscaler = None
    optimizer.loss_scaler = LossScale()
    optimizer.dynamic_loss_scale = True
