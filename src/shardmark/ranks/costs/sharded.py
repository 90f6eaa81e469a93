"""Costs of strategies that shard parameters, gradients or optimizer state over the ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
    updated_tensor,
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

    def _reductions(self, recipe: Recipe) -> int:
        """Number of times that a step reduces each gradient."""
        return recipe.gradient_accumulation if self.strategy.reduce_each_pass else 1

    def _units(self, size: ModelSize) -> int:
        return 1 if self.strategy.wrap == "root" else size.units

    def _gathered_bytes(self, recipe: Recipe) -> int:
        """Bytes of one gathered element."""
        native = is_native(self.strategy.mixed_precision, recipe)
        return PRECISION_BYTES[recipe.precision if native else recipe.weights]

    def required_traffic(self, cell: Cell) -> RequiredTraffic:
        """Each micro-batch gathers; by default only the last one reduces."""
        size, world_size = cell.size, cell.world_size
        group = self.strategy.group(world_size, cell.nodes)
        gathers, units = self._gathers(cell.recipe), self._units(size)
        reductions = self._reductions(cell.recipe)
        parameter_bytes = stored_bytes(size, self._gathered_bytes(cell.recipe))
        gradient_bytes = reductions * size.trained_parameters * cell.weight_bytes
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
                calls=reductions * units,
                copied_bytes=2 * gradient_bytes,
            ),
        )
        if group == world_size:
            return RequiredTraffic(
                traffic=sharded,
                formula=f"{times(gathers)}all-gather, {times(reductions)}reduce-scatter:"
                f" {times(gathers)}(n-1)/n P + {times(reductions)}(n-1)/n G",
            )
        across = Traffic(
            kind="all_reduce",
            payload_bytes=gradient_bytes / group,
            ranks=world_size // group,
            rank_stride=group,
            calls=reductions * units,
        )
        gradients = "(s-1)/s G + 2 (r-1)/r G/s"
        return RequiredTraffic(
            traffic=(*sharded, across),
            formula=f"{times(gathers)}all-gather and {times(reductions)}reduce-scatter in a group"
            f" of s, all-reduce across r groups: {times(gathers)}(s-1)/s P + "
            + (gradients if reductions == 1 else f"{times(reductions)}({gradients})"),
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
            "fsdp unit": self._reductions(cell.recipe) * units,
            "fsdp tensor": cell.size.trained_tensors,
        }

    def step_state(self, cell: Cell) -> StepState:
        """State as `fully_shard` of torch 2.15 allocates and frees it, here of three blocks:

        ```text
                     forward pass        backward pass
        in block     1     2     3       3     2     1
        root         P     P     P       P     P     P
        block 1     M,P    M                   P     P
        block 2           M,P    M       P     P     G
        block 3                 M,P      P     G

        P  gathered parameters
        M  message of a gather, from which they are copied; it stays until the next block's exists
        G  message of gradients; it stays until the next block's exists
        ```

        So the forward pass enters a block with the messages of two, and the backward pass gathers
        one block ahead.  Without resharding, P stays from the forward to the backward pass.
        """
        recipe, weight_bytes = cell.recipe, cell.weight_bytes
        group = self.strategy.group(cell.world_size, cell.nodes)
        width = self._gathered_bytes(recipe)
        padding = Padding.create(cell.size, group, width)
        gradient_width, part = padding.gradients * weight_bytes, padding.gradients / group
        reductions, offloads = self._reductions(recipe), recipe.cpu_offload
        accumulates = recipe.gradient_accumulation > reductions
        device_part = 0.0 if offloads else part
        blocks = [unit.block and self.strategy.wrap != "root" for unit in cell.units]
        full = [padding.parameters * stored_bytes(unit, width) for unit in cell.units]
        gathered = [block * size for block, size in zip(blocks, full, strict=True)]
        messages = [
            block * gradient_width * unit.trained_parameters
            for block, unit in zip(blocks, cell.units, strict=True)
        ]
        # The root retains full gradients.  Passes before the last one leave full gradients, or
        # shards of them if each pass reduces.
        before = 1.0 if accumulates else device_part if reductions > 1 else 0.0
        retained = [
            weight_bytes * unit.trained_parameters * ((device_part if block else 1.0) - before)
            for block, unit in zip(blocks, cell.units, strict=True)
        ]
        shard = padding.parameters / group * cell.stored_bytes
        gradient_shard = part * weight_bytes * cell.all_trained_parameters
        host = HostState(
            resident=shard + gradient_shard,
            fetched=self._gathers(recipe) * shard,
            handed_back=reductions * gradient_shard,
        )
        copies = 2 if cell.device_type == "cpu" else 1  # gloo gathers into memory of its own
        root = sum(full) - sum(gathered)
        states = self._unit_states(gathered, messages, root, copies)
        return StepState(
            host=host if offloads else None,
            parameters=0.0 if offloads else shard,
            optimizer_share=part,
            gradients=before * weight_bytes * cell.all_trained_parameters,
            fresh_gradients=0.0 if accumulates else 1.0,
            units=tuple(
                replace(state, retained_gradients=size)
                for state, size in zip(states, retained, strict=True)
            ),
        )

    def _unit_states(
        self, gathered: Sequence[float], messages: Sequence[float], root: float, copies: int
    ) -> Iterator[UnitState]:
        """Yield the bytes of P, M and G at each unit, from those of its P and G alone."""
        keeps = not self.strategy.reshard_after_forward
        before = last = 0.0  # gathered bytes of all earlier blocks, and of the last of them
        for index, size in enumerate(gathered):
            message = messages[index]
            later_message = next(filter(None, messages[index + 1 :]), 0.0)
            ahead = root + ((before if keeps else 0.0) or last)
            backward = ahead + size + later_message
            entering = (last or root) + copies * size if size else 0.0
            yield UnitState(
                entering_forward=root + entering + keeps * before,
                forward=root + (2 * size or (0.0 if before else root)) + keeps * before,
                entering_backward=backward + (0.0 if keeps else (copies - 1) * last),
                backward=backward,
                reducing=ahead + message if message else 0.0,
            )
            before += size
            last = size or last


class FSDP1Costs(FSDPCosts):
    """Costs of torch's first FSDP: those of FSDP2 with flat parameters, which need no padding."""

    def __init__(self, strategy: FullyShardedFirst) -> None:
        second = FSDP(
            name=strategy.name,
            reshard_after_forward=strategy.reshard_after_forward,
            wrap=strategy.wrap,
            mixed_precision="autocast",
            reduce_each_pass=strategy.reduce_each_pass,
        )
        super().__init__(second)

    def _gathers(self, recipe: Recipe) -> int:
        """Without resharding, passes that do not reduce leave parameters gathered."""
        reshards = self.strategy.reshard_after_forward
        return super()._gathers(recipe) if reshards else self._reductions(recipe)

    def required_traffic(self, cell: Cell) -> RequiredTraffic:
        required = super().required_traffic(cell)
        gathered, reduced = required.traffic
        return replace(
            required,
            traffic=(replace(gathered, copied_bytes=0.0), reduced),
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
        update = {updated_tensor(cell.recipe): cell.size.trained_tensors}
        return {**update, "fsdp1": 1, "fsdp1 gather": gathers}

    def step_state(self, cell: Cell) -> StepState:
        """An approximation: the state of FSDP2 in its own mixed precision.

        A flat parameter with any trained part has a gradient of its full size.
        """
        units = [
            replace(unit, trained_parameters=unit.parameters) if unit.trained_parameters else unit
            for unit in cell.units
        ]
        flat = replace(cell, units=units, size=replace(cell.size, trained_matrices=()))
        return FSDPCosts(replace(self.strategy, mixed_precision=None)).step_state(flat)


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
        """State as DeepSpeed 0.19 allocates it, of which a rank of n holds:

        ```text
                       stage 1             stage 2                 stage 3
        parameters     all                 all                     1/n, and small ones in full
        to be updated  1/n                 1/n                     1/n, in the type of the weights
        gradients      all                 parameters with any     1/n, all the time
                                           part in its 1/n
        while they     2 buckets,          2 buckets,              1 bucket, all the time, in the
        are reduced    or 1                or 1                    type of the weights
        gathered       -                   -                       a buffer ahead, from which each
                                                                   parameter is copied, and those
                                                                   that are used again soon
        ```

        Offload moves what is 1/n to the host; gradients of stages 1 and 2 leave by way of a buffer
        for the largest one.
        """
        stage, units, recipe = self.strategy.stage, cell.units, cell.recipe
        if stage == 0:
            return super().step_state(cell)
        width, part = self._element_bytes(recipe), 1 / cell.world_size
        parameter_bytes = sum(stored_bytes(unit, width) for unit in units)
        updated_shard = cell.weight_bytes * part * cell.all_trained_parameters
        on_device = 0.0 if recipe.cpu_offload else 1.0
        bucket_elements = int(self.strategy.bucket_mb * MiB / FP32_BYTES)
        bucket = float(bucket_elements * (cell.weight_bytes if stage == 3 else width))
        overlaps = self.strategy.overlap_communication and cell.device_type == "cuda"
        buckets = bucket * (2 if overlaps else 1) if stage < 3 else 0.0
        buffers = bucket if stage == 3 else 0.0
        if recipe.cpu_offload and stage < 3:
            buffers = width * max((size for unit in units for size in unit.sizes), default=0)
        early_elements, bucket_states = self._reduced(cell, bucket_elements)
        gathered = self._gathered_bytes(units, width)
        return StepState(
            host=self._host(cell, part * parameter_bytes, updated_shard),
            parameters=parameter_bytes * (on_device * part if stage == 3 else 1.0)
            + self._small_bytes(units, width),
            optimizer_state=on_device * updated_shard,
            optimizer_share=part,
            gradients=width * early_elements,
            fresh_gradients=1.0 if stage == 1 and not early_elements else 0.0,
            buffers=buffers,
            updating=on_device * updated_shard,  # the rest is freed before
            flat_update=True,
            units=tuple(
                UnitState(
                    forward=forward,
                    backward=backward + width * reduced.during + buckets,
                    copied=width * reduced.copied,
                    retained_gradients=width * reduced.retained,
                )
                for (forward, backward), reduced in zip(gathered, bucket_states, strict=True)
            ),
        )

    def _host(self, cell: Cell, shard: float, updated_shard: float) -> HostState | None:
        """Offloaded state; `shard` is the rank's part of the bytes that are computed with."""
        if not cell.recipe.cpu_offload:
            return None
        stage_3 = self.strategy.stage == 3
        gradient_bytes = self._element_bytes(cell.recipe) * cell.all_trained_parameters
        return HostState(
            # fp32 parameters and gradients, and the parameters that are computed with
            resident=2 * updated_shard + shard,
            fetched=2 * cell.recipe.gradient_accumulation * shard if stage_3 else 0.0,
            handed_back=1 / cell.world_size * gradient_bytes,
            returned=0.0 if stage_3 else shard,
            fused_update=True,  # DeepSpeedCPUAdam
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
