"""Costs of strategies with a full copy of the model on every rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TypeVar

from shardmark.base.numerics import PowerSGD
from shardmark.base.traffic import ModelSize, RequiredTraffic, Traffic
from shardmark.ranks.costs.base import (
    FP32_BYTES,
    Cell,
    Costs,
    StepState,
    UnitState,
    all_reduced,
    buckets,
    stored_bytes,
    updated_tensor,
)
from shardmark.ranks.strategies.base import Strategy
from shardmark.ranks.strategies.data_parallel import DataParallel
from shardmark.ranks.strategies.ddp import DDP
from shardmark.ranks.strategies.zro.strategy import ZeroRedundancy

UNUSED_NOTE = "find_unused_parameters also all-reduces 4 bytes for each parameter tensor"
POWER_SGD_ACCESSES = 15
"""Reads and writes of each fp32 gradient by torch's hook: the error is added and computed again (3
each), a clone, stacking of matrices and back (2 each), two products that read it and one that
writes it."""
POWER_SGD_CALLS = 3
"""Number of all-reduces of a bucket: one for each factor, and one for uncompressed gradients."""
COALESCED_MB = 250.0
"""MiB of tensors that `torch.nn.parallel.comm` sends together."""
CAST_ACCESSES = 4
"""Accesses of each gradient in units of its fp32 bytes: cast, divided, and cast back."""
D = TypeVar("D", bound=DDP)


class ReplicaCosts(Costs[Strategy]):
    """Costs of a single process, which sends nothing."""

    def required_traffic(self, cell: Cell) -> RequiredTraffic:  # noqa: ARG002
        return RequiredTraffic(traffic=(), formula="nothing")


class DataParallelCosts(Costs[DataParallel]):
    """Costs of one process that copies the model to all devices in each step."""

    def required_traffic(self, cell: Cell) -> RequiredTraffic:  # noqa: ARG002
        return RequiredTraffic(traffic=(), formula="nothing between processes")

    def library_traffic(self, cell: Cell) -> tuple[Traffic, ...]:
        """The first device sends parameters to the others, and sums up their gradients.

        Nothing hides it: replicas are complete before the forward pass begins, and gradients are
        summed up when the backward pass has ended.
        """
        passes, devices = cell.recipe.gradient_accumulation, self.driven_devices(cell)
        if devices == 1:
            return ()
        return tuple(
            Traffic(
                kind=kind,
                payload_bytes=passes * payload,
                ranks=devices,
                waited_for=True,
                calls=passes * buckets(payload, COALESCED_MB),
            )
            for kind, payload in (
                ("broadcast", stored_bytes(cell.size)),
                ("reduce", FP32_BYTES * cell.size.trained_parameters),
            )
        )

    def driven_devices(self, cell: Cell) -> int:
        return self.layout(cell).devices


class DDPCosts(Costs[D]):
    """Costs of gradients all-reduced in buckets, compressed by the option `compress`."""

    def required_traffic(self, cell: Cell) -> RequiredTraffic:
        """Unused parameters count: DDP sends them as zeros."""
        required = self._reduction(cell)
        unused = self.strategy.find_unused_parameters
        return replace(required, note=UNUSED_NOTE) if unused else required

    def _reduction(self, cell: Cell) -> RequiredTraffic:
        required = all_reduced(cell, bucket_mb=self.strategy.bucket_mb)
        power_sgd = self.strategy.numerics(cell.recipe).power_sgd
        (full,) = required.traffic
        if power_sgd is not None:
            saved_elements = _saved_elements(cell.size, power_sgd)
            compressed = replace(
                full,
                payload_bytes=FP32_BYTES * (cell.size.trained_parameters - saved_elements),
                calls=POWER_SGD_CALLS * full.calls,
                copied_bytes=POWER_SGD_ACCESSES * full.payload_bytes,
            )
            return RequiredTraffic(
                traffic=(compressed,),
                formula=f"all-reduce: 2 (n-1)/n of factors of rank {power_sgd.rank},"
                " and of the rest",
                note=f"the first {power_sgd.start_step} steps reduce whole gradients",
            )
        if self.strategy.compress == "none":
            return required
        half = replace(
            full,
            payload_bytes=full.payload_bytes / 2,
            copied_bytes=CAST_ACCESSES * full.payload_bytes,
        )
        return RequiredTraffic(traffic=(half,), formula="all-reduce: 2 (n-1)/n G/2")

    def library_work(self, cell: Cell) -> Mapping[str, float]:
        return {
            **super().library_work(cell),
            "ddp": 1,
            "ddp pass": cell.recipe.gradient_accumulation,
            "powersgd": float(self.strategy.compress == "powersgd"),
        }

    def step_state(self, cell: Cell) -> StepState:
        """Gradients are views of the buckets, which stay; a fresh gradient is copied and freed.

        Gradients of passes before the last are tensors of their own until they are reduced.
        """
        sizes = [cell.weight_bytes * unit.trained_parameters for unit in cell.units]
        total, separate = sum(sizes), 1 if cell.recipe.gradient_accumulation > 1 else 0
        return StepState(
            parameters=cell.stored_bytes,
            gradients=(1 + separate) * total,
            fresh_gradients=0.0,
            # A hook casts one bucket at a time; PowerSGD keeps the error of every gradient.
            buffers={"none": 0.0, "powersgd": total}.get(
                self.strategy.compress, min(self.strategy.bucket_mb * 2**20, total) / 2
            ),
            units=tuple(UnitState(retained_gradients=-separate * size) for size in sizes),
        )


def _saved_elements(size: ModelSize, power_sgd: PowerSGD) -> int:
    """Number of gradient elements that compression saves."""
    return sum(
        count * (rows * columns - thin * (rows + columns))
        for rows, columns, count in size.trained_matrices
        if (thin := power_sgd.factor_rank(rows, columns))
    )


class ZeroRedundancyCosts(DDPCosts[ZeroRedundancy]):
    """The costs of DDP, and a broadcast of the parameters that each rank updates."""

    def required_traffic(self, cell: Cell) -> RequiredTraffic:
        gradients = super().required_traffic(cell)
        broadcasts = Traffic(
            kind="broadcast",
            payload_bytes=cell.size.trained_parameters * cell.weight_bytes,
            ranks=cell.world_size,
            waited_for=True,
            calls=cell.world_size,  # one from each rank, also if it updates nothing
        )
        return replace(
            gradients,
            traffic=(*gradients.traffic, broadcasts),
            formula=f"{gradients.formula}, broadcasts: (n-1)/n G",
        )

    def library_work(self, cell: Cell) -> Mapping[str, float]:
        """Each rank updates its own tensors alone."""
        work = super().library_work(cell)
        update = updated_tensor(cell.recipe)
        return {**work, update: work[update] / cell.world_size, "zro": 1}

    def step_state(self, cell: Cell) -> StepState:
        sizes = [size for unit in cell.units for size in unit.sizes]
        return replace(
            super().step_state(cell), optimizer_share=_largest_share(sizes, cell.world_size)
        )


def _largest_share(sizes: Iterable[int], ranks: int) -> float:
    """Largest rank's share of parameters that are distributed uncut.

    Parameters go to the rank with the fewest elements so far, the largest parameter first.
    """
    elements = [0] * ranks
    for size in sorted(sizes, reverse=True):
        elements[elements.index(min(elements))] += size
    return max(elements) / max(1, sum(elements))
