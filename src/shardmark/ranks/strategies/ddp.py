"""DistributedDataParallel: a replica on every rank, with all-reduced gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from shardmark.base.machine import Machine
from shardmark.base.numerics import Numerics, PowerSGD
from shardmark.ranks.strategies.base import RankContext, Strategy, common_settings, refuse

if TYPE_CHECKING:
    from torch import Tensor, nn

    from shardmark.base.recipe import Recipe
    from shardmark.ranks.strategies.step import EagerWorker
    from shardmark.ranks.workloads.base import Workload

MIN_COMPRESSION_RATE = 2
HOOKS = "torch.distributed.algorithms.ddp_comm_hooks"

POWERSGD_DEFAULTS = {"powersgd_rank": 1, "powersgd_start": 2}
MIN_COMPILED_BUCKET_MB = 1
"""Size of torch's first bucket, which its compiler requires to be the smallest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DDP(Strategy):
    """A full replica on every rank, gradients all-reduced (Li et al., VLDB 2020, section 3.2)."""

    costs = "shardmark.ranks.costs.replicas:DDPCosts"

    name: str = "ddp"
    bucket_mb: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 25.0
    """Gradients in one all-reduce, MiB: smaller overlaps sooner, larger pays less latency."""
    static_graph: bool = False
    """Every step uses the same parameters: DDP may then reorder its buckets once."""
    find_unused_parameters: bool = False
    """Search in each step for parameters that the loss does not depend on; otherwise DDP waits for
    their gradients.  Parameters that no rank used have no gradient, and are not updated."""
    compress: Literal["none", "bf16", "fp16", "powersgd"] = "none"
    """Compression of gradients by torch's hooks: cast to 16 bits, or matrices as products of two
    low-rank factors (Vogels et al., NeurIPS 2019)."""
    powersgd_rank: Annotated[int, Field(ge=1)] = POWERSGD_DEFAULTS["powersgd_rank"]
    """Rank of PowerSGD's factors: a higher rank loses less, and sends more."""
    powersgd_start: Annotated[int, Field(ge=2)] = POWERSGD_DEFAULTS["powersgd_start"]
    """Steps before PowerSGD begins, with uncompressed gradients: DDP builds its buckets in two."""

    def check(self, world_size: int, machine: Machine, recipe: Recipe) -> None:
        Strategy.check(self, world_size, machine, recipe)
        powersgd = self.compress == "powersgd"
        changed = [k for k, default in POWERSGD_DEFAULTS.items() if getattr(self, k) != default]
        refuse(
            self.name,
            (
                recipe.compile != "none" and self.bucket_mb < MIN_COMPILED_BUCKET_MB,
                f"PyTorch splits compiled code at buckets of {MIN_COMPILED_BUCKET_MB} MiB or more",
                f"set bucket_mb to at least {MIN_COMPILED_BUCKET_MB}, or recipe.compile to none",
            ),
            (
                bool(changed) and not powersgd,
                f"compress is {self.compress}, which takes no {' and no '.join(changed)}",
                "leave it out, or compress: powersgd",
            ),
            (
                self.compress != "none" and recipe.weights != "fp32",
                "gradients of bf16 weights are sent in bf16 already",
                "set compress to none, or recipe.weights to fp32",
            ),
            (
                powersgd and recipe.channels_last,
                "torch's PowerSGD takes gradients for matrices in the order of their axes",
                "set recipe.channels_last to false, or compress: bf16",
            ),
            (
                powersgd and recipe.precision == "fp16",
                "PowerSGD carries the error of a step on, and one that overflows fp16 spoils it",
                "set recipe.precision to bf16 or fp32, or compress: fp16",
            ),
            (
                powersgd and self.find_unused_parameters,
                "torch's PowerSGD divides by the norm of a gradient, which is 0 if it is unused",
                "leave find_unused_parameters out, or set compress: bf16",
            ),
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
        compression: dict[str, object] = {}
        if self.compress == "powersgd":
            compression = {"powersgd": self.powersgd_options()}
        elif self.compress != "none":
            compression = {"gradient_reduction_precision": self.compress}
        common = common_settings(recipe) | {"broadcast_buffers": False}
        return common | {"gradient_compression": self.compress, **compression}

    def check_model(
        self, workload: Workload, model: nn.Module, world_size: int, nodes: int = 1
    ) -> None:
        from shardmark.ranks.strategies.parameters import check_parameters

        if self.compress == "powersgd":
            check_parameters(
                self.name, model, "torch's PowerSGD", "scalar", instead="set compress: bf16"
            )
        Strategy.check_model(self, workload, model, world_size, nodes)

    def start(self, workload: Workload, recipe: Recipe, context: RankContext) -> EagerWorker:
        from shardmark.ranks.strategies.step import EagerWorker

        return self.start_as(EagerWorker, workload, recipe, context)

    def start_as(
        self,
        worker_class: Callable[..., EagerWorker],
        workload: Workload,
        recipe: Recipe,
        context: RankContext,
    ) -> EagerWorker:
        """Start a worker of the given class whose gradients DDP reduces."""
        from shardmark.ranks.strategies.execution import build_on
        from shardmark.ranks.strategies.replicas import DistributedReplicas

        model = build_on(context.device, workload, recipe, keeps_strides=self._keeps_strides())
        self.check_model(workload, model, context.world_size, context.nodes)
        ddp = DistributedReplicas(model, **self.arguments())
        error_feedback: Callable[[], Iterable[Tensor]] = tuple
        if (power_sgd := self.numerics(recipe).power_sgd) is not None:
            from shardmark.ranks.strategies.powersgd import PowerSGDReduction

            reduction = PowerSGDReduction(ddp, power_sgd, self.powersgd_options(), context.device)
            error_feedback = reduction.tensors
        if self.compress in ("bf16", "fp16"):
            ddp.cast_gradients(self.compress)
        return worker_class(
            model,
            wrapped_model=ddp,
            workload=workload,
            recipe=recipe,
            device=context.device,
            shares=context.world_size,
            synchronise=ddp.synchronise,
            accumulates_alone=True,
            error_feedback=error_feedback,
            untracked_bytes=ddp.untracked_bytes,
        )

    def _keeps_strides(self) -> bool:
        """True if the strides of weights need not be in the order of their axes."""
        return True

    def powersgd_options(self) -> dict[str, Any]:
        """Options of torch's PowerSGDState that change the numerics.

        `PowerSGDReduction` draws the first factors, so the seed has no effect.
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
        """Arguments of DistributedDataParallel, whose option for buffers has different names."""
        return {
            "bucket_cap_mb": self.bucket_mb,
            "gradient_as_bucket_view": True,
            "static_graph": self.static_graph,
            "find_unused_parameters": self.find_unused_parameters,
            buffers_option or _buffers_option(): False,
        }


@cache
def _buffers_option() -> str:
    """Name of the option in the installed torch, without importing it; 2.13 renamed it."""
    major, minor = version("torch").split(".")[:2]
    return "forward_sync_buffers" if (int(major), int(minor)) >= (2, 13) else "broadcast_buffers"
