"""Interfaces of strategies, of training ranks and of servers.  Importing it imports no torch."""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, Self, runtime_checkable

from shardmark.base.errors import StrategyUnavailable
from shardmark.base.layout import Fractions, Layout, StepShard, data_parallel
from shardmark.base.machine import Machine
from shardmark.base.numerics import ONE_DEVICE, Numerics

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from shardmark.base.recipe import Recipe
    from shardmark.base.results.schema import ExchangeRecord
    from shardmark.ranks.measure.step.recorder import Spans
    from shardmark.ranks.strategies.initial_weights import InitialWeights
    from shardmark.ranks.workloads.base import Batch, Workload
    from shardmark.ranks.workloads.options import WorkloadOptions

LOSS_SCALE = {
    "initial": 2.0**16,
    "growth_factor": 2.0,
    "backoff_factor": 0.5,
    "growth_interval": 2000,
}
"""Loss scaling of every strategy in fp16: the scale falls after a step with a gradient that is not
finite, which is skipped, and grows after an interval of finite steps."""

MixedPrecision = Literal["autocast", "native"]
ParameterKind = Literal[
    "scalar",
    "sparse",
    "empty",
    "mixed types",
    "mixed types, frozen",
    "other types",
    "hooks",
    "strides",
]
"""Kinds of parameters that some libraries cannot train; `parameters.py` finds them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankContext:
    """Place of a started rank.  Its process group exists already."""

    rank: int
    world_size: int
    """Number of processes, servers included."""
    local_rank: int
    local_world_size: int
    device: torch.device
    devices: int = 1
    """CUDA devices of this process; DataParallel alone uses more than one."""
    threads: int = 1
    """Threads of torch's operators on the CPU."""
    node: int = 0
    nodes: int = 1
    initial_weights: InitialWeights | None = None
    """Weights of a large model, for a strategy that `builds_in_parts`."""

    @property
    def all_devices(self) -> tuple[torch.device, ...]:
        """Devices that this process computes on, `device` first."""
        import torch

        others = (torch.device("cuda", index) for index in range(1, self.devices))
        return (self.device, *others)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldState:
    """Tensors of the model state that a rank holds at the moment.

    Tensors may share storage; bytes are counted once per storage.
    """

    parameters: tuple[Tensor, ...]
    gradients: tuple[Tensor, ...]
    optimizer_state: tuple[Tensor, ...]
    untracked_bytes: int = 0
    """Bytes of gradients in buffers of the library that no Python tensor refers to."""


WORD_BYTES = 8
PIECE_ELEMENTS = 2**14
"""Largest number of elements in one message.

Gloo's threads copy tensors of 2**15 elements or more with an OpenMP team of their own.  In a
process with more OpenMP threads than cores no thread waits actively any more: after one large
tensor every later step of a rank that uses all cores is slower, by 5 % to 45 %.
"""


class TrainingGroup:
    """Collectives of all training ranks outside of steps.  Every training rank must call them."""

    def barrier(self) -> None:
        """Wait until every training rank has called."""
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
    """A training rank.  Defaults are those of synchronous ranks without servers."""

    checks_every_step: bool = False
    """True to compare the ranks' calls of sharded parts in every step, not in the first alone:
    `verify` sets it, as its steps are not measured."""

    def step(self, batch: Batch, recorder: Spans) -> Tensor:
        """Take one optimizer step; return the rank's loss, shape (), on its device.

        The mean over all ranks is the loss of the step: the sum over its batch divided by the
        batch's weight.  Must not copy to the host: a copy waits for the device, and the wait would
        be measured.
        """

    def set_learning_rate(self, learning_rate: float) -> None:
        """Set the learning rate of the next steps."""

    def share_weight(self, batch: Batch) -> float:
        """Return the weight of the rank's samples in the last step, which took this batch."""
        return batch.weight

    def settings(self) -> dict[str, object]:
        """Settings that are known only after the first step."""
        return {}

    def skipped_steps(self) -> int:
        """Number of optimizer steps skipped because a loss-scaled gradient was not finite."""

    def full_parameters(self) -> dict[str, Tensor]:
        """Unsharded fp32 parameters by name, on the CPU.  Collective over training ranks."""

    def each_parameter(self) -> Iterable[tuple[str, Tensor]]:
        """Iterate over `full_parameters` by name: a rank may not have the memory for all."""
        return sorted(self.full_parameters().items())

    def evaluated_weights(self) -> AbstractContextManager[object]:
        """Context in which the parameters have the values that are evaluated."""
        return nullcontext()

    def evaluation_model(self) -> AbstractContextManager[nn.Module] | None:
        """The sharded model in evaluation mode; None if a rank can hold the full model.

        Every rank must call it equally often.
        """
        return None

    def full_gradients(self) -> dict[str, Tensor]:
        """Unsharded, averaged, unscaled fp32 gradients by parameter name, on the CPU.

        Collective.  May only be called between the backward pass and the update, that is on
        entering the span `optimizer`.  Gradients are not clipped yet.
        """

    def full_optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        """Unsharded optimizer state: parameter name -> key -> tensor, on the CPU.  Collective."""

    def buffers(self) -> dict[str, Tensor]:
        """This rank's buffers by name, on the CPU."""

    def held_state(self) -> HeldState:
        """References to the state that this rank holds now; the caller must not keep them."""

    @cached_property
    def group(self) -> TrainingGroup:
        return TrainingGroup()

    def step_shards(self, end_step: int) -> Iterator[StepShard] | None:
        """Iterate over the shares that this rank trains, up to the step before `end_step`.

        None if every rank trains its own share of every step.
        """
        return None

    def round_steps(self) -> int:
        """Number of steps in a round of communication; measured windows contain full rounds."""
        return 1

    def end_rounds(self) -> None:
        """Make every further step end a round.  Only untimed counting steps follow."""
        return

    def exchange(self) -> ExchangeRecord | None:
        """Traffic between this rank and the parameter servers so far; None without servers."""
        return None

    def between_stages(self) -> Mapping[str, int]:
        """Fields of `ModelSize` about the stages of a pipeline."""
        return {}

    def close(self) -> None:
        """End the training: no other method is called afterwards."""
        return


