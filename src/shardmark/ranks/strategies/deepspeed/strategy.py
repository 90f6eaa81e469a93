"""DeepSpeed ZeRO, stages 0 to 3."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field

from shardmark.base.layout import Fractions, Layout, data_parallel
from shardmark.base.machine import Machine
from shardmark.base.numerics import ONE_DEVICE, Casts, Numerics
from shardmark.base.system.extras import install_command, is_installed
from shardmark.ranks.strategies.base import (
    LOSS_SCALE,
    MixedPrecision,
    RankContext,
    Strategy,
    check_machine,
    common_settings,
    is_native,
    refuse,
    refuse_after_step,
    refuse_full_tensor_optimizers,
)

if TYPE_CHECKING:
    from torch import nn

    from shardmark.base.recipe import Optimizer, Recipe
    from shardmark.ranks.strategies.deepspeed.worker import ZeroWorker
    from shardmark.ranks.workloads.base import Workload
    from shardmark.ranks.workloads.options import WorkloadOptions

MiB = 2**20
ADAMS = ("adam", "adamw")
PREFETCHED_ELEMENTS = 50_000_000
SUB_GROUP_ELEMENTS = 1_000_000_000
"""Defaults of DeepSpeed in stage 3: elements gathered ahead at once, and updated at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Zero(Strategy):
    """DeepSpeed ZeRO shards optimizer state (1), gradients (2), parameters (3).

    Source: Rajbhandari et al., SC 2020, section 5.  Stage 0 shards nothing.
    """

    costs = "shardmark.ranks.costs.sharded:ZeroCosts"
    library = "DeepSpeed"
    refused_parameters = ("scalar", "sparse", "empty", "other types", "strides")

    stage: Literal[0, 1, 2, 3]
    bucket_mb: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 25.0
    """Gradients in one reduction, MiB of fp32.  DeepSpeed holds a buffer of this size."""
    overlap_communication: bool = True
    """Reduce gradients during the backward pass (CUDA streams; no effect on the CPU)."""
    persistence_threshold: Annotated[int, Field(ge=0)] = 100_000
    """Stage 3: parameters of fewer elements are not sharded."""
    max_reuse_distance: Annotated[int, Field(ge=0)] = 1_000_000_000
    """Stage 3: a parameter stays whole if it is used again within this many elements.  The default
    keeps a model of up to half as many whole from forward to backward; 0 for this and for
    `max_live_parameters` frees each parameter after its use."""
    max_live_parameters: Annotated[int, Field(ge=0)] = 1_000_000_000
    """Stage 3: gathers ahead of need until this many elements are whole.  What gathering ahead
    finds whole and needed again is not freed; 0 gathers nothing ahead."""
    mixed_precision: MixedPrecision | None = None
    """`native` is DeepSpeed's bf16 or fp16 engine: 16-bit parameters and gradients, reduced in
    fp32.  `autocast` is what `ddp` does.  null: `native` in bf16, `autocast` in fp16, for detection
    and in stage 0."""
    cpu_adam: bool = False
    """Update by DeepSpeed's Adam for the host's vector units, not by torch's, with CPU offload, as
    DeepSpeed recommends.  The first start compiles it, for a minute or more."""

    def for_workload(self, options: WorkloadOptions) -> Self:
        if self.mixed_precision is None and not options.casts_parameters:
            return replace(self, mixed_precision="autocast")
        return self

    def is_native(self, recipe: Recipe) -> bool:
        left_open: MixedPrecision | None = "autocast" if self.stage == 0 else None
        return is_native(self.mixed_precision or left_open, recipe)

    def check(self, world_size: int, machine: Machine, recipe: Recipe) -> None:
        absent = not machine.is_predicted and not is_installed("deepspeed")
        refuse(self.name, (absent, "DeepSpeed is not installed", install_command("deepspeed")))
        no_bf16_weights = None
        if self.stage == 0:
            no_bf16_weights = "stage 0 of DeepSpeed's bf16 engine updates fp32 copies"
        elif recipe.cpu_offload:
            no_bf16_weights = "DeepSpeed offloads fp32 parameters and gradients"
        check_machine(
            self.name,
            world_size,
            machine,
            recipe,
            offload_instead=None,
            no_bf16_weights=no_bf16_weights,
        )
        if self.stage:
            refuse_full_tensor_optimizers(self.name, recipe)
        native, optimizer = self.is_native(recipe), recipe.optimizer
        refuse(
            self.name,
            (
                self.stage == 0 and native,
                "stage 0 of DeepSpeed's 16-bit engines does not show its fp32 parameters",
                "set mixed_precision to autocast",
            ),
            (
                machine.device_type == "cpu" and recipe.precision == "fp16" and native,
                "DeepSpeed's own fp16 engine needs a CUDA device",
                "set mixed_precision to autocast",
            ),
            (
                recipe.compile != "none" and self.stage == 3,
                "stage 3 gathers each layer's parameters inside of what is compiled, where it "
                "falls to pieces",
                "set recipe.compile to none, or use fsdp or zero-2",
            ),
            (
                self.stage == 3 and recipe.activation_checkpointing == "selective",
                "stage 3 replaces torch's linear function, and with selective checkpointing its"
                " updates are then wrong",
                "set recipe.activation_checkpointing to true, or use fsdp or zero-2",
            ),
            (
                self.cpu_adam and not recipe.cpu_offload,
                "cpu_adam updates what is offloaded, and nothing is",
                "set recipe.cpu_offload to true, or cpu_adam to false",
            ),
            (
                self.cpu_adam and optimizer.name not in ADAMS,
                f"cpu_adam is Adam, and recipe.optimizer is {optimizer.name}",
                "use adam or adamw, or set cpu_adam to false",
            ),
            (
                self.cpu_adam and optimizer.implementation != "default",
                f"cpu_adam has no {optimizer.implementation} implementation",
                "leave recipe.optimizer.implementation at default, or set cpu_adam to false",
            ),
            (
                recipe.cpu_offload and self.stage == 0,
                "stage 0 shards nothing that could be offloaded",
                "use zero-1, zero-2 or zero-3",
            ),
        )

    def layout(self, world_size: int, nodes: int = 1) -> Layout:
        part = 1 / world_size
        holds = Fractions(
            parameters=part if self.stage >= 3 else 1.0,
            gradients=part if self.stage >= 2 else 1.0,
            optimizer_state=part if self.stage >= 1 else 1.0,
        )
        group = world_size if self.stage else 1
        return data_parallel(world_size, nodes=nodes, group=group, holds=holds)

    def builds_in_parts(self) -> bool:
        return self.stage == 3

    def loads(self) -> tuple[str, ...]:
        return ("shardmark.ranks.strategies.deepspeed.preload",)

    def packages(self) -> tuple[str, ...]:
        return ("deepspeed",)

    def settings(self, recipe: Recipe) -> Mapping[str, object]:
        settings = common_settings(recipe)
        if self.is_native(recipe):
            native = {"mixed_precision": "native", "gradient_precision": recipe.precision}
            settings |= native
        if self.cpu_adam:
            settings["cpu_adam"] = self.cpu_adam_settings(recipe.optimizer)
        return settings | self._parameter_settings()

    def numerics(self, recipe: Recipe) -> Numerics:
        if recipe.precision == "fp32" or not self.is_native(recipe):
            return ONE_DEVICE
        precision = recipe.precision
        return Numerics(casts=Casts(precision=precision, units="root", gradients=precision))

    def check_model(
        self, workload: Workload, model: nn.Module, world_size: int, nodes: int = 1
    ) -> None:
        Strategy.check_model(self, workload, model, world_size, nodes)
        if self.stage == 3:
            refuse_after_step(self.name, workload, "stage 3 has no parameters between passes")

    def start(self, workload: Workload, recipe: Recipe, context: RankContext) -> ZeroWorker:
        from shardmark.ranks.strategies.deepspeed.worker import start_engine

        if self.is_native(recipe):
            reason = (
                "DeepSpeed's 16-bit engine rounds frozen parameters: set mixed_precision: autocast"
            )
            refuse_after_step(self.name, workload, reason)
        return start_engine(
            workload,
            recipe,
            context,
            config=self.config(recipe, context.device.type),
            casts=self.is_native(recipe),
            scales_otherwise=self.scales_loss(recipe),
            cpu_adam=self.cpu_adam_settings(recipe.optimizer) if self.cpu_adam else None,
            check=lambda model: self.check_model(workload, model, context.world_size),
        )

    def cpu_adam_settings(self, optimizer: Optimizer) -> dict[str, Any]:
        """Arguments of `DeepSpeedCPUAdam` that have defaults, beside the recipe's keys."""
        return {
            "adamw_mode": optimizer.name == "adamw",
            "bias_correction": True,
            "amsgrad": False,
            "fp32_optimizer_states": True,
        }

    def config(self, recipe: Recipe, device_type: str) -> dict[str, Any]:
        """DeepSpeed's configuration, with every default that changes the numerics set."""
        bucket_elements = int(self.bucket_mb * MiB / 4)
        zero: dict[str, Any] = {
            "stage": self.stage,
            "contiguous_gradients": True,
            "overlap_comm": self.overlap_communication and device_type == "cuda",
            "reduce_scatter": True,
            "reduce_bucket_size": bucket_elements,
            "allgather_bucket_size": bucket_elements,
            "round_robin_gradients": False,
            **self._parameter_settings(),
        }
        if recipe.cpu_offload:
            zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
            if self.stage == 3:
                zero["offload_param"] = {"device": "cpu", "pin_memory": True}
        return {
            # Its batch arithmetic only sets the divisor of accumulated losses; the data are ours.
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": recipe.gradient_accumulation,
            # Unset, DeepSpeed clips at 1.0 where every other strategy clips nothing.
            "gradient_clipping": recipe.gradient_clipping or 0.0,
            "prescale_gradients": False,
            "gradient_predivide_factor": 1.0,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "communication_data_type": recipe.weights,
            "zero_optimization": zero,
            "steps_per_print": 2**31,
            "wall_clock_breakdown": False,
            # It would wait for the device twice in each micro-batch.
            "timers": {"throughput": {"enabled": False}},
            **self._precision(recipe),
        }

    def _parameter_settings(self) -> dict[str, object]:
        """DeepSpeed keys for gathering and freeing parameters in stage 3, all defaults set."""
        if self.stage != 3:
            return {}
        return {
            "stage3_param_persistence_threshold": self.persistence_threshold,
            "stage3_model_persistence_threshold": sys.maxsize,
            "stage3_max_reuse_distance": self.max_reuse_distance,
            "stage3_max_live_parameters": self.max_live_parameters,
            "stage3_prefetch_bucket_size": PREFETCHED_ELEMENTS,
            "stage3_module_granularity_threshold": 0,
            "stage3_use_all_reduce_for_fetch_params": False,
            "stage3_allgather_sequential": False,
            "stage3_gather_16bit_weights_on_model_save": False,
            "sub_group_size": SUB_GROUP_ELEMENTS,
            "zero_hpz_partition_size": 1,
            "zero_quantized_weights": False,
            "zero_quantized_nontrainable_weights": False,
            "zero_quantized_gradients": False,
            "memory_efficient_linear": True,
        }

    def scales_loss(self, recipe: Recipe) -> bool:
        """True if DeepSpeed would scale the loss by a different rule; see `scale_losses`."""
        autocasts = not self.is_native(recipe)
        return recipe.precision == "fp16" and autocasts and self.stage > 0

    def _precision(self, recipe: Recipe) -> dict[str, Any]:
        if recipe.precision == "fp32":
            return {}
        # Its default, written out: gradients are added in the type of the parameters.
        types = {"data_types": {"grad_accum_dtype": recipe.precision}}
        # A step that is not finite is skipped in fp16 alone, as everywhere.
        bf16 = {"enabled": True, "check_grad_overflow": False}
        if recipe.weights == "bf16":
            states = dict.fromkeys(("bf16_master_weights_and_grads", "bf16_optimizer_states"), True)
            return types | {"bf16": bf16 | states}
        if not self.is_native(recipe):
            dtype = {"bf16": "bfloat16", "fp16": "float16"}[recipe.precision]
            # An empty list keeps DeepSpeed from reducing gradients of linear and convolution
            # layers in 16 bits.
            return {
                "torch_autocast": {
                    "enabled": True,
                    "dtype": dtype,
                    "lower_precision_safe_modules": [],
                }
            }
        if recipe.precision == "bf16":
            return types | {"bf16": bf16}
        return types | {
            "fp16": {
                "enabled": True,
                "loss_scale": 0.0,
                "initial_scale_power": int(math.log2(LOSS_SCALE["initial"])),
                "loss_scale_window": int(LOSS_SCALE["growth_interval"]),
                "hysteresis": 1,
                "min_loss_scale": 1.0,
            }
        }
