"""What a strategy is: it lays out ranks, sets one up, and takes steps.  Imports no torch."""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, runtime_checkable

from shardmark.core.errors import StrategyUnavailable
from shardmark.core.layout import Fractions, Layout, data_parallel
from shardmark.core.machine import Machine
from shardmark.core.numerics import ONE_DEVICE, Numerics
from shardmark.core.shares import StepShard

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from shardmark.core.recipe import Recipe
    from shardmark.measure.step.recorder import Spans
    from shardmark.results.schema import ExchangeRecord
    from shardmark.strategies.initial_weights import InitialWeights
    from shardmark.workloads.base import Batch, Workload
    from shardmark.workloads.options import WorkloadOptions


LOSS_SCALE = {
    "initial": 2.0**16,
    "growth_factor": 2.0,
    "backoff_factor": 0.5,
    "growth_interval": 2000,
}
"""fp16, in every strategy: the scale falls after a step that is not finite, which is skipped, and
grows after so many good ones in a row."""

MixedPrecision = Literal["autocast", "native"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankContext:
    """The place of one started rank.  Its process group exists already."""

    rank: int
    world_size: int
    """Started processes, servers included."""
    local_rank: int
    local_world_size: int
    device: torch.device
    devices: int = 1
    """CUDA devices of this process; more than one only for a strategy of one process."""
    threads: int = 1
    """Of torch's operators on the CPU."""
    node: int = 0
    nodes: int = 1
    initial_weights: InitialWeights | None = None
    """Where a strategy that `builds_in_parts` finds the weights of a large model."""

    @property
    def all_devices(self) -> tuple[torch.device, ...]:
        """Those that this process computes on, its own first."""
        import torch

        others = (torch.device("cuda", index) for index in range(1, self.devices))
        return (self.device, *others)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldState:
    """The tensors of the model state that one rank holds right now, by kind.

    Tensors may share storage; bytes are counted once per storage.
    """

    parameters: tuple[Tensor, ...]
    gradients: tuple[Tensor, ...]
    optimizer_state: tuple[Tensor, ...]
    untracked_bytes: int = 0
    """Bytes of gradients that the library holds where Python sees no tensor (DDP's buckets)."""


WORD_BYTES = 8
PIECE_ELEMENTS = 2**14
"""Gloo's threads copy tensors of 2**15 elements and more by an OpenMP team of their own.  A process
with more OpenMP threads than cores lets none of them wait actively any more: after one large tensor
every later step of a rank with all cores is slower, by 5 % to 45 %."""


class TrainingGroup:
    """All training ranks, which meet outside of their steps: every one of them calls."""

    def barrier(self) -> None:
        """Wait until every training rank is here."""
        import torch.distributed as dist

        dist.barrier()

    def gather(self, value: object) -> list[object]:
        """Return every training rank's value, in order of rank.  It must be picklable."""
        import torch
        import torch.distributed as dist

        if dist.get_backend() != "gloo":
            values: list[object] = [None] * dist.get_world_size()
            dist.all_gather_object(values, value)
            return values
        message = pickle.dumps(value)
        sizes = [int(size) for size in _all_gathered(torch.tensor([len(message)]))]
        padded = bytearray(message.ljust(-(-max(sizes) // WORD_BYTES) * WORD_BYTES, b"\0"))
        words = torch.frombuffer(padded, dtype=torch.int64)
        rounds = [_all_gathered(piece) for piece in torch.split(words, PIECE_ELEMENTS)]
        messages = [torch.cat(pieces).numpy() for pieces in zip(*rounds, strict=True)]
        return [pickle.loads(m.tobytes()[:n]) for m, n in zip(messages, sizes, strict=True)]


def _all_gathered(tensor: Tensor) -> list[Tensor]:
    import torch.distributed as dist

    tensors = [tensor.new_empty(tensor.shape) for _ in range(dist.get_world_size())]
    dist.all_gather(tensors, tensor)
    return tensors


class Worker(Protocol):
    """One rank that trains, set up and ready.  Defaults: nobody but workers, in lockstep."""

    def step(self, batch: Batch, recorder: Spans) -> Tensor:
        """Take one optimizer step; return the rank's loss, shape (), on its device.

        The mean over all ranks is the step's: the sum over its batch by the whole weight.

        Must not copy to the host: a copy waits for the device, and the wait would be measured.
        """

    def set_learning_rate(self, learning_rate: float) -> None:
        """Use this learning rate from the next step on."""

    def share_weight(self, batch: Batch) -> float:
        """Return the weight of the rank's samples in the last step, which took this batch."""
        return batch.weight

    def settings(self) -> dict[str, object]:
        """Settings that are known only after the first step."""
        return {}

    def skipped_steps(self) -> int:
        """Optimizer steps left out so far because a loss-scaled gradient was not finite."""

    def full_parameters(self) -> dict[str, Tensor]:
        """Unsharded fp32 parameters by name, on the CPU.  Collective over training ranks."""

    def each_parameter(self) -> Iterable[tuple[str, Tensor]]:
        """The same one after the other, by name: a rank may not have the memory for all."""
        return sorted(self.full_parameters().items())

    def evaluation_model(self) -> AbstractContextManager[nn.Module] | None:
        """The model as it trains, sharded, in evaluation mode; None: it fits into a rank whole.

        Every rank has to call it equally often.
        """
        return None

    def full_gradients(self) -> dict[str, Tensor]:
        """Unsharded, averaged, unscaled fp32 gradients by parameter name, on the CPU.

        Collective.  Only between backward and update, that is on entering the span `optimizer`;
        not clipped yet.
        """

    def full_optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        """Unsharded optimizer state: parameter name -> key -> tensor, on the CPU.  Collective."""

    def buffers(self) -> dict[str, Tensor]:
        """This rank's buffers by name, on the CPU."""

    def held_state(self) -> HeldState:
        """What this rank holds now, as references: the caller must not keep them."""

    @cached_property
    def group(self) -> TrainingGroup:
        return TrainingGroup()

    def step_shards(self, end_step: int) -> Iterator[StepShard] | None:
        """What this rank takes next, until all shares of the steps before `end_step` are taken.

        None where every rank takes its own share of every step.
        """
        return None

    def round_steps(self) -> int:
        """Steps in which its communication comes round: each measurement takes whole rounds."""
        return 1

    def end_rounds(self) -> None:
        """Have each further step communicate as the last of a round; nothing trains after it."""
        return

    def exchange(self) -> ExchangeRecord | None:
        """What passed between this rank and parameter servers so far; None without any."""
        return None

    def between_stages(self) -> Mapping[str, int]:
        """Of `ModelSize`: what passes between a pipeline's stages, and what two of them hold."""
        return {}

    def close(self) -> None:
        """The training is over: nothing else is called any more."""
        return


@runtime_checkable
class Server(Protocol):
    """One rank that holds parameters for others and does not train."""

    def serve(self) -> None:
        """Answer the workers until the last one has closed; raise if one dies before that."""

    def held_state(self) -> HeldState:
        """What this rank holds now, as references: the caller must not keep them."""

    def held_bytes(self) -> int:
        """Bytes of all tensors that it holds on its device, those under way included."""

    def exchange(self) -> ExchangeRecord:
        """What passed between it and the workers so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy(ABC):
    """A way of sharing the training among ranks.  Its data-class fields are its options.

    Defaults are those of replicas: each process trains on a device of its own, gradients are
    all-reduced, none can be missed.
    """

    name: str

    def unsupported_reason(self, world_size: int, nodes: int = 1) -> str | None:
        """None, or why no machines could run it on so many ranks: such a cell is left out."""
        return None if world_size > 1 else "one rank has nobody to share the work with"

    def check(self, world_size: int, machine: Machine, recipe: Recipe) -> None:
        """Raise `StrategyUnavailable` if it cannot run so.  Starts nothing, imports no torch."""
        check_machine(self.name, world_size, machine, recipe)

    def check_model(
        self, workload: Workload, model: nn.Module, world_size: int, nodes: int = 1
    ) -> None:
        """Raise `StrategyUnavailable` for a model that it cannot train; changes nothing.

        The model may be without data.
        """
        return

    def layout(self, world_size: int, nodes: int = 1) -> Layout:
        """How so many training ranks are factored, and what each process sees and holds."""
        return data_parallel(world_size, nodes=nodes)

    def holds(self, world_size: int, nodes: int = 1) -> Fractions:
        """What a training rank holds, by the layout."""
        return self.layout(world_size, nodes).ranks[0].holds

    def for_workload(self, options: WorkloadOptions) -> Self:
        """Itself, or with what suits the workload in place of options that are left open."""
        return self

    def numerics(self, recipe: Recipe) -> Numerics:
        """What its steps compute; one device's mathematics unless it promises other ones."""
        return ONE_DEVICE

    def proof_options(self) -> Mapping[str, Any]:
        """Options that a verification changes, so that its few steps hold all of `numerics`."""
        return {}

    def guarantee(self) -> str | None:
        """What holds instead of the reference's mathematics; None where those hold."""
        return None

    def backend(self, device_type: str, recipe: Recipe) -> str:
        """The process group's, as `torch.distributed` names it."""
        return "nccl" if device_type == "cuda" else "gloo"

    def builds_in_parts(self) -> bool:
        """Whether its ranks can train a model that none of them could hold whole."""
        return False

    def loads(self) -> tuple[str, ...]:
        """Modules that the ranks will import, so that they can be loaded before the first trial."""
        return ()

    def settings(self, recipe: Recipe) -> Mapping[str, object]:
        """The mathematics that the library would otherwise default: recorded with every trial."""
        return common_settings(recipe)

    @abstractmethod
    def start(self, workload: Workload, recipe: Recipe, context: RankContext) -> Worker | Server:
        """Set up this process: a `Server` exactly where the layout gives it no share."""


def common_settings(recipe: Recipe) -> dict[str, object]:
    """The mathematics of a step as every strategy sets it, to which one adds its own."""
    return {
        "gradient_reduction": "sum over the step divided by its whole weight",
        "gradient_reduction_precision": "fp32",
        "gradient_clipping": recipe.gradient_clipping,
        "master_weights_precision": "fp32",
        "compute_precision": recipe.precision,
        "mixed_precision": "none" if recipe.precision == "fp32" else "autocast",
        "loss_scaling": {"kind": "dynamic", **LOSS_SCALE} if recipe.precision == "fp16" else None,
        "parameter_groups": "one group, every parameter",
        "batch_norm": (
            "statistics of each micro-batch over all ranks"
            if recipe.sync_batch_norm
            else "statistics of each rank's share; rank 0's buffers are evaluated"
        ),
        "last_batch": "left out when incomplete",
        "tf32": recipe.tf32,
        "compile": recipe.compile,
        "memory_format": "channels_last" if recipe.channels_last else "contiguous",
        "optimizer_implementation": recipe.optimizer.implementation,
    }


def is_native(mixed_precision: MixedPrecision | None, recipe: Recipe) -> bool:
    """Whether the library casts parameters; left open, in bf16: its documentation says so."""
    default = "native" if recipe.precision == "bf16" else "autocast"
    return recipe.precision != "fp32" and (mixed_precision or default) == "native"


def check_machine(
    strategy: str,
    devices: int,
    machine: Machine,
    recipe: Recipe,
    *,
    offload_instead: str | None = "fsdp or zero-2",
    no_sync_batch_norm: str | None = None,
) -> None:
    """Raise `StrategyUnavailable` for missing devices, and for a recipe that needs CUDA devices.

    Ranks share the cores of a CPU.  `offload_instead` is what to use for CPU offload; None where
    the strategy can.  `no_sync_batch_norm` is why it cannot synchronise batch norms; None where it
    can.
    """
    on_cpu = machine.device_type != "cuda"
    if not on_cpu and devices > machine.device_count:
        fewer = f"use at most {machine.device_count} ranks, or " if machine.device_count else ""
        raise StrategyUnavailable(
            strategy,
            f"it needs {devices} CUDA devices and this machine offers {machine.device_count}",
            f"{fewer}set device: cpu",
        )
    if recipe.precision == "bf16" and not machine.has_bf16:
        raise StrategyUnavailable(
            strategy,
            "a CUDA device here has no bf16 in hardware, and would compute it in fp32",
            "set recipe.precision: fp16, or fp32",
        )
    if recipe.compile == "model" and recipe.activation_checkpointing:
        raise StrategyUnavailable(
            strategy,
            "activation checkpointing recomputes block by block, which cuts a compiled model up",
            "set recipe.compile to blocks or none, or recipe.activation_checkpointing to false",
        )
    if recipe.cpu_offload and offload_instead is not None:
        raise StrategyUnavailable(
            strategy,
            "it has no CPU offload: parameters and optimizer state stay on the device",
            f"set recipe.cpu_offload to false, or use {offload_instead}",
        )
    if recipe.sync_batch_norm and no_sync_batch_norm is not None:
        raise StrategyUnavailable(
            strategy, no_sync_batch_norm, "set recipe.sync_batch_norm to false, or use ddp"
        )
    if recipe.cpu_offload and on_cpu:
        raise StrategyUnavailable(
            strategy,
            "CPU offload needs a CUDA device to offload from",
            "set recipe.cpu_offload to false",
        )


def refuse_fused_sgd(strategy: str, recipe: Recipe) -> None:
    """Raise `StrategyUnavailable` for an optimizer that torch does not have for sharded tensors."""
    if (recipe.optimizer.name, recipe.optimizer.implementation) == ("sgd", "fused"):
        raise StrategyUnavailable(
            strategy,
            "torch's fused SGD takes no sharded tensors",
            "set recipe.optimizer.implementation to foreach or default, or use adam or adamw",
        )


def samples_of_share(recipe: Recipe, shares: int) -> int:
    """Samples of a step that one share has."""
    if recipe.global_batch is not None:
        return recipe.global_batch // shares
    assert recipe.per_rank_batch is not None, "a recipe has one of both"
    return recipe.per_rank_batch
