"""DeepSpeed ZeRO, stages 0 to 3, under torchrun's environment."""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field

from shardmark.core.errors import StrategyUnavailable
from shardmark.core.layout import Fractions, Layout, data_parallel
from shardmark.core.machine import Machine
from shardmark.core.numerics import ONE_DEVICE, Casts, Numerics
from shardmark.core.traffic import ModelSize, RequiredTraffic, Traffic
from shardmark.strategies.base import (
    FP32_BYTES,
    LOSS_SCALE,
    PRECISION_BYTES,
    HostState,
    LaunchConfiguration,
    MixedPrecision,
    RankContext,
    StepState,
    Strategy,
    UnitSize,
    UnitState,
    all_reduced,
    check_machine,
    common_settings,
    is_native,
    times,
)
from shardmark.strategies.deepspeed.buckets import Reduced, kept_whole, reduced_in_buckets

if TYPE_CHECKING:
    from torch import nn

    from shardmark.core.recipe import Optimizer, Recipe
    from shardmark.strategies.deepspeed.worker import ZeroWorker
    from shardmark.workloads.base import Workload
    from shardmark.workloads.options import WorkloadOptions

MiB = 2**20
ADAMS = ("adam", "adamw")
PREFETCHED_ELEMENTS = 50_000_000
SUB_GROUP_ELEMENTS = 1_000_000_000
"""DeepSpeed's own defaults: gathered ahead at once, and updated at once, in stage 3."""
REDUCED_WHOLE_NOTE = (
    "DeepSpeed all-reduces whole buckets and keeps a part: 2 (n-1)/n G in place of (n-1)/n G"
)
STAGE_3_NOTE = (
    "a parameter that max_reuse_distance or max_live_parameters lets DeepSpeed keep between its "
    "forward and its backward pass is gathered once, not twice; one of fewer than "
    "persistence_threshold elements too"
)

