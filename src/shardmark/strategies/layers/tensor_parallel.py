"""Tensor parallelism, alone and with FSDP2: layers divided over ranks that see the same samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from shardmark.core.errors import StrategyUnavailable
from shardmark.core.layout import Fractions, Layout, Mesh, on_mesh
from shardmark.core.machine import Machine
from shardmark.core.wire import ModelSize, Traffic, WireBytes
from shardmark.strategies.base import (
    FP32_BYTES,
    PRECISION_BYTES,
    LaunchConfiguration,
    RankContext,
    Strategy,
    check_machine,
    common_settings,
    refuse_fused_sgd,
    samples_of_share,
)
from shardmark.strategies.fsdp import DEFAULT_GROUP, HybridFSDP

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from shardmark.core.recipe import Recipe
    from shardmark.strategies.step import EagerWorker
    from shardmark.workloads.base import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorParallel(Strategy):
    """Every rank computes a part of each layer for the same samples (Shoeybi et al., 2019)."""

    name: str = "tp"
    sequence_parallel: bool = False
    """Between divided layers each rank has a part of every sequence (Korthikanti et al., 2022)."""
    loss_parallel: bool = False
    """The loss is computed on divided logits, which are never gathered."""

    def factors(self, world_size: int, nodes: int) -> Mesh:
        """How so many ranks are factored."""
        return Mesh(tensor=world_size)

    def check(self, world_size: int, machine: Machine, recipe: Recipe) -> None:
        twice = "ranks that share a layer see the same samples, and each would count them"
        check_machine(self.name, world_size, machine, recipe, norms_apart=twice)
        if recipe.compile != "none":
            raise StrategyUnavailable(
                self.name,
                "divided layers communicate inside of what would be compiled",
                "set recipe.compile to none",
            )
        refuse_fused_sgd(self.name, recipe)

    def layout(self, world_size: int, nodes: int = 1) -> Layout:
        factors = self.factors(world_size, nodes)
        part = 1 / (factors.shard * factors.tensor)
        holds = Fractions(parameters=part, gradients=part, optimizer_state=part)
        return on_mesh(factors, nodes=nodes, holds=holds)

    def wire_bytes(
        self, size: ModelSize, recipe: Recipe, world_size: int, nodes: int = 1
    ) -> WireBytes:
        """Activations are passed in the precision of the layer, gradients into a layer in fp32."""
        factors = self.factors(world_size, nodes)
        ranks = factors.tensor
        samples = samples_of_share(recipe, factors.data * factors.shard)
        computed = PRECISION_BYTES[recipe.precision]

        def passed(elements: Mapping[str, int], *sides: str) -> int:
            widths = {"in": FP32_BYTES, "rows": FP32_BYTES, "out": computed, "logits": computed}
            return samples * sum(elements.get(side, 0) * widths[side] for side in sides)

        once = passed(size.divided, "in", "out", "rows")
        again = {side: passed(size.divided_again, side) for side in ("in", "out", "logits")}
        if self.sequence_parallel:
            gathered = once + again["in"]
            traffic = [
                Traffic(kind="all_gather", payload_bytes=gathered / ranks, ranks=ranks),
                Traffic(kind="reduce_scatter", payload_bytes=once + again["out"], ranks=ranks),
            ]
            formula = "all-gather into divided layers, reduce-scatter out of them: 2 (t-1)/t A"
        else:
            payload = once + again["out"]
            traffic = [Traffic(kind="all_reduce", payload_bytes=payload, ranks=ranks)]
            formula = "all-reduce out of divided layers and of gradients into them: 2 (t-1)/t A"
        if not self.loss_parallel:
            logits = passed(size.divided, "logits") + again["logits"]
            traffic.append(Traffic(kind="all_gather", payload_bytes=logits / ranks, ranks=ranks))
            formula += ", all-gather of logits: (t-1)/t L"
        return WireBytes(traffic=tuple(traffic), formula=formula)

    def loads(self) -> tuple[str, ...]:
        return ("torch.distributed.tensor.parallel",)

    def settings(self, recipe: Recipe) -> Mapping[str, object]:
        return common_settings(recipe) | self._plan_options()

    def start(self, workload: Workload, recipe: Recipe, context: RankContext) -> EagerWorker:
        """Every rank builds the whole model, and keeps its part."""
        from torch.distributed.device_mesh import init_device_mesh

        from shardmark.strategies.execution import prepare
        from shardmark.strategies.layers.divided import DividedWorker, divide, problems_with
        from shardmark.workloads.base import Undivided

        factors, options = self.factors(context.world_size, context.nodes), self._plan_options()
        model = workload.build_model()
        plan = workload.tensor_plan(model)
        if isinstance(plan, Undivided):
            raise StrategyUnavailable(self.name, plan.reason, plan.remedy)
        for problem in problems_with(plan, model, factors.tensor, **options):
            raise StrategyUnavailable(self.name, problem.reason, problem.remedy)
        names = [name for name, size in factors if size > 1 or name == "tensor"]
        sizes = tuple(getattr(factors, name) for name in names)
        mesh = init_device_mesh(context.device.type, sizes, mesh_dim_names=tuple(names))
        divide(model, plan, mesh["tensor"], **options)
        model.to(context.device)
        prepare(model, workload, recipe, keeps_strides=False)
        return DividedWorker(
            model,
            workload=workload,
            recipe=recipe,
            device=context.device,
            shares=factors.data * factors.shard,
            synchronise=self._shard(model, workload, mesh, factors),
            replicated=False,
            loss_parallel=self.loss_parallel,
        )

    def _shard(
        self,
        model: nn.Module,
        workload: Workload,
        mesh: DeviceMesh,
        factors: Mesh,
    ) -> Callable[[bool], object] | None:
        """Divide what is left over ranks with other samples; what tells it the last micro-batch."""
        return None

    def launch_configuration(
        self, recipe: Recipe, layout: Layout, device_type: str
    ) -> LaunchConfiguration:
        return LaunchConfiguration(
            wrapper="torch.distributed.tensor.parallel.parallelize_module",
            arguments={"mesh": {"tensor": layout.tensor}, **self._plan_options()},
            notes=(
                "The plan divides a block's first layers by outputs (ColwiseParallel), its last"
                " ones and the embedding by inputs (RowwiseParallel). Tie tied weights again.",
            ),
        )

    def _plan_options(self) -> dict[str, bool]:
        return {"sequence_parallel": self.sequence_parallel, "loss_parallel": self.loss_parallel}


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedTensorParallel(TensorParallel):
    """Layers divided over tensor ranks, and what each of those holds sharded by FSDP2."""

    name: str = "fsdp-tp"
    mesh: Mesh | None = None
    """Ranks by axis, e.g. {shard: 2, tensor: 4}; null: `tensor` are those of a node, or 2 on a
    single node, and `shard` the rest."""
    reshard_after_forward: bool = True

    def factors(self, world_size: int, nodes: int) -> Mesh:
        if self.mesh is not None:
            return self.mesh
        tensor = DEFAULT_GROUP if nodes == 1 else world_size // nodes
        return Mesh(shard=max(1, world_size // tensor), tensor=tensor)

    def unsupported_reason(self, world_size: int, nodes: int = 1) -> str | None:
        factors = self.factors(world_size, nodes)
        if factors.pipeline > 1:
            return "it has no pipeline: leave out pipeline, or use 1"
        if factors.ranks != world_size:
            return f"mesh {factors} has {factors.ranks} ranks, not {world_size}"
        if factors.shard == 1 or factors.tensor == 1:
            return f"mesh {factors} needs 2 or more for shard and for tensor"
        if world_size // nodes % factors.tensor:
            return f"nodes of {world_size // nodes} ranks do not hold whole groups of {factors}"
        return None

    def wire_bytes(
        self, size: ModelSize, recipe: Recipe, world_size: int, nodes: int = 1
    ) -> WireBytes:
        layers = TensorParallel.wire_bytes(self, size, recipe, world_size, nodes)
        factors = self.factors(world_size, nodes)
        part = replace(
            size,
            parameters=size.parameters // factors.tensor,
            trained_parameters=size.trained_parameters // factors.tensor,
        )
        sharded = HybridFSDP(
            shard_group=factors.shard, reshard_after_forward=self.reshard_after_forward
        ).wire_bytes(part, recipe, factors.data * factors.shard)
        return WireBytes(
            traffic=(*layers.traffic, *sharded.traffic),
            formula=f"{layers.formula}; {sharded.formula}, of one tensor rank's part",
        )

    def loads(self) -> tuple[str, ...]:
        return (*TensorParallel.loads(self), "torch.distributed.fsdp")

    def _shard(
        self, model: nn.Module, workload: Workload, mesh: DeviceMesh, factors: Mesh
    ) -> Callable[[bool], object] | None:
        import torch
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        from shardmark.strategies.blocks import wrapped

        axes = ("data", "shard") if factors.data > 1 else ("shard",)
        for part in (*wrapped(model, "blocks", workload.blocks(model)), model):
            fully_shard(
                part,
                mesh=mesh[axes],
                mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32),
                reshard_after_forward=self.reshard_after_forward,
            )
        return model.set_requires_gradient_sync  # type: ignore[return-value]  # added by fully_shard

    def launch_configuration(
        self, recipe: Recipe, layout: Layout, device_type: str
    ) -> LaunchConfiguration:
        """Both wrappers: layers are divided first."""
        layers = TensorParallel.launch_configuration(self, recipe, layout, device_type)
        sizes = {"data": layout.data, "shard": layout.shard, "tensor": layout.tensor}
        mesh = {name: size for name, size in sizes.items() if size > 1}
        return replace(
            layers,
            arguments={**layers.arguments, "mesh": mesh},
            notes=(*layers.notes, "Then torch.distributed.fsdp.fully_shard of blocks and model."),
        )
