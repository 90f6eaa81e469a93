"""Tensor parallelism, pipelines, and their products with DDP or FSDP2.

`Layered` implements all of them on one mesh; each of its subclasses names some axes and options.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import Field

from shardmark.base.layout import Fractions, Layout, Mesh, on_mesh
from shardmark.base.machine import Machine
from shardmark.ranks.strategies.base import (
    RankContext,
    Strategy,
    check_machine,
    common_settings,
    refuse,
    refuse_after_step,
    refuse_for_distributed_tensors,
    samples_of_share,
)
from shardmark.ranks.strategies.ddp import DDP
from shardmark.ranks.strategies.fsdp import DEFAULT_GROUP, FSDP

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from shardmark.base.recipe import Recipe
    from shardmark.ranks.strategies.layers.divided import DividedWorker
    from shardmark.ranks.workloads.base import TensorPlan, Workload

Schedule = Literal["gpipe", "1f1b", "interleaved", "zero-bubble"]


class ScheduleClass(NamedTuple):
    """A pipeline schedule of torch."""

    name: str
    """Name of the class in torch.distributed.pipelining."""
    stages_of_rank: int


SCHEDULES: dict[Schedule, ScheduleClass] = {
    "gpipe": ScheduleClass("ScheduleGPipe", 1),
    "1f1b": ScheduleClass("Schedule1F1B", 1),
    "interleaved": ScheduleClass("ScheduleInterleaved1F1B", 2),
    "zero-bubble": ScheduleClass("ScheduleInterleavedZeroBubble", 2),
}
MICRO_BATCHES_A_RANK = 2
MicroBatches = Annotated[int, Field(ge=1)] | None
AXES = ("data", "shard", "pipeline", "tensor")
"""Axes of a mesh; ranks that are neighbours on the last axis have consecutive numbers."""
ANY_MESH = "fsdp-tp-pp"


class Layered(Strategy):
    """Base of all strategies on a mesh.  Its subclasses declare which attributes are options."""

    axes: ClassVar[tuple[str, ...]]
    """Axes with two or more ranks; the first one takes the ranks that the others leave."""
    any_axes: ClassVar[bool] = False
    """True if an explicit mesh may have other axes."""
    mesh: Mesh | None = None
    """Ranks by axis, e.g. {shard: 2, tensor: 2, pipeline: 2}; null: 2 for each axis, and the rest
    for the first one.  On several nodes, `tensor` of `fsdp-tp` has the ranks of a node."""
    sequence_parallel: bool = False
    """Shard activations between divided layers by sequence (Korthikanti et al., 2022)."""
    loss_parallel: bool = False
    """Compute the loss on sharded logits, which are never gathered."""
    schedule: Schedule = "1f1b"
    """Order of the computations; `interleaved` and `zero-bubble` have two stages on each rank."""
    micro_batches: MicroBatches = None
    """Number of micro-batches of a pass; null: twice the number of pipeline ranks."""
    reshard_after_forward: bool = True
    """Free the gathered parameters of a block after its forward pass; a pipeline's stages stay
    gathered for all micro-batches."""

    def factors(self, world_size: int, nodes: int = 1) -> Mesh:
        """Return the mesh of this number of ranks."""
        if self.mesh is not None:
            return self.mesh
        first, *others = self.axes
        of_node = nodes > 1 and others == ["tensor"]
        sizes = dict.fromkeys(others, world_size // nodes if of_node else DEFAULT_GROUP)
        return Mesh(**{first: max(1, world_size // prod(sizes.values())), **sizes})

    def unsupported_reason(self, world_size: int, nodes: int = 1) -> str | None:
        factors = self.factors(world_size, nodes)
        sizes, allowed_axes = dict(factors), {*(AXES if self.any_axes else self.axes)}
        if "shard" in self.axes:
            allowed_axes.add("data")
        other = [axis for axis, size in factors if size > 1 and axis not in allowed_axes]
        node_ranks = world_size // nodes
        if world_size == 1:
            return Strategy.unsupported_reason(self, world_size, nodes)
        if other:
            elsewhere = f", or use {ANY_MESH}" if {*other} < {*AXES} else ""
            remedy = f"leave out {' and '.join(other)}{elsewhere}"
            return f"mesh {factors} has an axis that {self.name} does not have: {remedy}"
        if factors.ranks != world_size:
            remedy = f"use sizes whose product is {world_size}, or world_size {factors.ranks}"
            return f"mesh {factors} has {factors.ranks} ranks, not {world_size}: {remedy}"
        if not self.any_axes and any(sizes[axis] == 1 for axis in self.axes):
            return f"mesh {factors} needs 2 or more for {' and for '.join(self.axes)}"
        if node_ranks % factors.tensor and factors.tensor % node_ranks:
            remedy = f"use a size of tensor that divides {node_ranks}"
            return f"nodes of {node_ranks} ranks do not hold whole groups of {factors}: {remedy}"
        return None

    def check(self, world_size: int, machine: Machine, recipe: Recipe) -> None:
        factors = self.factors(world_size)
        ranks, schedule = factors.pipeline, self.schedule
        check_machine(
            self.name,
            world_size,
            machine,
            recipe,
            no_sync_batch_norm="ranks that share layers have the same samples, or other norms",
            no_bf16_weights=None
            if ranks == 1
            else "what goes into a stage is cast for the full model alone",
        )
        inside = "layers communicate inside of what would be compiled, and schedules take it apart"
        refuse(self.name, (recipe.compile != "none", inside, "set recipe.compile to none"))
        if factors.tensor > 1 or self.is_sharded(factors):
            refuse_for_distributed_tensors(self.name, recipe)
        if ranks == 1:
            return
        count = self.num_microbatches(ranks)
        samples = samples_of_share(recipe, factors.data * factors.shard)
        pass_samples = samples // recipe.gradient_accumulation
        refuse(
            self.name,
            (
                schedule == "zero-bubble" and factors.data > 1 and not self.is_sharded(factors),
                "DDP does not see gradients of weights that zero-bubble computes apart",
                "use schedule: interleaved, or fsdp-pp",
            ),
            (
                recipe.precision == "fp16",
                "stages would scale the loss, and skip steps, each by itself in fp16",
                "set recipe.precision: bf16",
            ),
            (
                schedule != "gpipe" and count < ranks,
                f"{schedule} needs a micro-batch for each of {ranks} ranks, and has {count}",
                f"set micro_batches to {ranks} or more",
            ),
            (
                SCHEDULES[schedule].stages_of_rank > 1 and count % ranks,
                f"{schedule} cannot share {count} micro-batches out to {ranks} ranks",
                f"set micro_batches to a multiple of {ranks}",
            ),
            (
                pass_samples % count,
                f"{pass_samples} samples of a pass cannot be split into {count} equal"
                " micro-batches",
                "set micro_batches to a number that divides them, or another batch",
            ),
        )

    def is_sharded(self, factors: Mesh) -> bool:
        """True if FSDP2, and not DDP, distributes samples over the ranks."""
        return factors.data * factors.shard > 1 and "data" not in self.axes

    def num_microbatches(self, pipeline: int) -> int:
        return self.micro_batches or MICRO_BATCHES_A_RANK * pipeline

    def layout(self, world_size: int, nodes: int = 1) -> Layout:
        factors = self.factors(world_size, nodes)
        return on_mesh(factors, nodes=nodes, holds=self.holds(world_size, nodes))

    def holds(self, world_size: int, nodes: int = 1) -> Fractions:
        """Fractions of equal stages, although stages are only balanced.

        Gradients of a stage accumulate unsharded on each rank until its last micro-batch.
        """
        factors = self.factors(world_size, nodes)
        part = 1 / factors.ranks_per_share
        sharded = part / factors.shard
        staged = factors.pipeline > 1
        return Fractions(
            parameters=sharded if self.reshard_after_forward and not staged else part,
            gradients=part if staged else sharded,
            optimizer_state=sharded,
        )

    def loads(self) -> tuple[str, ...]:
        modules = {
            "tensor": "torch.distributed.tensor.parallel",
            "pipeline": "torch.distributed.pipelining",
            "shard": "torch.distributed.fsdp",
            "data": "torch.nn.parallel",
        }
        return tuple(modules[axis] for axis in self.axes)

    def settings(self, recipe: Recipe) -> Mapping[str, object]:
        chosen: dict[str, object] = {}
        if "tensor" in self.axes:
            chosen |= self.plan_options()
        if "pipeline" in self.axes:
            micro_batches = self.micro_batches or f"{MICRO_BATCHES_A_RANK} a rank"
            chosen |= {"schedule": self.schedule, "micro_batches": micro_batches}
        return common_settings(recipe) | chosen

    def plan_options(self) -> dict[str, bool]:
        return {"sequence_parallel": self.sequence_parallel, "loss_parallel": self.loss_parallel}

    def check_model(
        self, workload: Workload, model: nn.Module, world_size: int, nodes: int = 1
    ) -> None:
        self.partition(workload, model, self.factors(world_size, nodes))

    def partition(
        self, workload: Workload, model: nn.Module, factors: Mesh
    ) -> tuple[TensorPlan | None, list[list[nn.Module]]]:
        """Return the tensor plan, None without one, and the parts of each stage, if any."""
        from shardmark.ranks.strategies.layers.divided import problems_with
        from shardmark.ranks.strategies.layers.stages import problems_of, staged
        from shardmark.ranks.strategies.parameters import check_parameters
        from shardmark.ranks.workloads.base import CannotShard, TensorPlan

        def refuse_first(problems: Iterable[CannotShard]) -> None:
            refuse(self.name, *((True, problem.reason, problem.remedy) for problem in problems))

        if self.is_sharded(factors):
            check_parameters(self.name, model, FSDP.library, *FSDP.refused_parameters)
        elif factors.tensor > 1:
            check_parameters(self.name, model, "tensor parallelism", "sparse", "hooks")
        plan, stages = None, []
        if factors.tensor > 1:
            plan = workload.tensor_plan(model)
            refuse_first(problems_with(plan, model, factors.tensor, **self.plan_options()))
        if factors.pipeline > 1:
            refuse_after_step(self.name, workload, "a rank has some of the layers")
            count = SCHEDULES[self.schedule].stages_of_rank * factors.pipeline
            parts = workload.pipeline_parts(model)
            refuse_first(problems_of(parts, model, workload, count))
            assert not isinstance(parts, CannotShard), "a problem was raised"
            stages = staged(parts, count)
        assert plan is None or isinstance(plan, TensorPlan)
        return plan, stages

    def start(self, workload: Workload, recipe: Recipe, context: RankContext) -> DividedWorker:
        """Build the full model on every rank, and keep the rank's part."""
        import torch
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy

        from shardmark.ranks.strategies.blocks import sharding_units
        from shardmark.ranks.strategies.casting import narrow_weights
        from shardmark.ranks.strategies.execution import prepare
        from shardmark.ranks.strategies.layers.divided import DividedWorker, divide
        from shardmark.ranks.strategies.layers.stages import MetaStages, PipelineWorker

        factors = self.factors(context.world_size, context.nodes)
        model = workload.build_model()
        plan, stages = self.partition(workload, model, factors)
        if recipe.weights == "bf16":
            narrow_weights(model)  # before they become parts of sharded tensors
        shared = self.is_sharded(factors)
        names = [n for n in AXES if getattr(factors, n) > 1 or (n == "shard" and shared)]
        sizes = tuple(getattr(factors, name) for name in names)
        mesh = init_device_mesh(context.device.type, sizes, mesh_dim_names=tuple(names))
        sequence_ranks = factors.tensor if self.sequence_parallel else 1
        meta_stages = MetaStages(stages, sequence_ranks)  # before the layers are divided
        if plan is not None:
            parts = list(chain.from_iterable(stages))
            divide(model, plan, mesh["tensor"], parts=parts, **self.plan_options())
        prepare(model, workload, recipe, keeps_strides=False)
        reduce_dtype = torch.float32 if recipe.weights == "fp32" else None
        share = self._share(
            mesh,
            factors,
            policy=MixedPrecisionPolicy(reduce_dtype=reduce_dtype),
            gathered=bool(stages) or not self.reshard_after_forward,
        )
        common: dict[str, Any] = {
            "workload": workload,
            "recipe": recipe,
            "device": context.device,
            "shares": factors.data * factors.shard,
            "sample_ranks": None if workload.weights_known else _sample_ranks(mesh),
            "loss_parallel": self.loss_parallel and plan is not None,
        }
        if stages:
            return PipelineWorker(
                model,
                stages=stages,
                meta_stages=meta_stages,
                pipeline=mesh.get_group("pipeline"),
                pipelines=mesh.mesh.movedim(names.index("pipeline"), -1)
                .reshape(-1, factors.pipeline)
                .tolist(),
                schedule=SCHEDULES[self.schedule].name,
                micro_batches=self.num_microbatches(factors.pipeline),
                replicate=lambda stage: share(stage, [*stage.parts]),
                **common,
            )
        model.to(context.device)
        share(model, sharding_units(model, "blocks", workload.blocks(model)))
        synchronise = getattr(model, "set_requires_gradient_sync", None)  # added by fully_shard
        return DividedWorker(
            model, synchronise=synchronise, sharded_by=self.name if shared else None, **common
        )

    def _share(
        self, mesh: DeviceMesh, factors: Mesh, *, policy: MixedPrecisionPolicy, gathered: bool
    ) -> Callable[[nn.Module, list[nn.Module]], nn.Module]:
        """Return a function that wraps a module by FSDP2 or DDP over ranks with other samples."""
        from torch.distributed.fsdp import fully_shard

        from shardmark.ranks.strategies.replicas import DistributedReplicas

        axes = ("data", "shard") if factors.data > 1 else ("shard",)

        def share(module: nn.Module, parts: list[nn.Module]) -> nn.Module:
            if self.is_sharded(factors):
                for part in (*parts, module):
                    fully_shard(
                        part, mesh=mesh[axes], mp_policy=policy, reshard_after_forward=not gathered
                    )
            elif factors.data > 1:
                group = mesh.get_group("data")
                return DistributedReplicas(module, process_group=group, **DDP().arguments())
            return module

        return share