CASTS_NOTE = (
    "DeepSpeed casts parameters alone: cast your model's inputs too, and what it returns to fp32."
    " Batch norms computed with fp32 copies of their weights."
)
SCALE_NOTE = (
    "DeepSpeed 0.19 does not lower torch_autocast's fp16 loss scale after an overflow. "
    "It skips every later step. Measured was a scale that falls."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Zero(Strategy):
    """DeepSpeed ZeRO: optimizer state (1), gradients (2), parameters (3) sharded.

    Source: Rajbhandari et al., SC 2020, section 5.  Stage 0 shards nothing.
    """

    stage: Literal[0, 1, 2, 3]
    bucket_mb: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 25.0
    """Gradients in one reduction, MiB of fp32.  DeepSpeed holds a buffer of this size."""
    overlap_communication: bool = True
    """Reduce gradients while the backward pass goes on (CUDA streams; no effect on the CPU)."""
    persistence_threshold: Annotated[int, Field(ge=0)] = 100_000
    """Stage 3: parameters of fewer elements stay whole on every rank."""
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
    """With CPU offload: update by DeepSpeed's own Adam, compiled for the host's vector units, as it
    recommends there, and not by torch's.  The first start compiles it, for a minute or more."""

    def for_workload(self, options: WorkloadOptions) -> Self:
        if self.mixed_precision is None and not options.casts_parameters:
            return replace(self, mixed_precision="autocast")
        return self

    def _is_native(self, recipe: Recipe) -> bool:
        left_open: MixedPrecision | None = "autocast" if self.stage == 0 else None
        return is_native(self.mixed_precision or left_open, recipe)

    def check(self, world_size: int, machine: Machine, recipe: Recipe) -> None:
        if importlib.util.find_spec("deepspeed") is None:
            raise StrategyUnavailable(
                self.name, "DeepSpeed is not installed", "pip install deepspeed"
            )
        check_machine(self.name, world_size, machine, recipe, offload_instead=None)
        on_cpu = machine.device_type == "cpu"
        if self.stage == 0 and self._is_native(recipe):
            raise StrategyUnavailable(
                self.name,
                "stage 0 of DeepSpeed's 16-bit engines does not show its fp32 parameters",
                "set mixed_precision to autocast",
            )
        if on_cpu and recipe.precision == "fp16" and self._is_native(recipe):
            raise StrategyUnavailable(
                self.name,
                "DeepSpeed's own fp16 engine needs a CUDA device",
                "set mixed_precision to autocast",
            )
        if recipe.compile != "none" and self.stage == 3:
            raise StrategyUnavailable(
                self.name,
                "stage 3 gathers each layer's parameters inside of what is compiled, where it "
                "falls to pieces",
                "set recipe.compile to none, or use fsdp or zero-2",
            )
        if self.cpu_adam and not recipe.cpu_offload:
            raise StrategyUnavailable(
                self.name,
                "cpu_adam updates what is offloaded, and nothing is",
                "set recipe.cpu_offload to true, or cpu_adam to false",
            )
        optimizer = recipe.optimizer
        if self.cpu_adam and optimizer.name not in ADAMS:
            raise StrategyUnavailable(
                self.name,
                f"cpu_adam is Adam, and recipe.optimizer is {optimizer.name}",
                "use adam or adamw, or set cpu_adam to false",
            )
        if self.cpu_adam and optimizer.implementation != "default":
            raise StrategyUnavailable(
                self.name,
                f"cpu_adam has no {optimizer.implementation} implementation",
                "leave recipe.optimizer.implementation at default, or set cpu_adam to false",
            )
        if recipe.cpu_offload and self.stage == 0:
            raise StrategyUnavailable(
                self.name,
                "stage 0 shards nothing that could be offloaded",
                "use zero-1, zero-2 or zero-3",
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

    def wire_bytes(
        self, size: ModelSize, recipe: Recipe, world_size: int, nodes: int = 1
    ) -> RequiredTraffic:
        """Rajbhandari et al., SC 2020, section 7; from stage 2 on each micro-batch is reduced."""
        if self.stage == 0:
            return all_reduced(size, world_size)
        micro_batches = recipe.gradient_accumulation if self.stage > 1 else 1
        gathers = 2 * micro_batches if self.stage == 3 else 1
        native = self._is_native(recipe)
        held_bytes = PRECISION_BYTES[recipe.precision] if native else FP32_BYTES
        gathered = size.parameters if self.stage == 3 else size.trained_parameters
        return RequiredTraffic(
            traffic=(
                Traffic(
                    kind="reduce_scatter",
                    payload_bytes=micro_batches * size.trained_parameters * FP32_BYTES,
                    ranks=world_size,
                    copied_bytes=micro_batches * 2 * size.trained_parameters * FP32_BYTES,
                ),
                Traffic(
                    kind="all_gather",
                    payload_bytes=gathers * gathered * held_bytes / world_size,
                    ranks=world_size,
                    waited_for=self.stage < 3,
                    calls=gathers * size.units if self.stage == 3 else 1,
                    # From the message, or from the part in fp32 that was updated.
                    copied_bytes=gathers
                    * (2 if self.stage == 3 else 2 / world_size)
                    * gathered
                    * held_bytes,
                ),
            ),
            formula="reduce-scatter, all-gather: "
            f"{times(micro_batches)}(n-1)/n G + {times(gathers)}(n-1)/n P",
            note=STAGE_3_NOTE if self.stage == 3 else REDUCED_WHOLE_NOTE,
        )

    def sent(
        self, size: ModelSize, recipe: Recipe, world_size: int, nodes: int = 1
    ) -> tuple[Traffic, ...]:
        """Stage 3 gathers small parameters one by one after their update, and the others once a
        pass where they stay for the backward pass."""
        traffic = self.wire_bytes(size, recipe, world_size, nodes).traffic
        if self.stage < 3:
            return traffic
        reduced, gathered = traffic
        counts = [
            (rows * columns, count)
            for rows, columns, count in size.trained_matrices
            if rows * columns < self.persistence_threshold
        ]
        small = sum(elements * count for elements, count in counts)
        part = (1 - small / max(1, size.parameters)) * (0.5 if self._stays(size.parameters) else 1)
        once = gathered.payload_bytes / (2 * recipe.gradient_accumulation * max(1, size.parameters))
        return (
            reduced,
            replace(
                gathered,
                payload_bytes=part * gathered.payload_bytes,
                calls=part * gathered.calls,
                copied_bytes=part * gathered.copied_bytes,
            ),
            Traffic(
                kind="all_gather",
                payload_bytes=small * once,
                ranks=world_size,
                calls=sum(count for _, count in counts),
                waited_for=True,
            ),
        )

    def library_work(
        self, size: ModelSize, recipe: Recipe, world_size: int, nodes: int = 1
    ) -> Mapping[str, float]:
        """It updates flat tensors."""
        if self.stage == 3:
            return {"zero-3 tensor": size.trained_tensors}
        return {f"zero-{self.stage}": 1, "zero tensor": size.trained_tensors}

    def _stays(self, elements: float) -> bool:
        """Whether parameters that stage 3 gathers are whole from forward to backward pass."""
        return 2 * elements <= self.max_reuse_distance

    def step_state(
        self,
        units: Sequence[UnitSize],
        recipe: Recipe,
        world_size: int,
        nodes: int = 1,
        *,
        device_type: str = "cuda",
    ) -> StepState:
        """As DeepSpeed 0.19 allocates: fp32 copies of the rank's part, and a bucket or two.

        Stage 3 gathers ahead into one buffer, from which it copies each parameter, and keeps those
        whole that it will use soon.  Offloaded gradients of stages 1 and 2 leave by way of a buffer
        for the largest.
        """
        if self.stage == 0:
            return Strategy.step_state(
                self, units, recipe, world_size, nodes, device_type=device_type
            )
        native = self._is_native(recipe)
        width = PRECISION_BYTES[recipe.precision] if native else FP32_BYTES
        part = 1 / world_size
        held = width * sum(unit.parameters for unit in units)
        whole = width * sum(unit.trained_parameters for unit in units)
        bucket = self.bucket_mb * MiB * width / FP32_BYTES
        double = self.overlap_communication and device_type == "cuda"
        buckets = bucket * (2 if double and self.stage < 3 else 1)
        own = FP32_BYTES * part * sum(unit.trained_parameters for unit in units)
        offloads, stays = recipe.cpu_offload, 0.0 if recipe.cpu_offload else 1.0
        host, always = None, bucket if self.stage == 3 else 0.0
        if offloads:
            if self.stage < 3:
                always = width * max((size for unit in units for size in unit.sizes), default=0)
            gathers = 2 * recipe.gradient_accumulation if self.stage == 3 else 0
            host = HostState(
                held=2 * own + part * held,  # fp32 parameters and gradients, and what is computed
                fetched=gathers * part * held,
                handed_back=part * whole,
                returned=part * held if self.stage < 3 else 0.0,
            )
        there, reduced = self._reduced(units, recipe, int(bucket / width), world_size)
        states = [
            UnitState(
                forward=forward,
                backward=backward + width * of.during + (buckets if self.stage < 3 else 0.0),
                copied=width * of.copied,
                kept_gradients=width * of.kept,
            )
            for (forward, backward), of in zip(self._fetched(units, width), reduced, strict=True)
        ]
        return StepState(
            host=host,
            parameters=held * (stays * part if self.stage == 3 else 1.0)
            + self._small(units, width),
            optimizer_state=stays * own,
            optimizer_share=part,
            gradients=width * there,
            fresh_gradients=1.0 if self.stage == 1 and not there else 0.0,
            buffers=always,
            updating=stays * own,  # the rest is freed before
            flat_update=True,
            units=tuple(states),
        )

    def _reduced(
        self, units: Sequence[UnitSize], recipe: Recipe, bucket: int, ranks: int
    ) -> tuple[float, list[Reduced]]:
        """Elements of gradients all through a step's last pass, and what comes and goes in it."""
        sizes, part = [unit.trained_parameters for unit in units], 1 / ranks
        nothing, there = [Reduced()] * len(units), not recipe.cpu_offload
        again = there and recipe.gradient_accumulation > 1
        if self.stage == 3:
            return there * part * sum(sizes), nothing
        if self.stage == 2:
            reduced = reduced_in_buckets(units, bucket, ranks, keeps=there)
            return again * max(kept_whole(units, ranks)), reduced
        if again:
            return sum(sizes), nothing
        return 0.0, [Reduced(kept=size if there else (1 - part) * size) for size in sizes]

    def _fetched(self, units: Sequence[UnitSize], width: int) -> list[tuple[float, float]]:
        """Bytes of whole parameters in stage 3, in the forward and the backward pass of a unit."""
        large = [width * float(unit.parameters) - self._small([unit], width) for unit in units]
        if self.stage < 3 or not any(large):
            return [(0.0, 0.0)] * len(units)
        total = sum(large)
        live = (
            total
            if self._stays(total / width)
            else min(total, width * float(self.max_live_parameters))
        )
        ahead = width * float(min(PREFETCHED_ELEMENTS, self.max_live_parameters))
        last = max(index for index, size in enumerate(large) if size)
        found, past = [], 0.0
        for index, size in enumerate(large):
            past += size
            message = min(total, max(size, ahead)) if index <= last else 0.0
            found.append((max(size, min(past, live)) + message, max(size, live)))
        return found

    def _small(self, units: Sequence[UnitSize], width: int) -> float:
        """Bytes of parameters that stay whole in stage 3."""
        limit = self.persistence_threshold if self.stage == 3 else 0
        return width * float(sum(size for unit in units for size in unit.sizes if size < limit))

    def resume_blocker(self, recipe: Recipe) -> str | None:
        if recipe.precision == "fp16" and self._is_native(recipe):
            return "a checkpoint does not keep the loss scale of DeepSpeed's fp16 engine"
        return "what DeepSpeed offloads is not kept in a checkpoint" if recipe.cpu_offload else None

    def builds_in_parts(self) -> bool:
        return self.stage == 3

    def loads(self) -> tuple[str, ...]:
        return ("shardmark.strategies.deepspeed.preload",)

    def settings(self, recipe: Recipe) -> Mapping[str, object]:
        settings = common_settings(recipe)
        if self._is_native(recipe):
            own = {"mixed_precision": "native", "gradient_precision": recipe.precision}
            settings |= own
        if self.cpu_adam:
            settings["cpu_adam"] = self.cpu_adam_settings(recipe.optimizer)
        return settings | self._parameter_settings()

    def numerics(self, recipe: Recipe) -> Numerics:
        if recipe.precision == "fp32" or not self._is_native(recipe):
            return ONE_DEVICE
        precision = recipe.precision
        return Numerics(casts=Casts(precision=precision, units="root", gradients=precision))

    def check_model(
        self, workload: Workload, model: nn.Module, world_size: int, nodes: int = 1
    ) -> None:
        from shardmark.strategies.parameters import Kind, check_parameters

        kinds: tuple[Kind, ...] = ("scalar", "sparse", "empty", "other types")
        check_parameters(self.name, model, "DeepSpeed", *kinds)

    def start(self, workload: Workload, recipe: Recipe, context: RankContext) -> ZeroWorker:
        from shardmark.strategies.deepspeed.worker import start_engine

        return start_engine(
            workload,
            recipe,
            context,
            config=self.config(recipe, context.device.type),
            casts=self._is_native(recipe),
            scales_otherwise=self._scales_otherwise(recipe),
            cpu_adam=self.cpu_adam_settings(recipe.optimizer) if self.cpu_adam else None,
            check=lambda model: self.check_model(workload, model, context.world_size),
        )

    def cpu_adam_settings(self, optimizer: Optimizer) -> dict[str, Any]:
        """What `DeepSpeedCPUAdam` would otherwise default, beside the recipe's own keys."""
        return {
            "adamw_mode": optimizer.name == "adamw",
            "bias_correction": True,
            "amsgrad": False,
            "fp32_optimizer_states": True,
        }

    def config(self, recipe: Recipe, device_type: str) -> dict[str, Any]:
        """DeepSpeed's configuration with every default that touches the mathematics written out."""
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
            "communication_data_type": "fp32",
            "zero_optimization": zero,
            "steps_per_print": 2**31,
            "wall_clock_breakdown": False,
            # It would wait for the device twice in each micro-batch.
            "timers": {"throughput": {"enabled": False}},
            **self._precision(recipe),
        }

    def _parameter_settings(self) -> dict[str, object]:
        """How stage 3 gathers and frees parameters: DeepSpeed's keys, each default written out."""
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

    def _scales_otherwise(self, recipe: Recipe) -> bool:
        """Whether DeepSpeed would scale the loss in a way of its own; see `scale_losses`."""
        autocasts = not self._is_native(recipe)
        return recipe.precision == "fp16" and autocasts and self.stage > 0

    def _precision(self, recipe: Recipe) -> dict[str, Any]:
        if recipe.precision == "fp32":
            return {}
        if not self._is_native(recipe):
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
        # Its default, written out: gradients are added in the type of the parameters.
        types = {"data_types": {"grad_accum_dtype": recipe.precision}}
        if recipe.precision == "bf16":
            # A step that is not finite is skipped in fp16 alone, as everywhere.
            return types | {"bf16": {"enabled": True, "check_grad_overflow": False}}
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

    def launch_configuration(
        self, recipe: Recipe, layout: Layout, device_type: str
    ) -> LaunchConfiguration:
        return LaunchConfiguration(
            wrapper="deepspeed.initialize",
            # The rest stands in DeepSpeed's own file, beside which Accelerate takes no more.
            # On a CPU it would train replicas, or each rank alone, without a word.
            accelerate=None
            if device_type == "cpu"
            else {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero3_init_flag": False}},
            deepspeed=self.config(recipe, device_type),
            notes=(
                f"Hand {'DeepSpeedCPUAdam' if self.cpu_adam else 'your own optimizer'} to"
                " deepspeed.initialize: the file names none.",
                *((CASTS_NOTE,) if self._is_native(recipe) else ()),
                *((SCALE_NOTE,) if self._scales_otherwise(recipe) else ()),
            ),
        )
