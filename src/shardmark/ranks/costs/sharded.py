"""Costs of strategies that shard parameters, gradients or optimizer state over the ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from shardmark.base.recipe import Recipe
from shardmark.base.traffic import ModelSize, RequiredTraffic, Traffic
from shardmark.ranks.costs.base import (
    FP32_BYTES,
    PRECISION_BYTES,
    Cell,
    Costs,
    HostState,
    StepState,
    UnitSize,
    UnitState,
    all_reduced,
    buckets,
    stored_bytes,
    times,
)
from shardmark.ranks.costs.zero_buckets import BucketState, reduced_in_buckets, retained_elements
from shardmark.ranks.strategies.base import is_native
from shardmark.ranks.strategies.deepspeed.strategy import PREFETCHED_ELEMENTS, Zero
from shardmark.ranks.strategies.fsdp import FSDP
from shardmark.ranks.strategies.fsdp1.strategy import FullyShardedFirst

MiB = 2**20
ROOT_NOTE = "the root's own parameters, outside of all blocks, are gathered once, not twice"
REDUCED_WHOLE_NOTE = (
    "DeepSpeed all-reduces whole buckets and keeps a part: 2 (n-1)/n G in place of (n-1)/n G"
)
STAGE_3_NOTE = (
    "a parameter that max_reuse_distance or max_live_parameters lets DeepSpeed keep between its "
    "forward and its backward pass is gathered once, not twice; one of fewer than "
    "persistence_threshold elements too"
)


class Padding(NamedTuple):
    """Bytes with the rows that FSDP2 adds, over bytes without them.

    FSDP2 pads each parameter so that every rank of a group has equally many of its rows.  Shapes of
    frozen parameters are not known; they count as unpadded.
    """

    parameters: float
    gradients: float

    @classmethod
    def create(cls, size: ModelSize, group: int, width: int) -> Padding:
        """`width` is the number of bytes of a gathered element."""
        added = sum(
            (-rows % group) * columns * count for rows, columns, count in size.trained_matrices
        )
        return cls(
            1 + width * added / max(1, stored_bytes(size, width)),
            1 + added / max(1, size.trained_parameters),
        )


class FSDPCosts(Costs[FSDP]):
    """Costs of FSDP2: parameters are gathered unit by unit, gradients are reduce-scattered."""

    def _gathers(self, recipe: Recipe) -> int:
        """Number of times that a step gathers each parameter."""
        return (2 if self.strategy.reshard_after_forward else 1) * recipe.gradient_accumulation

    def _units(self, size: ModelSize) -> int:
        return 1 if self.strategy.wrap == "root" else size.units

    def _gathered_bytes(self, recipe: Recipe) -> int:
        """Bytes of one gathered element."""
        native = is_native(self.strategy.mixed_precision, recipe)
        return PRECISION_BYTES[recipe.precision if native else recipe.weights]

    def required_traffic(self, cell: Cell) -> RequiredTraffic:
        """Micro-batches before the last one reduce nothing, and gather like the last one."""
        size, world_size = cell.size, cell.world_size
        group = self.strategy.group(world_size, cell.nodes)
        gathers, units = self._gathers(cell.recipe), self._units(size)
        parameter_bytes = stored_bytes(size, self._gathered_bytes(cell.recipe))
        gradient_bytes = size.trained_parameters * cell.weight_bytes
        sharded = (
            Traffic(
                kind="all_gather",
                payload_bytes=gathers * parameter_bytes / group,
                ranks=group,
                calls=gathers * units,
                copied_bytes=gathers * 2 * parameter_bytes,
            ),
            Traffic(
                kind="reduce_scatter",
                payload_bytes=gradient_bytes,
                ranks=group,
                calls=units,
                copied_bytes=2 * gradient_bytes,
            ),
        )
        if group == world_size:
            return RequiredTraffic(
                traffic=sharded,
                formula=f"{times(gathers)}all-gather, reduce-scatter: {times(gathers)}(n-1)/n P"
                " + (n-1)/n G",
            )
        across = Traffic(
            kind="all_reduce",
            payload_bytes=gradient_bytes / group,
            ranks=world_size // group,
            rank_stride=group,
            calls=units,
        )
        return RequiredTraffic(
            traffic=(*sharded, across),
            formula=f"{times(gathers)}all-gather and reduce-scatter in a group of s, all-reduce"
            f" across r groups: {times(gathers)}(s-1)/s P + (s-1)/s G + 2 (r-1)/r G/s",
        )

    def library_traffic(self, cell: Cell) -> tuple[Traffic, ...]:
        """The required traffic with the rows that pad each parameter to equal shards."""
        group = self.strategy.group(cell.world_size, cell.nodes)
        padding = Padding.create(cell.size, group, self._gathered_bytes(cell.recipe))
        traffic = []
        for part in self.required_traffic(cell).traffic:
            factor = padding.parameters if part.kind == "all_gather" else padding.gradients
            payload_bytes, copied_bytes = factor * part.payload_bytes, factor * part.copied_bytes
            traffic.append(replace(part, payload_bytes=payload_bytes, copied_bytes=copied_bytes))
        return tuple(traffic)

    def library_work(self, cell: Cell) -> Mapping[str, float]:
        units = self._units(cell.size)
        return {
            "fsdp": 1,
            "fsdp gather": self._gathers(cell.recipe) * units,
            "fsdp unit": units,
            "fsdp tensor": cell.size.trained_tensors,
        }

    def step_state(self, cell: Cell) -> StepState:
        """State as `fully_shard` of torch 2.15 allocates and frees it.

        A gather has a buffer for its message, from which parameters are copied.  In the forward
        pass the buffer stays until the next unit's is allocated.  The backward pass gathers one
        unit ahead, and keeps the message of the gradients that were reduced last.
        """
        units, recipe = cell.units, cell.recipe
        group = self.strategy.group(cell.world_size, cell.nodes)
        width = self._gathered_bytes(recipe)
        padding = Padding.create(cell.size, group, width)
        gradient_width, part = padding.gradients * cell.weight_bytes, padding.gradients / group
        blocks = [unit.block and self.strategy.wrap != "root" for unit in units]
        unit_bytes = [padding.parameters * stored_bytes(unit, width) for unit in units]
        gathered = [size if block else 0.0 for size, block in zip(unit_bytes, blocks, strict=True)]
        root = sum(unit_bytes) - sum(gathered)
        messages = [
            gradient_width * unit.trained_parameters if block else 0.0
            for unit, block in zip(units, blocks, strict=True)
        ]
        trained = cell.all_trained_parameters
        accumulates = recipe.gradient_accumulation > 1
        early_gradients = cell.weight_bytes * trained if accumulates else 0.0
        shard = padding.parameters / group * cell.stored_bytes
        gradient_shard = part * cell.weight_bytes * trained
        offloads = recipe.cpu_offload
        host = HostState(
            resident=shard + gradient_shard,
            fetched=self._gathers(recipe) * shard,
            handed_back=gradient_shard,
        )
        on_device = 0.0 if offloads else part
        retained = [
            cell.weight_bytes
            * unit.trained_parameters
            * ((on_device if block else 1.0) - bool(early_gradients))
            for unit, block in zip(units, blocks, strict=True)
        ]
        copies = 2 if cell.device_type == "cpu" else 1  # gloo gathers into memory of its own
        return StepState(
            host=host if offloads else None,
            parameters=0.0 if offloads else shard,
            optimizer_share=part,
            gradients=early_gradients,
            fresh_gradients=0.0 if accumulates else 1.0,
            units=tuple(
                replace(forward, **backward, retained_gradients=size)
                for forward, backward, size in zip(
                    self._forward(gathered, root, copies),
                    self._backward(gathered, messages, root, copies),
                    retained,
                    strict=True,
                )
            ),
        )

    def _forward(self, gathered: Sequence[float], root: float, copies: int) -> list[UnitState]:
        """Bytes of gathered parameters and messages in the forward pass of each unit."""
        keeps = 0.0 if self.strategy.reshard_after_forward else 1.0
        states = []
        before, message = 0.0, root
        for size in gathered:
            messages = message + copies * size if size else 0.0
            states.append(
                UnitState(
                    entering_forward=root + messages + keeps * before,
                    forward=root + (2 * size or (0.0 if before else root)) + keeps * before,
                )
            )
            message = size or message
            before += size
        return states

    def _backward(
        self, gathered: Sequence[float], messages: Sequence[float], root: float, copies: int
    ) -> list[dict[str, float]]:
        """Fields of `UnitState` about the backward pass of each unit.

        `messages` are the bytes of each unit's gradients as they are sent.
        """
        keeps = not self.strategy.reshard_after_forward
        states: list[dict[str, float]] = []
        last_message = 0.0
        for index in reversed(range(len(gathered))):
            prefetched = next((size for size in reversed(gathered[:index]) if size), 0.0)
            others = root + ((sum(gathered[:index]) if keeps else 0.0) or prefetched)
            backward = others + gathered[index] + last_message
            last_message = messages[index] or last_message
            states.append(
                {
                    "entering_backward": backward + (0.0 if keeps else (copies - 1) * prefetched),
                    "backward": backward,
                    "reducing": others + messages[index] if messages[index] else 0.0,
                }
            )
        return states[::-1]


class _FlatUnit(NamedTuple):
    """A unit whose parameters are parts of one flat parameter."""

    parameters: int
    trained_parameters: int
    sizes: tuple[int, ...]
    block: bool
    frozen_element_bytes: float
    replicated_fraction: float

    @classmethod
    def create(cls, unit: UnitSize) -> _FlatUnit:
        trained = unit.parameters if unit.trained_parameters else 0
        return cls(
            unit.parameters,
            trained,
            unit.sizes,
            unit.block,
            unit.frozen_element_bytes,
            unit.replicated_fraction,
        )


class FSDP1Costs(Costs[FullyShardedFirst]):
    """Costs of torch's first FSDP, which gathers flat parameters unit by unit."""

    def _gathers(self, recipe: Recipe) -> int:
        return 2 * recipe.gradient_accumulation if self.strategy.reshard_after_forward else 1

    def _units(self, size: ModelSize) -> int:
        return 1 if self.strategy.wrap == "root" else size.units

    def required_traffic(self, cell: Cell) -> RequiredTraffic:
        """Without resharding, micro-batches before the last one leave parameters gathered."""
        gathers, units = self._gathers(cell.recipe), self._units(cell.size)
        gradient_bytes = cell.size.trained_parameters * cell.weight_bytes
        parameter_bytes = stored_bytes(cell.size, cell.weight_bytes)
        return RequiredTraffic(
            traffic=(
                Traffic(
                    kind="all_gather",
                    payload_bytes=gathers * parameter_bytes / cell.world_size,
                    ranks=cell.world_size,
                    calls=gathers * units,
                ),
                Traffic(
                    kind="reduce_scatter",
                    payload_bytes=gradient_bytes,
                    ranks=cell.world_size,
                    calls=units,
                    copied_bytes=2 * gradient_bytes,
                ),
            ),
            formula=f"{times(gathers)}all-gather, reduce-scatter: {times(gathers)}(n-1)/n P"
            " + (n-1)/n G",
            note=ROOT_NOTE if self.strategy.reshard_after_forward else None,
        )

    def library_traffic(self, cell: Cell) -> tuple[Traffic, ...]:
        """The gradient of a flat parameter includes that of its frozen parts, which are zeros."""
        gathered, reduced = self.required_traffic(cell).traffic
        mixed, trained = cell.size.mixed_parameters, max(1, cell.size.trained_parameters)
        factor = 1.0 if mixed is None else mixed / trained
        return gathered, replace(
            reduced,
            payload_bytes=factor * reduced.payload_bytes,
            copied_bytes=factor * reduced.copied_bytes,
        )

    def library_work(self, cell: Cell) -> Mapping[str, float]:
        gathers = self._gathers(cell.recipe) * self._units(cell.size)
        return {**super().library_work(cell), "fsdp1": 1, "fsdp1 gather": gathers}

    def step_state(self, cell: Cell) -> StepState:
        """An approximation: the state of FSDP2 with the same options, without its padding.

        A flat parameter with any trained part has a gradient of its full size.
        """
        units = [_FlatUnit.create(unit) for unit in cell.units]
        second = FSDP(
            reshard_after_forward=self.strategy.reshard_after_forward, wrap=self.strategy.wrap
        )
        size = replace(cell.size, trained_matrices=())
        return FSDPCosts(second).step_state(replace(cell, units=units, size=size))


