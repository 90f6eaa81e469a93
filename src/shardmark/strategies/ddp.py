"""DistributedDataParallel: a replica on every rank, gradients all-reduced."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from shardmark.core.errors import StrategyUnavailable
from shardmark.core.machine import Machine
from shardmark.core.numerics import Numerics, PowerSGD
from shardmark.strategies.base import (
    RankContext,
    Strategy,
    common_settings,
)

if TYPE_CHECKING:
    from torch import Tensor, nn

    from shardmark.core.recipe import Recipe
    from shardmark.strategies.powersgd import PowerSGDReduction
    from shardmark.strategies.replicas import DistributedReplicas
    from shardmark.strategies.step import EagerWorker
    from shardmark.workloads.base import Workload

MIN_COMPRESSION_RATE = 2
HOOKS = "torch.distributed.algorithms.ddp_comm_hooks"

POWERSGD_DEFAULTS = {"powersgd_rank": 1, "powersgd_start": 2}
LEAST_COMPILED_MB = 1
"""torch's first bucket, which its compiler wants to be the smallest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DDP(Strategy):
    """A full replica on every rank, gradients all-reduced (Li et al., VLDB 2020, section 3.2)."""

    name: str = "ddp"
    bucket_mb: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 25.0
    """Gradients in one all-reduce, MiB: smaller overlaps sooner, larger pays less latency."""
    static_graph: bool = False
    """The same parameters are used in every step: DDP may then reorder its buckets once."""
    find_unused_parameters: bool = False
    """Look in each step for parameters that the loss does not depend on, which DDP else waits for.
    Those that no rank used have no gradient, and are not updated."""
    compress: Literal["none", "bf16", "fp16", "powersgd"] = "none"
    """What gradients are reduced as, by torch's hooks: cast to 16 bits, or matrices as products of
    two thin ones (Vogels et al., NeurIPS 2019)."""
    powersgd_rank: Annotated[int, Field(ge=1)] = POWERSGD_DEFAULTS["powersgd_rank"]
    """Columns of PowerSGD's thin matrices: more of them lose less, and are more to send."""
    powersgd_start: Annotated[int, Field(ge=2)] = POWERSGD_DEFAULTS["powersgd_start"]
    """Steps before PowerSGD begins, with whole gradients: DDP lays its buckets out in two."""

    def check(self, world_size: int, machine: Machine, recipe: Recipe) -> None:
        Strategy.check(self, world_size, machine, recipe)
        if recipe.compile != "none" and self.bucket_mb < LEAST_COMPILED_MB:
            raise StrategyUnavailable(
                self.name,
                f"PyTorch cuts what it compiles at buckets of {LEAST_COMPILED_MB} MiB or more",
                f"set bucket_mb to at least {LEAST_COMPILED_MB}, or recipe.compile to none",
            )
        if self.compress != "powersgd":
            given = [k for k, usual in POWERSGD_DEFAULTS.items() if getattr(self, k) != usual]
            if given:
                found = f"compress is {self.compress}, which takes no {' and no '.join(given)}"
                raise StrategyUnavailable(self.name, found, "leave it out, or compress: powersgd")
            return
        if recipe.channels_last:
            raise StrategyUnavailable(
                self.name,
                "torch's PowerSGD takes gradients for matrices in the order of their axes",
                "set recipe.channels_last to false, or compress: bf16",
            )
        keeps = "PowerSGD adds what a step lost to the next one"
        if recipe.precision == "fp16":
            raise StrategyUnavailable(
                self.name,
                f"{keeps}, and a step that overflows fp16 would spoil them all",
                "set recipe.precision to bf16 or fp32, or compress: fp16",
            )
        if self.find_unused_parameters:
            raise StrategyUnavailable(
                self.name,
                "torch's PowerSGD divides by the norm of a gradient, which is 0 where it is unused",
                "leave find_unused_parameters out, or set compress: bf16",
            )

    def numerics(self, recipe: Recipe) -> Numerics:
        if self.compress == "powersgd":
            return Numerics(
                power_sgd=PowerSGD(
                    rank=self.powersgd_rank,
                    start_step=self.powersgd_start,
                    seed=recipe.seed,
                    min_compression_rate=MIN_COMPRESSION_RATE,
                )
            )
        return Numerics(reduction_precision="fp32" if self.compress == "none" else self.compress)

    def loads(self) -> tuple[str, ...]:
        compressing = () if self.compress == "none" else (f"{HOOKS}.powerSGD_hook",)
        return ("torch.nn.parallel", *compressing)

    def settings(self, recipe: Recipe) -> Mapping[str, object]:
        own: dict[str, object] = {"broadcast_buffers": False, "gradient_compression": self.compress}
        if self.compress == "powersgd":
            own["powersgd"] = self.powersgd_options()
        else:
            own["gradient_reduction_precision"] = self.numerics(recipe).reduction_precision
        return common_settings(recipe) | own

    def check_model(
        self, workload: Workload, model: nn.Module, world_size: int, nodes: int = 1
    ) -> None:
        from shardmark.strategies.parameters import check_parameters

        if self.compress == "powersgd":
            instead = "set compress: bf16"
            check_parameters(self.name, model, "torch's PowerSGD", "scalar", instead=instead)

    def start(self, workload: Workload, recipe: Recipe, context: RankContext) -> EagerWorker:
        from shardmark.strategies.step import EagerWorker

        return self.start_as(EagerWorker, workload, recipe, context)

    def start_as(
        self,
        kind: Callable[..., EagerWorker],
        workload: Workload,
        recipe: Recipe,
        context: RankContext,
    ) -> EagerWorker:
        """A worker of that kind, whose gradients DDP reduces."""
        from shardmark.strategies.execution import build_on
        from shardmark.strategies.replicas import DistributedReplicas

        model = build_on(context.device, workload, recipe, keeps_strides=self._keeps_strides())
        self.check_model(workload, model, context.world_size, context.nodes)
        ddp = DistributedReplicas(model, **self.arguments())
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        trained = list(named.values())
        gradient_bytes = sum(p.numel() * p.element_size() for p in trained)
        seen: list[Tensor] = []

        def untracked_bytes() -> int:
            """Gradients are views of the buckets, which the reducer keeps when they are dropped.

            Once Python has seen them, it may find them from then on: held here, it always does.
            """
            if found := [p.grad for p in trained if p.grad is not None]:
                seen[:] = found
            return 0 if seen else gradient_bytes

        def synchronise(last: bool) -> None:
            ddp.require_backward_grad_sync = last  # what `no_sync` sets

        compression = self._compressed(ddp, named, recipe, context)
        return kind(
            model,
            wrapped_model=ddp,
            workload=workload,
            recipe=recipe,
            device=context.device,
            shares=context.world_size,
            synchronise=synchronise,
            accumulates_alone=True,
            error_feedback=tuple if compression is None else compression.tensors,
            untracked_bytes=untracked_bytes,
        )

    def _keeps_strides(self) -> bool:
        """Whether weights may lie in memory in another order than their axes have."""
        return True

    def _compressed(
        self,
        ddp: DistributedReplicas,
        named: Mapping[str, nn.Parameter],
        recipe: Recipe,
        context: RankContext,
    ) -> PowerSGDReduction | None:
        """Reduce gradients as `compress` says; return PowerSGD's state, where it is used."""
        import torch
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        if self.compress in ("bf16", "fp16"):
            hook = getattr(default_hooks, f"{self.compress}_compress_hook")
            # Under its own name DDP takes bf16's for NCCL alone; gloo adds up bf16, too.
            ddp.register_comm_hook(None, lambda state, bucket: hook(state, bucket))  # noqa: PLW0108
        chosen = self.numerics(recipe).power_sgd
        if chosen is None:
            return None
        if context.device.type == "cpu" and torch.cuda.is_available():
            raise StrategyUnavailable(
                self.name,
                "torch's PowerSGD asks a GPU that it sees to wait for the CPU",
                "hide the GPUs: CUDA_VISIBLE_DEVICES=''",
            )
        from shardmark.strategies.powersgd import PowerSGDReduction

        return PowerSGDReduction(ddp, named, chosen, self.powersgd_options())

    def powersgd_options(self) -> dict[str, Any]:
        """Of torch's PowerSGDState: all that change what is computed.

        The first factors are handed in, so that its seed draws nothing.
        """
        return {
            "matrix_approximation_rank": self.powersgd_rank,
            "start_powerSGD_iter": self.powersgd_start,
            "min_compression_rate": MIN_COMPRESSION_RATE,
            "use_error_feedback": True,
            "warm_start": True,
            "orthogonalization_epsilon": 0,
            "random_seed": 0,
            "batch_tensors_with_same_shape": False,
        }

    def arguments(self, buffers_option: str | None = None) -> dict[str, Any]:
        """Of DistributedDataParallel; whose option for buffers has that name, or the installed
        torch's."""
        return {
            "bucket_cap_mb": self.bucket_mb,
            "gradient_as_bucket_view": True,
            "static_graph": self.static_graph,
            "find_unused_parameters": self.find_unused_parameters,
            buffers_option or _buffers_option(): False,
        }


@cache
def _buffers_option() -> str:
    """What the installed torch calls the option, without importing it; 2.13 renamed it."""
    major, minor = version("torch").split(".")[:2]
    return "forward_sync_buffers" if (int(major), int(minor)) >= (2, 13) else "broadcast_buffers"
