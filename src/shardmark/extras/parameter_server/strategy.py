"""Parameter servers: workers push gradients to them and pull parameters from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from shardmark.base.errors import StrategyUnavailable
from shardmark.base.layout import Fractions, Layout, RankLayout, data_parallel
from shardmark.base.machine import Machine
from shardmark.base.numerics import Numerics
from shardmark.ranks.strategies.base import (
    RankContext,
    Server,
    Strategy,
    check_machine,
    common_settings,
    refuse_full_tensor_optimizers,
)

if TYPE_CHECKING:
    from torch import nn

    from shardmark.base.recipe import Recipe
    from shardmark.extras.parameter_server.messages import Partition
    from shardmark.extras.parameter_server.worker import PushPullWorker
    from shardmark.ranks.workloads.base import ParameterGroup, Workload

PER_WORKER = "each worker's gradient by itself, as it comes"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterServer(Strategy):
    """Servers hold parameters and optimizer, workers a copy (Li et al., OSDI 2014).

    World size counts workers; the servers come on top and are the last ranks.
    """

    costs = "shardmark.extras.parameter_server.costs:ParameterServerCosts"
    library = "a parameter server"
    refused_parameters = ("other types",)
    refuses_after_step = "workers hold copies of the servers' weights"

    name: str = "ps-sync"
    servers: Annotated[int, Field(ge=1, le=1024)] = 1
    """Server ranks, among which the parameters are shared out by bytes."""
    wire: Literal["fp32", "bf16"] = "fp32"
    """Precision in which gradients and parameters are sent; the servers keep fp32."""
    bucket_mb: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 25.0
    """Gradients in one message, MiB of fp32: smaller starts sooner, larger pays less latency."""
    server_device: Literal["cpu", "cuda"] = "cpu"
    """`cuda`: each server has a device of its own, beyond those of the workers."""
    server_nodes: Literal["each", "last"] = "each"
    """On several nodes: servers on each node in turn, or all on the last one."""

    @property
    def staleness_bound(self) -> int | None:
        """Steps that a worker may be ahead of the slowest: 0 waits for all, None never waits."""
        return 0

    def rate_factor(self, workers: int) -> float:
        """Return the factor by which a push scales the learning rate."""
        return 1.0

    def unsupported_reason(self, world_size: int, nodes: int = 1) -> str | None:
        return None

    def check(self, world_size: int, machine: Machine, recipe: Recipe) -> None:
        if self.server_device == "cuda" and machine.device_type != "cuda":
            raise StrategyUnavailable(
                self.name, "server_device is cuda, and the workers are on the CPU", "set it to cpu"
            )
        if recipe.precision == "fp16":
            raise StrategyUnavailable(
                self.name,
                "fp16 needs one loss scale for all workers, which pushes gradients too late",
                "set recipe.precision to bf16 or fp32",
            )
        refuse_full_tensor_optimizers(self.name, recipe)
        on_device = self.servers if self.server_device == "cuda" else 0
        check_machine(
            self.name,
            world_size + on_device,
            machine,
            recipe,
            offload_instead="server_device: cpu, which is the default",
            no_sync_batch_norm="its workers exchange nothing, statistics of batch norm included",
            no_bf16_weights="its servers add gradients up, and update parameters, in fp32",
        )

    def layout(self, world_size: int, nodes: int = 1) -> Layout:
        """Layout in which a server holds its part of the gradients of all workers."""
        workers = data_parallel(world_size, nodes=nodes, holds=Fractions(optimizer_state=0.0))
        part = 1 / self.servers
        holds = Fractions(parameters=part, gradients=world_size * part, optimizer_state=part)
        in_turn = self.server_nodes == "each"
        servers = (
            RankLayout(
                share=None,
                holds=holds,
                node=index % nodes if in_turn else nodes - 1,
                on_cpu=self.server_device == "cpu",
            )
            for index in range(self.servers)
        )
        return replace(workers, ranks=(*workers.ranks, *servers))

    def guarantee(self) -> str | None:
        if self.staleness_bound == 0:
            return None
        if self.staleness_bound is None:
            return "every gradient is applied once, however stale"
        return f"every gradient is applied once, no worker over {self.staleness_bound} steps ahead"

    def backend(self, device_type: str, recipe: Recipe) -> str:
        """Gloo for every device: NCCL cannot reach servers on a CPU."""
        return "gloo"

    def numerics(self, recipe: Recipe) -> Numerics:
        return Numerics(message_precision=self.wire)

    def settings(self, recipe: Recipe) -> Mapping[str, object]:
        changed = {} if self.staleness_bound == 0 else {"gradient_reduction": PER_WORKER}
        return (
            common_settings(recipe)
            | {"wire_precision": self.wire, "staleness_bound": self.staleness_bound}
            | changed
        )

    def start(
        self, workload: Workload, recipe: Recipe, context: RankContext
    ) -> PushPullWorker | Server:
        import torch.distributed as dist

        from shardmark.extras.parameter_server.server import GradientServer
        from shardmark.extras.parameter_server.worker import PushPullWorker
        from shardmark.ranks.strategies.execution import build_on

        workers = context.world_size - self.servers
        model = build_on(context.device, workload, recipe, keeps_strides=False)
        self.check_model(workload, model, context.world_size, context.nodes)
        partition = self._partition(model, workload.parameter_groups)
        # Every process has to call this.  A step's gradients are clipped by the norm of all parts.
        among_servers = dist.new_group(list(range(workers, context.world_size)))
        among_workers: Any = None
        if self.staleness_bound == 0 and not workload.weights_known:
            among_workers = dist.new_group(list(range(workers)))
        if context.rank < workers:
            return PushPullWorker(
                model,
                partition=partition,
                workload=workload,
                recipe=recipe,
                device=context.device,
                shares=workers,
                bound=self.staleness_bound,
                rate_factor=self.rate_factor(workers),
                sample_ranks=among_workers,
            )
        assert isinstance(among_servers, dist.ProcessGroup), "this rank is one of its servers"
        enforces_bound = self.staleness_bound == 0 or context.rank == workers
        return GradientServer(
            model,
            partition[context.rank - workers],
            recipe=recipe,
            workers=workers,
            bound=self.staleness_bound if enforces_bound else None,
            norm_group=among_servers if self.servers > 1 else None,
            groups=workload.parameter_groups,
        )

    def _partition(self, model: nn.Module, groups: Sequence[ParameterGroup]) -> Partition:
        from shardmark.extras.parameter_server.messages import partition_parameters

        partition = partition_parameters(
            model,
            servers=self.servers,
            bucket_bytes=int(self.bucket_mb * 2**20),
            wire=self.wire,
            groups=groups,
        )
        if not all(partition):
            count = sum(len(bucket.segments) for part in partition for bucket in part)
            raise StrategyUnavailable(
                self.name,
                f"{self.servers} servers cannot share {count} trainable parameters",
                f"use at most {max(1, count)} servers" if count else "train some parameters",
            )
        return partition


@dataclass(frozen=True, slots=True, kw_only=True)
class AsynchronousServer(ParameterServer):
    """Each push is applied at once, each worker goes on with what it pulls (Dean et al., 2012).

    Workers take whatever share of a step is left: a faster one takes more of them.
    """

    costs = "shardmark.extras.parameter_server.costs:ParameterServerCosts"

    name: str = "ps-async"
    rate: Literal["full", "shared"] = "full"
    """Learning rate of a push: the recipe's, or `shared`: the recipe's over the number of workers,
    so that the pushes of a step together move parameters as far as one update of their mean."""

    def check(self, world_size: int, machine: Machine, recipe: Recipe) -> None:
        if self.rate == "shared" and self.staleness_bound == 0:
            raise StrategyUnavailable(
                self.name,
                "rate is shared, and staleness 0 has no pushes of one worker",
                "set rate to full, or raise staleness",
            )
        ParameterServer.check(self, world_size, machine, recipe)

    def rate_factor(self, workers: int) -> float:
        return 1 / workers if self.rate == "shared" else 1.0

    @property
    def staleness_bound(self) -> int | None:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundedServer(AsynchronousServer):
    """Asynchronous servers with no worker more than `staleness` steps ahead of the slowest.

    Source: stale synchronous parallel, Ho et al., NIPS 2013.  0 is `ps-sync`.
    """

    costs = "shardmark.extras.parameter_server.costs:ParameterServerCosts"

    name: str = "ps-bounded"
    staleness: Annotated[int, Field(ge=0)] = 3
    """Steps that the fastest worker may be ahead of the slowest."""

    @property
    def staleness_bound(self) -> int | None:
        return self.staleness