class ZeroCosts(Costs[Zero]):
    """Costs of DeepSpeed's ZeRO by its stage."""

    def _element_bytes(self, recipe: Recipe) -> int:
        """Bytes of one parameter as DeepSpeed computes with it."""
        native = self.strategy.is_native(recipe)
        return PRECISION_BYTES[recipe.precision if native else recipe.weights]

    def required_traffic(self, cell: Cell) -> RequiredTraffic:
        """From stage 2 on each micro-batch is reduced.

        Source: Rajbhandari et al., SC 2020, section 7.
        """
        size, recipe, stage = cell.size, cell.recipe, self.strategy.stage
        if stage == 0:
            return all_reduced(cell, bucket_mb=self.strategy.bucket_mb)
        micro_batches = recipe.gradient_accumulation if stage > 1 else 1
        gathers = 2 * micro_batches if stage == 3 else 1
        width = self._element_bytes(recipe)
        trained_bytes = width * size.trained_parameters
        gathered_bytes = gathers * (stored_bytes(size, width) if stage == 3 else trained_bytes)
        reduced_bytes = micro_batches * size.trained_parameters * cell.weight_bytes
        return RequiredTraffic(
            traffic=(
                Traffic(
                    kind="reduce_scatter",
                    payload_bytes=reduced_bytes,
                    ranks=cell.world_size,
                    calls=buckets(reduced_bytes, self.strategy.bucket_mb),
                    copied_bytes=2 * reduced_bytes,
                ),
                Traffic(
                    kind="all_gather",
                    payload_bytes=gathered_bytes / cell.world_size,
                    ranks=cell.world_size,
                    waited_for=stage < 3,
                    calls=gathers * size.units
                    if stage == 3
                    else buckets(gathered_bytes, self.strategy.bucket_mb),
                    # Copied from the message, or from the shard in fp32 that was updated.
                    copied_bytes=(2 if stage == 3 else 2 / cell.world_size) * gathered_bytes,
                ),
            ),
            formula="reduce-scatter, all-gather: "
            f"{times(micro_batches)}(n-1)/n G + {times(gathers)}(n-1)/n P",
            note=STAGE_3_NOTE if stage == 3 else REDUCED_WHOLE_NOTE,
        )

    def library_traffic(self, cell: Cell) -> tuple[Traffic, ...]:
        """Stage 3 gathers small parameters one by one after their update.

        It gathers the others once a pass where they stay gathered for the backward pass.
        """
        size, traffic = cell.size, self.required_traffic(cell).traffic
        if self.strategy.stage < 3:
            return traffic
        reduced, gathered = traffic
        counts = [
            (rows * columns, count)
            for rows, columns, count in size.trained_matrices
            if rows * columns < self.strategy.persistence_threshold
        ]
        small = sum(elements * count for elements, count in counts)
        stays = self._stays_gathered(size.parameters)
        fraction = (1 - small / max(1, size.parameters)) * (0.5 if stays else 1)
        passes = 2 * cell.recipe.gradient_accumulation
        element_bytes = gathered.payload_bytes / (passes * max(1, size.parameters))
        return (
            reduced,
            replace(
                gathered,
                payload_bytes=fraction * gathered.payload_bytes,
                calls=fraction * gathered.calls,
                copied_bytes=fraction * gathered.copied_bytes,
            ),
            Traffic(
                kind="all_gather",
                payload_bytes=small * element_bytes,
                ranks=cell.world_size,
                calls=sum(count for _, count in counts),
                waited_for=True,
            ),
        )

    def library_work(self, cell: Cell) -> Mapping[str, float]:
        """DeepSpeed updates flat tensors."""
        stage, tensors = self.strategy.stage, cell.size.trained_tensors
        return (
            {"zero-3 tensor": tensors}
            if stage == 3
            else {f"zero-{stage}": 1, "zero tensor": tensors}
        )

    def _stays_gathered(self, elements: float) -> bool:
        """True if stage 3 keeps gathered parameters from the forward to the backward pass."""
        return 2 * elements <= self.strategy.max_reuse_distance

    def step_state(self, cell: Cell) -> StepState:
        """State as DeepSpeed 0.19 allocates it: copies of the rank's shard, and buckets.

        Buckets of stages 1 and 2 have the type of the gradients, the bucket of stage 3 that of the
        reduction, which is the type of the weights.
        Stage 3 gathers ahead into one buffer, from which it copies each parameter, and keeps
        parameters gathered that it uses soon.  Offloaded gradients of stages 1 and 2 leave by way
        of a buffer for the largest one.
        """
        stage, units, recipe = self.strategy.stage, cell.units, cell.recipe
        if stage == 0:
            return super().step_state(cell)
        width, part = self._element_bytes(recipe), 1 / cell.world_size
        parameter_bytes = sum(stored_bytes(unit, width) for unit in units)
        gradient_bytes = width * cell.all_trained_parameters
        updated_shard = cell.weight_bytes * part * cell.all_trained_parameters
        bucket_elements = int(self.strategy.bucket_mb * MiB / FP32_BYTES)
        bucket = float(bucket_elements * (cell.weight_bytes if stage == 3 else width))
        overlaps = self.strategy.overlap_communication and cell.device_type == "cuda"
        buckets = bucket * (2 if overlaps else 1) if stage < 3 else 0.0
        offloads, on_device = recipe.cpu_offload, 0.0 if recipe.cpu_offload else 1.0
        host, buffers = None, bucket if stage == 3 else 0.0
        if offloads:
            if stage < 3:
                buffers = width * max((size for unit in units for size in unit.sizes), default=0)
            gathers = 2 * recipe.gradient_accumulation if stage == 3 else 0
            host = HostState(
                # fp32 parameters and gradients, and the parameters that are computed with
                resident=2 * updated_shard + part * parameter_bytes,
                fetched=gathers * part * parameter_bytes,
                handed_back=part * gradient_bytes,
                returned=part * parameter_bytes if stage < 3 else 0.0,
                fused_update=True,  # DeepSpeedCPUAdam
            )
        early_elements, bucket_states = self._reduced(cell, bucket_elements)
        states = [
            UnitState(
                forward=forward,
                backward=backward + width * reduced.during + buckets,
                copied=width * reduced.copied,
                retained_gradients=width * reduced.retained,
            )
            for (forward, backward), reduced in zip(
                self._gathered_bytes(units, width), bucket_states, strict=True
            )
        ]
        return StepState(
            host=host,
            parameters=parameter_bytes * (on_device * part if stage == 3 else 1.0)
            + self._small_bytes(units, width),
            optimizer_state=on_device * updated_shard,
            optimizer_share=part,
            gradients=width * early_elements,
            fresh_gradients=1.0 if stage == 1 and not early_elements else 0.0,
            buffers=buffers,
            updating=on_device * updated_shard,  # the rest is freed before
            flat_update=True,
            units=tuple(states),
        )

    def _reduced(self, cell: Cell, bucket: int) -> tuple[float, list[BucketState]]:
        """Gradient elements that exist all through the last pass, and the buckets of each unit."""
        units, part = cell.units, 1 / cell.world_size
        sizes = [unit.trained_parameters for unit in units]
        on_device = not cell.recipe.cpu_offload
        accumulates = on_device and cell.recipe.gradient_accumulation > 1
        if self.strategy.stage == 3:
            return on_device * part * sum(sizes), [BucketState()] * len(units)
        if self.strategy.stage == 2:
            states = reduced_in_buckets(units, bucket, cell.world_size, retains=on_device)
            return accumulates * max(retained_elements(units, cell.world_size)), states
        if accumulates:
            return sum(sizes), [BucketState()] * len(units)
        fraction = 1 if on_device else 1 - part
        return 0.0, [BucketState(retained=fraction * size) for size in sizes]

    def _gathered_bytes(self, units: Sequence[UnitSize], width: int) -> list[tuple[float, float]]:
        """Gathered bytes of stage 3 in the forward and in the backward pass of each unit."""
        large = [stored_bytes(unit, width) - self._small_bytes([unit], width) for unit in units]
        if self.strategy.stage < 3 or not any(large):
            return [(0.0, 0.0)] * len(units)
        total, live_elements = sum(large), self.strategy.max_live_parameters
        live = total if self._stays_gathered(total / width) else min(total, width * live_elements)
        ahead = width * float(min(PREFETCHED_ELEMENTS, live_elements))
        last = max(index for index, size in enumerate(large) if size)
        states, so_far = [], 0.0
        for index, size in enumerate(large):
            so_far += size
            message = min(total, max(size, ahead)) if index <= last else 0.0
            states.append((max(size, min(so_far, live)) + message, max(size, live)))
        return states

    def _small_bytes(self, units: Sequence[UnitSize], width: int) -> float:
        """Bytes of parameters that stage 3 never shards."""
        limit = self.strategy.persistence_threshold if self.strategy.stage == 3 else 0
        return width * float(sum(size for unit in units for size in unit.sizes if size < limit))
