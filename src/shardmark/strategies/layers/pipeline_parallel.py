"""Pipelines, alone and of replicas: consecutive layers on different ranks, samples in turns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from shardmark.core.errors import StrategyUnavailable
from shardmark.core.layout import Fractions, Layout, Mesh, on_mesh
from shardmark.core.machine import Machine
from shardmark.core.wire import ModelSize, Traffic, WireBytes
from shardmark.strategies.base import (
    FP32_BYTES,
    LaunchConfiguration,
    RankContext,
    Strategy,
    all_reduced,
    check_machine,
    common_settings,
    samples_of_share,
    times,
)
from shardmark.strategies.fsdp import DEFAULT_GROUP, FSDP, HybridFSDP

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from shardmark.core.recipe import Recipe
    from shardmark.strategies.layers.stages import PipelineWorker, Stage
    from shardmark.workloads.base import Workload

Schedule = Literal["gpipe", "1f1b", "interleaved", "zero-bubble"]
CLASSES: dict[Schedule, tuple[str, int]] = {
    "gpipe": ("ScheduleGPipe", 1),
    "1f1b": ("Schedule1F1B", 1),
    "interleaved": ("ScheduleInterleaved1F1B", 2),
    "zero-bubble": ("ScheduleInterleavedZeroBubble", 2),
}
"""In torch.distributed.pipelining, and the stages of a rank."""
MICRO_BATCHES_A_RANK = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineParallel(Strategy):
    """Each rank computes some consecutive layers, for one micro-batch after the other.

    GPipe: Huang et al., NeurIPS 2019; 1F1B and interleaved: Narayanan et al., SC 2021; zero bubble:
    Qi et al., ICLR 2024.
    """

    name: str = "pp"
    schedule: Schedule = "1f1b"
    """Who computes what when; `interleaved` and `zero-bubble` have two stages on each rank."""
    micro_batches: Annotated[int, Field(ge=1)] | None = None
    """Of a rank's samples (of one pass, with gradient accumulation); null: twice as many as ranks
    of the pipeline."""

    def factors(self, world_size: int, nodes: int) -> Mesh:
        """How so many ranks are factored."""
        return Mesh(pipeline=world_size)

    def check(self, world_size: int, machine: Machine, recipe: Recipe) -> None:
        apart = "its stages have other norms, and pass them at other times"
        check_machine(
            self.name, world_size, machine, recipe, offload_instead="fsdp", norms_apart=apart
        )
        if recipe.precision == "fp16":
            found = "stages would scale the loss, and skip steps, each by itself in fp16"
            raise StrategyUnavailable(self.name, found, "set recipe.precision: bf16")
        if recipe.compile != "none":
            found = "schedules take backward passes apart, which a compiler puts together"
            raise StrategyUnavailable(self.name, found, "set recipe.compile to none")
        factors = self.factors(world_size, nodes=1)
        count, ranks = self._micro_batches(factors), factors.pipeline
        if self.schedule != "gpipe" and count < ranks:
            found = (
                f"{self.schedule} needs a micro-batch for each of {ranks} ranks, and has {count}"
            )
            raise StrategyUnavailable(self.name, found, f"set micro_batches to {ranks} or more")
        if CLASSES[self.schedule][1] > 1 and count % ranks:
            found = f"{self.schedule} cannot share {count} micro-batches out to {ranks} ranks"
            raise StrategyUnavailable(
                self.name, found, f"set micro_batches to a multiple of {ranks}"
            )
        samples = samples_of_share(recipe, factors.data * factors.shard)
        passed = samples // recipe.gradient_accumulation
        if passed % count:
            raise StrategyUnavailable(
                self.name,
                f"{passed} samples of a pass cannot be split into {count} equal micro-batches",
                "set micro_batches to a number that divides them, or another batch",
            )

    def _micro_batches(self, factors: Mesh) -> int:
        return self.micro_batches or MICRO_BATCHES_A_RANK * factors.pipeline

    def layout(self, world_size: int, nodes: int = 1) -> Layout:
        """Stages are balanced, not equal: a rank's fraction is that of equal ones."""
        factors = self.factors(world_size, nodes)
        part = 1 / (factors.shard * factors.pipeline)
        holds = Fractions(parameters=part, gradients=part, optimizer_state=part)
        return on_mesh(factors, nodes=nodes, holds=holds)

    def wire_bytes(
        self, size: ModelSize, recipe: Recipe, world_size: int, nodes: int = 1
    ) -> WireBytes:
        """Each message counts where it is sent; the mean over the ranks of a pipeline."""
        factors = self.factors(world_size, nodes)
        ranks = factors.pipeline
        samples = samples_of_share(recipe, factors.data * factors.shard)
        sent = samples * size.between_stages_bytes / ranks
        traffic = [
            Traffic(kind="send", payload_bytes=sent, ranks=ranks),
            Traffic(kind="receive", payload_bytes=sent, ranks=ranks, sent_by_peers=True),
        ]
        formula = "activations to the next stage, their gradients back: A/p"
        if size.tied_parameters:
            tied = 2 * size.tied_parameters * FP32_BYTES / (ranks * factors.shard)
            traffic.append(Traffic(kind="all_reduce", payload_bytes=tied, ranks=2))
            formula += ", all-reduce of tied gradients: 2 T/p"
        return WireBytes(traffic=tuple(traffic), formula=formula)

    def loads(self) -> tuple[str, ...]:
        return ("torch.distributed.pipelining",)

    def settings(self, recipe: Recipe) -> Mapping[str, object]:
        chosen = {"schedule": self.schedule, "micro_batches": self.micro_batches or "2 a rank"}
        return common_settings(recipe) | chosen

    def start(self, workload: Workload, recipe: Recipe, context: RankContext) -> PipelineWorker:
        """Every rank builds the whole model, and keeps its stages."""
        from torch.distributed.device_mesh import init_device_mesh

        from shardmark.strategies.layers.stages import PipelineWorker, problem_with, staged
        from shardmark.workloads.base import Undivided

        factors = self.factors(context.world_size, context.nodes)
        class_name, each = CLASSES[self.schedule]
        count = each * factors.pipeline
        model = workload.build_model()
        parts = workload.pipeline_parts(model)
        problem = problem_with(parts, model, workload, count)
        if problem is not None or isinstance(parts, Undivided):
            assert problem is not None
            raise StrategyUnavailable(self.name, problem.reason, problem.remedy)
        names = [name for name, size in factors if size > 1 or name == "pipeline"]
        sizes = tuple(getattr(factors, name) for name in names)
        mesh = init_device_mesh(context.device.type, sizes, mesh_dim_names=tuple(names))
        return PipelineWorker(
            model,
            workload=workload,
            recipe=recipe,
            device=context.device,
            shares=factors.data * factors.shard,
            replicated=False,
            stages=staged(parts, count),
            pipeline=mesh.get_group("pipeline"),
            schedule=class_name,
            micro_batches=self._micro_batches(factors),
            **self._replicated(mesh, factors, recipe, context),
        )

    def _replicated(
        self, mesh: DeviceMesh, factors: Mesh, recipe: Recipe, context: RankContext
    ) -> dict[str, Any]:
        """Further arguments of the worker, where other ranks have the same stages."""
        return {}

    def launch_configuration(
        self, recipe: Recipe, layout: Layout, device_type: str
    ) -> LaunchConfiguration:
        class_name, each = CLASSES[self.schedule]
        arguments: dict[str, Any] = {
            "n_microbatches": self._micro_batches(Mesh(pipeline=layout.pipeline)),
            "scale_grads": False,
        }
        return LaunchConfiguration(
            wrapper=f"torch.distributed.pipelining.{class_name}",
            arguments=arguments,
            notes=(
                f"{each * layout.pipeline} PipelineStages of consecutive layers, equally many"
                " parameters in each, embeddings left out. Sum the gradients of tied weights over"
                " their stages, and clip by the norm of all stages together.",
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicatedPipeline(PipelineParallel):
    """Pipelines with samples of their own; ranks of one stage share it by DDP or by FSDP2.

    FSDP2 gathers a stage once a step, and keeps it for all micro-batches (ZeRO-2's mathematics).
    """

    name: str = "ddp-pp"
    sharded: bool = False
    mesh: Mesh | None = None
    """Ranks by axis, e.g. {data: 2, pipeline: 4}; null: pipelines of 2 ranks."""

    def factors(self, world_size: int, nodes: int) -> Mesh:
        if self.mesh is not None:
            return self.mesh
        others = max(1, world_size // DEFAULT_GROUP)
        return Mesh(pipeline=DEFAULT_GROUP, **{"shard" if self.sharded else "data": others})

    def unsupported_reason(self, world_size: int, nodes: int = 1) -> str | None:
        factors = self.factors(world_size, nodes)
        if factors.tensor > 1 or (factors.shard > 1 and not self.sharded):
            return f"mesh {factors} has an axis that {self.name} does not have"
        if factors.ranks != world_size:
            return f"mesh {factors} has {factors.ranks} ranks, not {world_size}"
        needed = "shard" if self.sharded else "data"
        if factors.pipeline == 1 or getattr(factors, needed) == 1:
            return f"mesh {factors} needs 2 or more for {needed} and for pipeline"
        return None

    def check(self, world_size: int, machine: Machine, recipe: Recipe) -> None:
        if self.schedule == "zero-bubble" and not self.sharded:
            raise StrategyUnavailable(
                self.name,
                "DDP does not see gradients of weights that zero-bubble computes apart",
                "use schedule: interleaved, or fsdp-pp",
            )
        if self.sharded:
            FSDP(name=self.name).check(world_size, machine, recipe)
        PipelineParallel.check(self, world_size, machine, recipe)

    def layout(self, world_size: int, nodes: int = 1) -> Layout:
        """Gradients of a stage add up whole on each rank until its last micro-batch."""
        factors = self.factors(world_size, nodes)
        stage = 1 / factors.pipeline
        holds = Fractions(parameters=stage, gradients=stage, optimizer_state=stage / factors.shard)
        return on_mesh(factors, nodes=nodes, holds=holds)

    def wire_bytes(
        self, size: ModelSize, recipe: Recipe, world_size: int, nodes: int = 1
    ) -> WireBytes:
        """Every pass of gradient accumulation shares its gradients."""
        stages = PipelineParallel.wire_bytes(self, size, recipe, world_size, nodes)
        factors, passes = self.factors(world_size, nodes), recipe.gradient_accumulation
        held = size.parameters + size.tied_parameters
        trained = size.trained_parameters + size.tied_parameters
        part = ModelSize(
            parameters=held // factors.pipeline, trained_parameters=trained // factors.pipeline
        )
        shared = (
            HybridFSDP(shard_group=factors.shard, reshard_after_forward=False).wire_bytes(
                part,
                recipe.model_copy(update={"gradient_accumulation": 1}),
                factors.data * factors.shard,
            )
            if self.sharded
            else all_reduced(part, factors.data)
        )
        again = [
            replace(each, payload_bytes=passes * each.payload_bytes) for each in shared.traffic
        ]
        return WireBytes(
            traffic=(*stages.traffic, *again),
            formula=f"{stages.formula}; {times(passes)}({shared.formula}), of one stage's part",
        )

    def loads(self) -> tuple[str, ...]:
        wrapper = "torch.distributed.fsdp" if self.sharded else "torch.nn.parallel"
        return (*PipelineParallel.loads(self), wrapper)

    def _replicated(
        self, mesh: DeviceMesh, factors: Mesh, recipe: Recipe, context: RankContext
    ) -> dict[str, Any]:
        import torch
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        from shardmark.strategies.ddp import DDP
        from shardmark.strategies.replicas import DistributedReplicas

        if not self.sharded:
            group = mesh.get_group("data")
            arguments = DDP().arguments()
            return {"replicate": lambda s: DistributedReplicas(s, process_group=group, **arguments)}
        axes = ("data", "shard") if factors.data > 1 else ("shard",)
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)

        def shard(stage: Stage) -> nn.Module:
            for part in (*stage.parts, stage):
                fully_shard(part, mesh=mesh[axes], mp_policy=policy, reshard_after_forward=False)
            return stage

        return {"replicate": shard}

    def launch_configuration(
        self, recipe: Recipe, layout: Layout, device_type: str
    ) -> LaunchConfiguration:
        stages = PipelineParallel.launch_configuration(self, recipe, layout, device_type)
        sizes = {"data": layout.data, "shard": layout.shard, "pipeline": layout.pipeline}
        wrapper = (
            "torch.distributed.fsdp.fully_shard" if self.sharded else "DistributedDataParallel"
        )
        return replace(
            stages,
            arguments={**stages.arguments, "mesh": {n: s for n, s in sizes.items() if s > 1}},
            notes=(
                *stages.notes,
                f"Each stage is wrapped by {wrapper} over the ranks that have it.",
            ),
        )
