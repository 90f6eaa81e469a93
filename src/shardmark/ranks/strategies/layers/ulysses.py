"""DeepSpeed-Ulysses: ranks divide sequences, and attention heads in attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from shardmark.base.errors import StrategyUnavailable
from shardmark.base.layout import Fractions, Layout, Mesh, on_mesh
from shardmark.base.machine import Machine
from shardmark.base.numerics import Numerics
from shardmark.ranks.strategies.base import (
    RankContext,
    Strategy,
    check_machine,
    refuse,
    refuse_for_distributed_tensors,
)
from shardmark.ranks.strategies.ddp import DDP
from shardmark.ranks.strategies.fsdp import HybridFSDP

if TYPE_CHECKING:
    from torch import nn

    from shardmark.base.recipe import Recipe
    from shardmark.ranks.strategies.step import EagerWorker
    from shardmark.ranks.workloads.base import SequencePlan, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Ulysses(Strategy):
    """Each rank has a part of every sequence, and in attention full sequences of some heads.

    All-to-all exchanges surround attention (Jacobs et al., 2023).  Gradients are reduced over all
    ranks by DDP, or the state is sharded over them by FSDP2.
    """

    costs = "shardmark.ranks.costs.layers:UlyssesCosts"

    name: str = "ulysses"
    sharded: bool = False
    mesh: Mesh | None = None
    """Ranks by axis, e.g. {data: 2, sequence: 4}; null: `sequence` are those of a node."""

    def factors(self, world_size: int, nodes: int) -> Mesh:
        """Return the mesh of this number of ranks."""
        if self.mesh is not None:
            return self.mesh
        others = nodes if world_size > nodes else 1
        axis = "shard" if self.sharded else "data"
        return Mesh(sequence=world_size // others, **{axis: others})

    def unsupported_reason(self, world_size: int, nodes: int = 1) -> str | None:
        if world_size == 1:
            return Strategy.unsupported_reason(self, world_size, nodes)
        factors = self.factors(world_size, nodes)
        allowed_axes = {"data", "sequence", *(["shard"] if self.sharded else [])}
        other = [axis for axis, size in factors if size > 1 and axis not in allowed_axes]
        if other:
            remedy = f"leave out {' and '.join(other)}"
            return f"mesh {factors} has an axis that {self.name} does not have: {remedy}"
        if factors.ranks != world_size:
            remedy = f"use sizes whose product is {world_size}, or world_size {factors.ranks}"
            return f"mesh {factors} has {factors.ranks} ranks, not {world_size}: {remedy}"
        return None if factors.sequence > 1 else f"mesh {factors} needs 2 or more for sequence"

    def check(self, world_size: int, machine: Machine, recipe: Recipe) -> None:
        check_machine(
            self.name,
            world_size,
            machine,
            recipe,
            offload_instead=None if self.sharded else "fsdp-ulysses",
            no_sync_batch_norm="its norms would see a part of each sequence",
        )
        inside = "attention communicates inside of what would be compiled"
        refuse(self.name, (recipe.compile != "none", inside, "set recipe.compile to none"))
        if self.sharded:
            refuse_for_distributed_tensors(self.name, recipe)

    def reduction(self, factors: Mesh) -> DDP | HybridFSDP:
        """Strategy that reduces gradients over all ranks, as if each had its own samples."""
        if self.sharded:
            return HybridFSDP(name=self.name, shard_group=factors.shard * factors.sequence)
        return DDP(name=self.name)

    def layout(self, world_size: int, nodes: int = 1) -> Layout:
        """Layout with the state replicated over `sequence`, or also sharded over it."""
        factors = self.factors(world_size, nodes)
        part = 1 / (factors.shard * factors.sequence) if self.sharded else 1.0
        holds = Fractions(parameters=part, gradients=part, optimizer_state=part)
        return on_mesh(factors, nodes=nodes, holds=holds)

    def numerics(self, recipe: Recipe) -> Numerics:
        return self.reduction(Mesh()).numerics(recipe)

    def backend(self, device_type: str, recipe: Recipe) -> str:
        return self.reduction(Mesh()).backend(device_type, recipe)

    def builds_in_parts(self) -> bool:
        return self.reduction(Mesh()).builds_in_parts()

    def loads(self) -> tuple[str, ...]:
        return self.reduction(Mesh()).loads()

    def settings(self, recipe: Recipe) -> Mapping[str, object]:
        return self.reduction(Mesh()).settings(recipe)

    def check_model(
        self, workload: Workload, model: nn.Module, world_size: int, nodes: int = 1
    ) -> None:
        factors = self.factors(world_size, nodes)
        self.sequence_plan(workload, factors, model)
        self.reduction(factors).check_model(workload, model, world_size, nodes)

    def sequence_plan(self, workload: Workload, factors: Mesh, model: nn.Module) -> SequencePlan:
        from shardmark.ranks.strategies.layers.sequences import problems_with
        from shardmark.ranks.workloads.base import CannotShard

        plan = workload.sequence_plan(model)
        for problem in problems_with(plan, model, factors.sequence):
            raise StrategyUnavailable(self.name, problem.reason, problem.remedy)
        assert not isinstance(plan, CannotShard), "a problem was raised"
        return plan

    def start(self, workload: Workload, recipe: Recipe, context: RankContext) -> EagerWorker:
        from torch.distributed.device_mesh import init_device_mesh

        from shardmark.ranks.strategies.layers.sequences import SequenceWorker

        factors = self.factors(context.world_size, context.nodes)
        sizes = (context.world_size // factors.sequence, factors.sequence)
        mesh = init_device_mesh(context.device.type, sizes, mesh_dim_names=("samples", "sequence"))
        kind = partial(
            SequenceWorker,
            plan_of=partial(self.sequence_plan, workload, factors),
            sequence=mesh.get_group("sequence"),
        )
        return self.reduction(factors).start_as(kind, workload, recipe, context)