def _sample_ranks(mesh: DeviceMesh) -> Any:
    """Group of ranks with the same part of the model and distinct samples."""
    import torch.distributed as dist

    names = mesh.mesh_dim_names or ()
    axes = [at for at, name in enumerate(names) if name in ("data", "shard")]
    if not axes:
        return None
    lines = mesh.mesh.movedim(axes, [*range(-len(axes), 0)]).flatten(-len(axes))
    return dist.new_subgroups_by_enumeration(lines.reshape(-1, lines.shape[-1]).tolist())[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorParallel(Layered):
    """Every rank computes a part of each layer for the same samples (Shoeybi et al., 2019)."""

    costs = "shardmark.ranks.costs.layers:LayeredCosts"

    axes: ClassVar[tuple[str, ...]] = ("tensor",)
    name: str = "tp"
    sequence_parallel: bool = False
    loss_parallel: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedTensorParallel(TensorParallel):
    """Layers are divided over tensor ranks, whose parts are sharded by FSDP2."""

    costs = "shardmark.ranks.costs.layers:LayeredCosts"

    axes: ClassVar[tuple[str, ...]] = ("shard", "tensor")
    name: str = "fsdp-tp"
    mesh: Mesh | None = None
    reshard_after_forward: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineParallel(Layered):
    """Each rank computes some consecutive layers, one micro-batch after the other.

    GPipe: Huang et al., NeurIPS 2019; 1F1B and interleaved: Narayanan et al., SC 2021; zero bubble:
    Qi et al., ICLR 2024.
    """

    costs = "shardmark.ranks.costs.layers:LayeredCosts"

    axes: ClassVar[tuple[str, ...]] = ("pipeline",)
    name: str = "pp"
    schedule: Schedule = "1f1b"
    micro_batches: MicroBatches = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicatedPipeline(PipelineParallel):
    """Several pipelines with different samples; DDP reduces the gradients of each stage."""

    costs = "shardmark.ranks.costs.layers:LayeredCosts"

    axes: ClassVar[tuple[str, ...]] = ("data", "pipeline")
    name: str = "ddp-pp"
    mesh: Mesh | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedPipeline(PipelineParallel):
    """Several pipelines with different samples; FSDP2 shards each stage over its ranks.

    A stage is gathered once a step, and stays gathered for all micro-batches, as in ZeRO-2.
    """

    costs = "shardmark.ranks.costs.layers:LayeredCosts"

    axes: ClassVar[tuple[str, ...]] = ("shard", "pipeline")
    name: str = "fsdp-pp"
    mesh: Mesh | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedTensorPipeline(ShardedTensorParallel):
    """Pipelines of divided layers, sharded by FSDP2, on any mesh of these axes."""

    costs = "shardmark.ranks.costs.layers:LayeredCosts"

    axes: ClassVar[tuple[str, ...]] = ("shard", "pipeline", "tensor")
    any_axes: ClassVar[bool] = True
    name: str = ANY_MESH
    schedule: Schedule = "1f1b"
    micro_batches: MicroBatches = None
