"""What a strategy is: it places ranks, sets one up, and takes steps.  Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from shardmark.core.machine import Machine
from shardmark.core.shares import StepShard
from shardmark.strategies.layout import Layout

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from shardmark.core.recipe import Recipe
    from shardmark.measure.step.recorder import Spans
    from shardmark.results.schema import ExchangeRecord
    from shardmark.strategies.wire import ModelSize, WireBytes
    from shardmark.workloads.base import Batch, Workload


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


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldState:
    """The tensors of the model state that one rank holds right now, by kind.

    Tensors may share storage; bytes are counted once per storage.
    """

    parameters: tuple[Tensor, ...]
    gradients: tuple[Tensor, ...]
    optimizer_state: tuple[Tensor, ...]
    untracked_bytes: int = 0
    """Bytes that the library holds where Python cannot see them (DDP's empty buckets)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointState:
    """What one rank needs to go on from where it stands between two steps."""

    own: Mapping[str, Tensor] = field(default_factory=dict)
    """Its part of parameters, optimizer state and buffers, by name."""
    shared: Mapping[str, Tensor] = field(default_factory=dict)
    """What every rank holds alike: one of each node is enough."""
    counts: Mapping[str, Any] = field(default_factory=dict)
    """Numbers, as JSON has them: loss scale, counters."""


class TrainingGroup(Protocol):
    """The training ranks, meeting outside of their steps.  Every one of them calls."""

    def barrier(self) -> None:
        """Wait until every training rank is here."""

    def gather(self, value: object) -> list[object]:
        """Every training rank's value in order of rank, on every one.  It must be picklable."""


class Worker(Protocol):
    """One rank that trains, set up and ready."""

    @property
    def group(self) -> TrainingGroup: ...

    def step_shards(self, end_step: int) -> Iterator[StepShard] | None:
        """What this rank takes next, until all shares of the steps before `end_step` are taken.

        None where every rank takes its own share of every step.
        """

    def close(self) -> None:
        """The training is over: nothing else is called any more."""

    def exchange(self) -> ExchangeRecord | None:
        """What passed between this rank and parameter servers so far; None without any."""

    def step(self, batch: Batch, recorder: Spans) -> Tensor:
        """Take one optimizer step; return the rank's mean loss, shape (), on its device.

        Must not copy to the host: a copy waits for the device, and the wait would be measured.
        """

    def set_learning_rate(self, learning_rate: float) -> None:
        """Use this learning rate from the next step on."""

    def skipped_steps(self) -> int:
        """Optimizer steps left out so far because a loss-scaled gradient was not finite."""

    def full_parameters(self) -> dict[str, Tensor]:
        """Unsharded fp32 parameters by name, on the CPU.  Collective over training ranks."""

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

    def checkpoint_state(self) -> CheckpointState:
        """What a checkpoint keeps of this rank, as references; between steps only."""

    def load_checkpoint_state(self, kept: CheckpointState) -> None:
        """Go on from there; before the first step.  Every training rank calls it."""

    def checkpoint_servers(self, step: int) -> None:
        """Have those who hold state for the workers keep it, as of so many steps.

        One training rank calls it, while all others wait.
        """


@runtime_checkable
class Server(Protocol):
    """One rank that holds parameters for others and does not train."""

    def serve(self, keep: Callable[[int], None] | None = None) -> None:
        """Answer the workers until the last one has closed or is gone.

        `keep` writes a checkpoint as of so many steps, whenever a worker asks for it.
        """

    def checkpoint_state(self) -> CheckpointState:
        """What a checkpoint keeps of this rank, as references."""

    def load_checkpoint_state(self, kept: CheckpointState) -> None:
        """Go on from there; before it serves."""

    def held_state(self) -> HeldState:
        """What this rank holds now, as references: the caller must not keep them."""

    def held_bytes(self) -> int:
        """Bytes of all tensors that it holds, those under way included."""

    def exchange(self) -> ExchangeRecord:
        """What passed between it and the workers so far."""


class Strategy(Protocol):
    """A way of sharing the training among ranks.  Its data-class fields are its options."""

    @property
    def name(self) -> str: ...

    def unsupported_reason(self, world_size: int, nodes: int = 1) -> str | None:
        """None, or why no machines could run it on so many ranks: such a cell is left out."""

    def check(self, world_size: int, machine: Machine, recipe: Recipe) -> None:
        """Raise `StrategyUnavailable` if it cannot run so.  Starts nothing, imports no torch."""

    def layout(self, world_size: int, nodes: int = 1) -> Layout:
        """How so many training ranks are factored, and what each process sees and holds."""

    def nodes_of(self, world_size: int, nodes: int) -> tuple[int, ...]:
        """Each process's node; training ranks shared out equally, neighbours together."""

    def wire_bytes(
        self, size: ModelSize, recipe: Recipe, world_size: int, nodes: int = 1
    ) -> WireBytes:
        """What its definition needs the network to carry in a step, whatever the library sends."""

    def guarantee(self) -> str | None:
        """What is promised instead of the reference's mathematics; None where those are."""

    def tolerates_worker_loss(self) -> bool:
        """Whether the other workers train on when one dies."""

    def resume_blocker(self, recipe: Recipe) -> str | None:
        """None, or why it cannot go on from a checkpoint with that recipe."""

    def backend(self, device_type: str) -> str:
        """The process group's: `nccl` or `gloo`."""

    def rank_device(self, rank: int, world_size: int, device_type: str) -> str:
        """`cuda` or `cpu`: where that process computes."""

    def loads(self) -> tuple[str, ...]:
        """Modules that the ranks will import, so that they can be loaded before the first trial."""

    def start(self, workload: Workload, recipe: Recipe, process: RankContext) -> Worker | Server:
        """A `Server` exactly on the ranks that `placement` gives None; the rest run the loop."""

    def settings(self, recipe: Recipe) -> Mapping[str, object]:
        """The mathematics that the library would otherwise default: recorded with every trial."""
