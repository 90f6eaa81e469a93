"""Costs of strategies that divide layers or sequences over ranks with the same samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from shardmark.base.layout import ActivationSharding, Mesh
from shardmark.base.traffic import ModelSize, RequiredTraffic, Traffic
from shardmark.ranks.costs.base import (
    PRECISION_BYTES,
    Cell,
    Costs,
    StepState,
    UnitSize,
    all_reduced,
    times,
)
from shardmark.ranks.costs.replicas import DDPCosts
from shardmark.ranks.costs.sharded import FSDPCosts
from shardmark.ranks.strategies.ddp import DDP
from shardmark.ranks.strategies.fsdp import FSDP, HybridFSDP
from shardmark.ranks.strategies.layers.strategies import SCHEDULES, Layered
from shardmark.ranks.strategies.layers.ulysses import Ulysses

if TYPE_CHECKING:
    from torch import nn

    from shardmark.ranks.workloads.base import Workload


class LayeredCosts(Costs[Layered]):
    """Costs of tensor parallelism, pipelines, and their products with DDP or FSDP2."""

    def _factors(self, cell: Cell) -> Mesh:
        return self.strategy.factors(cell.world_size, cell.nodes)

    def _stages_of_rank(self) -> int:
        return SCHEDULES[self.strategy.schedule].stages_of_rank

    def step_state(self, cell: Cell) -> StepState:
        """Tensor-parallel ranks hold full copies of the layers that the plan does not divide.

        DDP's buckets are separate from the gradients that a pipeline's micro-batches accumulate.
        FSDP2's shards are separate from parameters that stay gathered.
        """
        factors = self._factors(cell)
        holds = self.strategy.holds(cell.world_size, cell.nodes)
        units = tuple(_with_replicas(unit, factors.tensor) for unit in cell.units)
        has_buckets = factors.data > 1 and not self.strategy.is_sharded(factors)
        state = super().step_state(replace(cell, units=units))
        trained = sum(unit.trained_parameters for unit in units)
        growth = trained / max(1, cell.all_trained_parameters)
        shard = holds.optimizer_state / holds.parameters
        return replace(
            state,
            parameters=(1 + (shard if shard < 1 else 0)) * state.parameters,
            gradients=(2 if has_buckets else 1) * state.gradients,
            optimizer_share=growth * state.optimizer_share,
            fresh_gradients=growth * state.fresh_gradients,
        )

    def required_traffic(self, cell: Cell) -> RequiredTraffic:
        """Mean traffic over the ranks of a pipeline; each message counts where it is sent."""
        factors = self._factors(cell)
        parts = []
        if factors.tensor > 1:
            parts.append(self._between_tensor_ranks(cell, factors))
        if factors.pipeline > 1:
            parts.append(self._between_stages(cell, factors))
        if factors.data * factors.shard > 1:
            parts.append(self._between_shares(cell, factors))
        return RequiredTraffic(
            traffic=tuple(chain.from_iterable(part.traffic for part in parts)),
            formula="; ".join(part.formula for part in parts),
        )

    def _between_tensor_ranks(self, cell: Cell, factors: Mesh) -> RequiredTraffic:
        """Activations are sent in the layer's precision, gradients into a layer in the weights'."""
        size, ranks, stages = cell.size, factors.tensor, factors.pipeline
        samples = cell.samples(factors.data * factors.shard)
        activation_bytes = PRECISION_BYTES[cell.recipe.precision]
        widths = {
            "in": cell.weight_bytes,
            "rows": cell.weight_bytes,
            "out": activation_bytes,
            "logits": activation_bytes,
        }
        passes = cell.recipe.gradient_accumulation * self.num_microbatches(cell)
        recomputed_calls = size.divided_again.get("calls", 0)
        calls = passes * (size.divided.get("calls", 1) + recomputed_calls) / stages

        def sent_bytes(elements: Mapping[str, int], *sides: str) -> float:
            return samples * sum(elements.get(side, 0) * widths[side] for side in sides) / stages

        once = sent_bytes(size.divided, "in", "out", "rows")
        recomputed = {
            side: sent_bytes(size.divided_again, side) for side in ("in", "out", "logits")
        }
        if self.strategy.sequence_parallel:
            gathered = once + recomputed["in"]
            traffic = [
                Traffic(kind=kind, payload_bytes=payload, ranks=ranks, calls=calls)
                for kind, payload in (
                    ("all_gather", gathered / ranks),
                    ("reduce_scatter", once + recomputed["out"]),
                )
            ]
            formula = "all-gather into divided layers, reduce-scatter out of them: 2 (t-1)/t A"
        else:
            payload = once + recomputed["out"]
            traffic = [Traffic(kind="all_reduce", payload_bytes=payload, ranks=ranks, calls=calls)]
            formula = "all-reduce out of divided layers and of gradients into them: 2 (t-1)/t A"
        if not self.strategy.loss_parallel:
            logits = sent_bytes(size.divided, "logits") + recomputed["logits"]
            traffic.append(
                Traffic(kind="all_gather", payload_bytes=logits / ranks, ranks=ranks, calls=passes)
            )
            formula += ", all-gather of logits: (t-1)/t L"
        of_stages = f", of one of {stages} stages" if stages > 1 else ""
        return RequiredTraffic(
            traffic=tuple(replace(part, waited_for=True) for part in traffic),
            formula=formula + of_stages,
        )

    def _between_stages(self, cell: Cell, factors: Mesh) -> RequiredTraffic:
        """Activations to the next stage, and their gradients back."""
        size, ranks = cell.size, factors.pipeline
        samples = cell.samples(factors.data * factors.shard)
        payload = samples * size.between_stages_bytes / ranks
        stages = self._stages_of_rank() * ranks
        passes = cell.recipe.gradient_accumulation * self.num_microbatches(cell)
        calls = 2 * passes * (stages - 1) / ranks  # there and back
        traffic = [
            Traffic(kind="send", payload_bytes=payload, ranks=ranks, calls=calls),
            Traffic(kind="receive", payload_bytes=payload, ranks=ranks, sent_by_peers=True),
        ]
        formula = "activations to the next stage, their gradients back: A/p"
        if size.tied_parameters:
            parts = ranks * factors.shard * factors.tensor
            tied = 2 * size.tied_parameters * cell.weight_bytes / parts
            traffic.append(Traffic(kind="all_reduce", payload_bytes=tied, ranks=2))
            formula += ", all-reduce of tied gradients: 2 T/p"
        return RequiredTraffic(
            traffic=tuple(
                replace(
                    part,
                    rank_stride=factors.tensor,
                    waited_for=True,
                    filling=part.kind != "all_reduce",
                )
                for part in traffic
            ),
            formula=formula,
        )

    def _between_shares(self, cell: Cell, factors: Mesh) -> RequiredTraffic:
        """Traffic of DDP or FSDP2 for one rank's layers.

        In a pipeline every pass of gradient accumulation reduces its gradients.
        """
        size, staged, parts = cell.size, factors.pipeline > 1, factors.ranks_per_share
        tied = size.tied_parameters if staged else 0  # two stages hold them
        one_pass = cell.recipe.model_copy(update={"gradient_accumulation": 1})
        rank_cell = Cell(
            size=ModelSize(
                parameters=(size.parameters + tied) // parts,
                trained_parameters=(size.trained_parameters + tied) // parts,
                frozen_element_bytes=size.frozen_element_bytes,
            ),
            recipe=one_pass if staged else cell.recipe,
            world_size=factors.data * factors.shard,
        )
        passes = cell.recipe.gradient_accumulation if staged else 1
        if self.strategy.is_sharded(factors):
            sharding = HybridFSDP(
                shard_group=factors.shard,
                reshard_after_forward=self.strategy.reshard_after_forward and not staged,
                mixed_precision="autocast",
            )
            shared = FSDPCosts(sharding).required_traffic(rank_cell)
        else:
            shared = all_reduced(replace(rank_cell, world_size=factors.data))
        return RequiredTraffic(
            traffic=tuple(
                replace(
                    part,
                    payload_bytes=passes * part.payload_bytes,
                    rank_stride=part.rank_stride * parts,
                )
                for part in shared.traffic
            ),
            formula=f"{times(passes)}({shared.formula}), of one rank's layers",
        )

    def library_work(self, cell: Cell) -> Mapping[str, float]:
        """A stage has its fraction of tensors and units."""
        factors = self._factors(cell)
        stages, shares = factors.pipeline, factors.data * factors.shard
        rank_cell = replace(cell, world_size=shares, nodes=1)
        if self.strategy.is_sharded(factors):
            reshards = self.strategy.reshard_after_forward and stages == 1
            sharding = FSDP(reshard_after_forward=reshards)
            shared = dict(FSDPCosts(sharding).library_work(rank_cell))
            # Hooks are called for each micro-batch, also if nothing has to be gathered.
            shared["fsdp gather"] *= self.num_microbatches(cell)
        elif shares > 1:
            shared = dict(DDPCosts(DDP()).library_work(rank_cell))
        else:
            shared = dict(super().library_work(cell))
        work = {name: count / (stages if " " in name else 1) for name, count in shared.items()}
        passes = cell.recipe.gradient_accumulation * self.num_microbatches(cell)
        if "ddp pass" in work:
            work["ddp pass"] = passes
        if factors.tensor > 1:
            calls = cell.size.divided.get("calls", 1) + cell.size.divided_again.get("calls", 0)
            call = "tp sequence call" if self.strategy.sequence_parallel else "tp call"
            work[call] = passes * calls / stages
        if stages > 1:
            schedule = self.strategy.schedule
            tensor = "zero-bubble tensor" if schedule == "zero-bubble" else "pp tensor"
            work["pp"] = 1
            work[f"{schedule} pass"] = passes * self._stages_of_rank()
            work[tensor] = passes * cell.size.trained_tensors / stages
        return work

    def bubble(self, cell: Cell) -> float:
        """Idle time while the pipeline fills and drains; zero-bubble leaves a third of it.

        Source: Narayanan et al., SC 2021, section 2.2; Qi et al., ICLR 2024, section 2.
        """
        ranks = self._factors(cell).pipeline
        stage_passes = self._stages_of_rank() * self.strategy.num_microbatches(ranks)
        unfilled = 1 / 3 if self.strategy.schedule == "zero-bubble" else 1.0
        return unfilled * (ranks - 1) / stage_passes

    def num_microbatches(self, cell: Cell) -> int:
        ranks = self._factors(cell).pipeline
        return self.strategy.num_microbatches(ranks) if ranks > 1 else 1

    def in_flight(self, cell: Cell) -> float:
        """Fraction on the first rank, as torch 2.15 schedules it before its first backward pass.

        Zero-bubble postpones the gradients of weights of as many micro-batches as there are ranks,
        which need about as much memory again.
        """
        ranks = self._factors(cell).pipeline
        if ranks == 1 or self.strategy.schedule == "gpipe":
            return 1.0
        count, stages = self.num_microbatches(cell), self._stages_of_rank()
        ahead, postponed = ranks - 1, 0
        if stages > 1:
            in_a_round = count // max(1, count // ranks)
            hops, postponed = (1, ranks) if self.strategy.schedule == "zero-bubble" else (2, 0)
            ahead = (stages - 1) * in_a_round + hops * (ranks - 1)
        return min(1.0, (ahead + 1) / (count * stages)) + postponed / (count * stages)

    def activation_sharding(self) -> ActivationSharding:
        return ActivationSharding(self.strategy.sequence_parallel, self.strategy.loss_parallel)

    def activation_traffic(
        self, workload: Workload, model: nn.Module, cell: Cell
    ) -> Mapping[str, Any]:
        from shardmark.ranks.strategies.layers.activation_traffic import count_activation_traffic
        from shardmark.ranks.strategies.layers.stages import pipeline_sends

        factors = self._factors(cell)
        plan, stages = self.strategy.partition(workload, model, factors)
        counted = (
            {} if plan is None else count_activation_traffic(workload, model, cell.recipe, plan)
        )
        sends = pipeline_sends(stages, workload, factors.pipeline) if stages else {}
        return {**counted, **sends}


def _with_replicas(unit: UnitSize, tensor_ranks: int) -> UnitSize:
    """Count the replicated parameters once for each tensor-parallel rank.

    A rank holds the returned number of parameters divided by the number of those ranks.
    """
    factor = 1 + (tensor_ranks - 1) * unit.replicated_fraction
    return replace(
        unit,
        parameters=round(factor * unit.parameters),
        trained_parameters=round(factor * unit.trained_parameters),
    )


class UlyssesCosts(Costs[Ulysses]):
    """Costs of all-to-all exchanges around attention, and of DDP or FSDP2 over all ranks."""

    def _reduction(self, cell: Cell) -> Costs[Any]:
        """Costs of the strategy that reduces gradients over all ranks."""
        reduction = self.strategy.reduction(self._factors(cell))
        return DDPCosts(reduction) if isinstance(reduction, DDP) else FSDPCosts(reduction)

    def _factors(self, cell: Cell) -> Mesh:
        return self.strategy.factors(cell.world_size, cell.nodes)

    def required_traffic(self, cell: Cell) -> RequiredTraffic:
        """Each rank sends the activations of its positions, and receives their gradients."""
        factors, size = self._factors(cell), cell.size
        samples = cell.samples(factors.data * factors.shard)
        elements = 2 * size.divided.get("exchanged", 0) + size.divided_again.get("exchanged", 0)
        width = PRECISION_BYTES[cell.recipe.precision]
        calls = 2 * size.divided.get("calls", 1) + size.divided_again.get("calls", 0)
        exchanged = Traffic(
            kind="all_to_all",
            payload_bytes=samples * elements * width / factors.sequence,
            ranks=factors.sequence,
            waited_for=True,
            calls=cell.recipe.gradient_accumulation * calls,
        )
        state = self._reduction(cell).required_traffic(cell)
        return RequiredTraffic(
            traffic=(exchanged, *state.traffic),
            formula=f"all-to-all into attention and out of it: (q-1)/q A/q; {state.formula}",
        )

    def library_traffic(self, cell: Cell) -> tuple[Traffic, ...]:
        exchanged = self.required_traffic(cell).traffic[0]
        return (exchanged, *self._reduction(cell).library_traffic(cell))

    def library_work(self, cell: Cell) -> Mapping[str, float]:
        exchanged = self.required_traffic(cell).traffic[0]
        return {**self._reduction(cell).library_work(cell), "ulysses call": exchanged.calls}

    def step_state(self, cell: Cell) -> StepState:
        return self._reduction(cell).step_state(cell)

    def activation_traffic(
        self, workload: Workload, model: nn.Module, cell: Cell
    ) -> Mapping[str, Any]:
        from shardmark.ranks.strategies.layers.activation_traffic import count_activation_traffic

        plan = self.strategy.sequence_plan(workload, self._factors(cell), model)
        return count_activation_traffic(workload, model, cell.recipe, plan)