@runtime_checkable
class Server(Protocol):
    """A rank that holds parameters for other ranks and does not train."""

    def serve(self) -> None:
        """Answer the workers until the last one has closed; raise if one dies before that."""

    def held_state(self) -> HeldState:
        """References to the state that this rank holds now; the caller must not keep them."""

    def held_bytes(self) -> int:
        """Bytes of all tensors on the server's device, messages included."""

    def exchange(self) -> ExchangeRecord:
        """Traffic between the server and the workers so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy(ABC):
    """A way to distribute training over ranks.  Fields of the data class are its options.

    Defaults are those of replicas: each process trains a full copy on its own device.
    """

    costs: ClassVar[str | None] = None
    """Place of its cost model, `package.module:Class`, which a subclass does not inherit."""
    library: ClassVar[str] = ""
    """Name of the library in messages on parameters that it cannot train."""
    refused_parameters: ClassVar[tuple[ParameterKind, ...]] = ()
    refuses_after_step: ClassVar[str] = ""
    """Reason why it cannot train a task with `after_step`; empty if it can."""
    name: str

    def unsupported_reason(self, world_size: int, nodes: int = 1) -> str | None:
        """Reason why no machine could run it on this number of ranks; None if some could."""
        return None if world_size > 1 else "it needs 2 ranks or more"

    def check(self, world_size: int, machine: Machine, recipe: Recipe) -> None:
        """Raise `StrategyUnavailable` if it cannot run here.  Starts nothing, imports no torch."""
        check_machine(self.name, world_size, machine, recipe)

    def check_model(
        self, workload: Workload, model: nn.Module, world_size: int, nodes: int = 1
    ) -> None:
        """Raise `StrategyUnavailable` for a model that it cannot train.  Must not change the model.

        The model may be without data.
        """
        if self.refused_parameters:
            from shardmark.ranks.strategies.parameters import check_parameters

            check_parameters(self.name, model, self.library, *self.refused_parameters)
        if self.refuses_after_step:
            refuse_after_step(self.name, workload, self.refuses_after_step)

    def layout(self, world_size: int, nodes: int = 1) -> Layout:
        """Layout of the ranks: the samples and the fraction of the state of each process."""
        return data_parallel(world_size, nodes=nodes)

    def holds(self, world_size: int, nodes: int = 1) -> Fractions:
        """Fractions of the state that a training rank holds by the layout."""
        return self.layout(world_size, nodes).ranks[0].holds

    def for_workload(self, options: WorkloadOptions) -> Self:
        """Return the strategy with defaults that suit the workload."""
        return self

    def numerics(self, recipe: Recipe) -> Numerics:
        """Numerics that its steps promise, by default those of one device."""
        return ONE_DEVICE

    def proof_options(self) -> Mapping[str, Any]:
        """Options that a verification sets, so that its few steps cover all of `numerics`."""
        return {}

    def guarantee(self) -> str | None:
        """Guarantee in place of the reference's numerics; None if those hold."""
        return None

    def backend(self, device_type: str, recipe: Recipe) -> str:
        """Backend of the process group, as `torch.distributed` names it."""
        return "nccl" if device_type == "cuda" else "gloo"

    def builds_in_parts(self) -> bool:
        """True if its ranks can train a model that is too large for a single one."""
        return False

    def loads(self) -> tuple[str, ...]:
        """Modules that the ranks import, so that they can be loaded before the first trial."""
        return ()

    def packages(self) -> tuple[str, ...]:
        """Packages that it needs beside PyTorch, by the names under which they are installed."""
        return ()

    def settings(self, recipe: Recipe) -> Mapping[str, object]:
        """Numerics that the library would otherwise set by default; stored with every trial."""
        return common_settings(recipe)

    @abstractmethod
    def start(self, workload: Workload, recipe: Recipe, context: RankContext) -> Worker | Server:
        """Set up this process; return a `Server` exactly if the layout gives it no share."""


def refuse_after_step(strategy: str, workload: Workload, reason: str) -> None:
    """Raise `StrategyUnavailable` if the task has a hook after each step."""
    remedy = "use ddp, fsdp, zero-1 or zero-2, or remove after_step"
    refuse(strategy, (workload.has_after_step, f"the task has after_step, and {reason}", remedy))


def common_settings(recipe: Recipe) -> dict[str, object]:
    """Settings of a step that are common to all strategies."""
    return {
        "gradient_reduction": "sum over the step divided by its whole weight",
        "gradient_reduction_precision": recipe.weights,
        "gradient_clipping": recipe.gradient_clipping,
        "master_weights_precision": recipe.weights,
        "compute_precision": recipe.precision,
        "mixed_precision": "none" if recipe.precision == recipe.weights else "autocast",
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
    """True if the library casts parameters; by default in bf16, as its documentation recommends.

    It has nothing to cast if the weights are bf16 themselves.
    """
    if recipe.weights != "fp32":
        return False
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
    no_bf16_weights: str | None = None,
) -> None:
    """Raise `StrategyUnavailable` for missing devices, and for a recipe that needs CUDA devices.

    Ranks share the cores of a CPU.  `offload_instead` names strategies that can offload to the
    CPU; None if this one can.  `no_sync_batch_norm` is the reason why it cannot synchronise batch
    norms, `no_bf16_weights` why it cannot train them; None if it can.
    """
    on_cpu = machine.device_type != "cuda"
    fewer = f"use at most {machine.device_count} ranks, or " if machine.device_count else ""
    refuse(
        strategy,
        (
            not on_cpu and devices > machine.device_count,
            f"it needs {devices} CUDA devices and this machine offers {machine.device_count}",
            f"{fewer}set device: cpu",
        ),
        (
            recipe.precision == "bf16" and not machine.has_bf16,
            "a CUDA device here has no bf16 in hardware, and would compute it in fp32",
            "set recipe.precision: fp16, or fp32",
        ),
        (
            recipe.compile == "model" and recipe.activation_checkpointing,
            "activation checkpointing recomputes block by block, which cuts a compiled model up",
            "set recipe.compile to blocks or none, or recipe.activation_checkpointing to false",
        ),
        (
            recipe.compile == "blocks" and recipe.activation_checkpointing == "selective",
            "compiled code does not show which of its results are those of products",
            "set recipe.compile to none, or recipe.activation_checkpointing to true",
        ),
        (
            recipe.cpu_offload and offload_instead is not None,
            "it has no CPU offload: parameters and optimizer state stay on the device",
            f"set recipe.cpu_offload to false, or use {offload_instead}",
        ),
        (
            recipe.sync_batch_norm and no_sync_batch_norm is not None,
            no_sync_batch_norm or "",
            "set recipe.sync_batch_norm to false, or use ddp",
        ),
        (
            recipe.weights != "fp32" and no_bf16_weights is not None,
            no_bf16_weights or "",
            "set recipe.weights to fp32, or use ddp or fsdp",
        ),
        (
            recipe.cpu_offload and on_cpu,
            "CPU offload needs a CUDA device to offload from",
            "set recipe.cpu_offload to false",
        ),
    )


def refuse(strategy: str, *problems: tuple[object, str, str]) -> None:
    """Raise `StrategyUnavailable` with reason and remedy of the first problem that is there."""
    for is_there, reason, remedy in problems:
        if is_there:
            raise StrategyUnavailable(strategy, reason, remedy)


def refuse_full_tensor_optimizers(strategy: str, recipe: Recipe) -> None:
    """Raise `StrategyUnavailable` for an optimizer that needs the tensors that are sharded."""
    needed = f"{recipe.optimizer.name} needs full tensors, and this strategy updates parts of them"
    remedy = "use ddp or zro, or recipe.optimizer.name: adamw, adam or sgd"
    refuse(strategy, (recipe.optimizer.needs_full_tensors, needed, remedy))


def refuse_for_distributed_tensors(strategy: str, recipe: Recipe) -> None:
    """Raise `StrategyUnavailable` for an optimizer that cannot update torch's sharded tensors."""
    refuse_full_tensor_optimizers(strategy, recipe)
    fused_sgd = (recipe.optimizer.name, recipe.optimizer.implementation) == ("sgd", "fused")
    remedy = "set recipe.optimizer.implementation to foreach or default, or use adam or adamw"
    refuse(strategy, (fused_sgd, "torch's fused SGD takes no sharded tensors", remedy))


def samples_of_share(recipe: Recipe, shares: int) -> int:
    """Samples of a step that one share has."""
    if recipe.global_batch is not None:
        return recipe.global_batch // shares
    assert recipe.per_rank_batch is not None, "a recipe has one of both"
    return recipe.per_rank_batch


def first_names(names: Sequence[str], count: int = 3) -> str:
    """Join the first names, and the number of the other ones."""
    more = len(names) - count
    return ", ".join(names[:count]) + (f" and {more} more" if more > 0 else "")
