"""The files of a run as frozen models.  Imports no torch."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from shardmark.core.errors import ErrorKind
from shardmark.core.layout import Layout
from shardmark.core.traffic import RequiredTraffic

SCHEMA_VERSION: Literal[1] = 1


class Outcome(StrEnum):
    """How a trial ended."""

    OK = "ok"
    OUT_OF_MEMORY = "out_of_memory"
    TIMED_OUT = "timed_out"
    FAILED = "failed"
    UNAVAILABLE = "unavailable"
    INTERRUPTED = "interrupted"


NOT_MEASURED = (Outcome.UNAVAILABLE, Outcome.INTERRUPTED)
"""Asked again by the next command."""


class Stored(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, serialize_by_alias=True)


class WindowRecord(Stored):
    """Consecutive measured steps of one rank, with the device idle at both ends."""

    first_step: int
    end_step: int
    started_at_seconds: float
    """Unix time."""
    window_seconds: float


class EpochRecord(Stored):
    """One pass over the training set (or the whole training, where the recipe counts steps)."""

    epoch: int
    first_step: int
    end_step: int
    train_loss: float | None
    """Mean over this rank's steps; a summary takes the mean over all ranks."""
    evaluation_seconds: float | None
    """Slowest rank; None where this epoch was not evaluated."""
    quality: dict[str, float | None] | None
    """None for a metric that is not a finite number: JSON has no name for it."""


class CollectiveRecord(Stored):
    """Collectives of one kind that one rank called in one optimizer step.

    The mean step of a round, where several steps make one in which the ranks meet.
    """

    calls: float
    payload_bytes: float
    """Bytes of the rank's input tensors (for a gather: its own part)."""


class ProbeRecord(Stored):
    """What untimed steps after the training counted on one rank; None where it could not."""

    parameter_bytes: int | None = None
    gradient_bytes: int | None = None
    optimizer_state_bytes: int | None = None
    host_state_bytes: int | None = None
    """Of those three kinds, what a rank with a CUDA device has in host memory; None on a CPU."""
    peak_memory_bytes: int | None = None
    """CPU: from counting the allocator's events.  CUDA: None, the measured windows tell."""
    collectives: dict[str, CollectiveRecord] | None = None
    exposed_communication_seconds: float | None = None
    """Per step: time in which communication ran and no computation did."""
    parameters: int | None = None
    """Elements of the whole model's parameters; on the first rank."""
    trained_parameters: int | None = None
    """Those of them that have gradients."""
    trained_matrices: tuple[tuple[int, int, int], ...] = ()
    """Those as matrices: rows (the first dimension), columns, and how many there are of them."""
    flops_per_sample: int | None = None
    """Floating-point operations of forward and backward, from the model's operators."""
    hardware_flops_per_sample: int | None = None
    """With what activation checkpointing computes again."""
    divided: dict[str, int] | None = None
    """Elements of a sample that pass into and out of divided layers, as `ModelSize` has them."""
    divided_again: dict[str, int] = {}
    between_stages_bytes: int = 0
    """Of a sample that pass between a pipeline's stages, and, below, what two stages hold."""
    tied_parameters: int = 0
    batch_norms: int | None = None
    """Modules of the whole model that take statistics of one rank's share of a batch."""
    reasons: dict[str, str] = {}
    """Why a field is None."""


class ExchangeRecord(Stored):
    """What passed between one rank and others in a parameter server's trial."""

    pushes: int = 0
    """Gradients of one step that a worker sent, or a server got whole."""
    pulls: int = 0
    """Times that parameters were handed out."""
    sent_bytes: dict[str, int] = {}
    """By the other rank's number; payload of gradients and parameters alone."""
    received_bytes: dict[str, int] = {}
    updates: int | None = None
    """Optimizer steps that a server took; None of a worker."""
    staleness: dict[str, int] = {}
    """Server: updates between a gradient's parameters and its use -> how many gradients."""
    wait_seconds: float = 0.0
    """Time in which workers waited for the barrier or the bound."""
    lost_samples: int = 0
    """First server: samples that were handed to workers which died before they sent a gradient."""


class CheckpointRecord(Stored):
    """One checkpoint, as one rank wrote it."""

    step: int
    """Steps taken by then."""
    seconds: float
    """From when the last rank had come until all had written theirs."""
    written_bytes: int
    """By this rank."""


class ResumeRecord(Stored):
    """One rank's going on after a restart."""

    restart: int
    """How many there had been by then."""
    step: int
    """Steps that the checkpoint had; 0 where there was none."""
    at_seconds: float
    """Unix time at which training went on."""
    lost_seconds: float
    """Since training had last stood at that step."""


class RestartRecord(Stored):
    """Why the launcher started the ranks anew."""

    restart: int
    """The first is 1."""
    at_seconds: float
    """Unix time at which the cause was noticed."""
    reason: str


class RankRecord(Stored):
    """What one rank measured; it writes this file itself when it ends, in whatever way it can."""

    rank: int
    role: Literal["worker", "server"]
    host: str
    node: int = 0
    """Its machine's number in the trial."""
    kernel: str | None = None
    """Names the running kernel, which several nodes share that are containers of one machine."""
    local_rank: int | None = None
    """Its number on that machine, which is its CUDA device's there."""
    pid: int
    device: str
    """`cpu`, or the CUDA device's name."""
    device_uuids: tuple[str, ...] = ()
    """Of every CUDA device that it computes on."""
    threads: int
    first_step_at_seconds: float | None
    """Unix time at which the first training step began, warm-up included."""
    windows: tuple[WindowRecord, ...] = ()
    synthetic: bool = False
    """The data are made up."""
    steps_per_epoch: int | None = None
    """Optimizer steps in one pass over the training set."""
    samples: int = 0
    """In the windows, counted."""
    tokens: int | None = None
    """In the windows, counted without padding; None where samples are not made of tokens."""
    samples_total: int = 0
    """In all steps of the recipe, warm-up included."""
    epochs: tuple[EpochRecord, ...] = ()
    evaluation_seconds: tuple[float, ...] = ()
    compile_seconds: float | None = None
    """Of torch.compile, until the training had ended; None where nothing is compiled."""
    recompilations: int | None = None
    """Those in the windows."""
    peak_memory_bytes: int | None = None
    """CUDA allocator, largest over the windows."""
    peak_reserved_bytes: int | None = None
    nonfinite_steps: int = 0
    first_nonfinite: tuple[int, str] | None = None
    """The first such step, from 0 on, and what its loss was: NaN or infinite."""
    skipped_steps: int = 0
    data_errors: tuple[str, ...] = ()
    better: dict[str, Literal["lower", "higher"]] = {}
    """Metric of the user's own -> which of its values are better, where the task says so."""
    corpora: dict[str, str] = {}
    """SHA-256 of the text that comes with the installation, by name."""
    initial_weights_sha256: str | None = None
    final_weights_sha256: str | None = None
    sample_order_sha256: str | None = None
    """Of this rank's sample ids in the order trained on, to the end of the recipe."""
    structure_sha256: str | None = None
    """Of the model's modules with their settings, and names and shapes of tensors; where one rank
    of a share probes."""
    probe: ProbeRecord | None = None
    exchange: ExchangeRecord | None = None
    """With parameter servers; None in other strategies."""
    lost: str | None = None
    """How this worker died while the others trained on."""
    checkpoints: tuple[CheckpointRecord, ...] = ()
    """Those that the training did not go back behind."""
    resumes: tuple[ResumeRecord, ...] = ()
    settings: dict[str, Any] = {}
    """The mathematics as set: averaging, clipping, precision of masters and reduction, ..."""
    error: RankError | None = None


class RankError(Stored):
    """Why one rank ended early."""

    kind: ErrorKind
    message: str
    remedy: str | None = None
    at_seconds: float


class Failure(Stored):
    """Why a trial has another outcome than `ok`."""

    reason: str
    remedy: str | None = None
    rank: int | None = None
    node: int | None = None
    """On several nodes: the rank's, or the one that was lost."""


class Summary(Stored):
    """One metric of one trial."""

    value: float
    over: Literal["maximum", "sum", "mean", "trial"]
    """How `value` comes from the ranks; `trial` where it was never a rank's."""
    mean: float | None = None
    maximum: float | None = None
    imbalance: float | None = None
    """Maximum over mean of the ranks, minus one."""


class FileRecord(Stored):
    """A file beside `result.json`, so that a truncated one is noticed."""

    size_bytes: int
    sha256: str


class StabilityKind(StrEnum):
    """How a measurement can have been disturbed."""

    TRIAL_DRIFT = "drift within a trial"
    RUN_DRIFT = "drift over repeats"
    SLOW_STEPS = "slow steps"
    OUTLYING_REPEAT = "outlying repeat"
    OTHER_PROCESSES = "other processes"
    SHARED_DEVICE = "other processes on the device"
    MEMORY_PRESSURE = "memory pressure"
    SLOWED_DEVICE = "device slowed down"
    UNWATCHED = "sampling stopped"


DISTURBING = (
    StabilityKind.OTHER_PROCESSES,
    StabilityKind.SHARED_DEVICE,
    StabilityKind.MEMORY_PRESSURE,
    StabilityKind.SLOWED_DEVICE,
)
"""What comes from outside the trial: no speed is decided from it.  The most telling first."""


class StabilityFinding(Stored):
    """One thing that disturbed a trial, found in its raw files when it ended."""

    kind: StabilityKind
    text: str
    severity: float
    """A share or a logarithm, comparable within the kind."""
    p_value: float | None = None
    """How often chance alone shows as much in one trial; None where chance does not."""


class TrialResult(Stored):
    """One trial: `trials/ID/result.json`."""

    schema_version: Literal[1] = SCHEMA_VERSION
    id: str
    trial: dict[str, Any]
    """The resolved trial, as it was given to the ranks."""
    strategy: str
    strategy_options: dict[str, Any]
    world_size: int
    layout: Layout
    """How the strategy factored its ranks, and what each sees and holds."""
    needed_traffic: RequiredTraffic | None = None
    """What the strategy's definition needs the network to carry in a step; None where no rank
    counted the model's parameters."""
    precision: str
    varied: dict[str, Any]
    synthetic: bool
    repeat: int
    order: int
    """Place in the run's random order."""
    outcome: Outcome
    failure: Failure | None
    restarts: tuple[RestartRecord, ...] = ()
    """Whatever its outcome is."""
    started_at_seconds: float
    """Unix time."""
    total_seconds: float
    ranks: tuple[RankRecord, ...]
    metrics: dict[str, Summary | None]
    """Every metric of the catalogue that is a trial's own; None where `missing` says why."""
    missing: dict[str, str]
    """Metric -> why it is None."""
    stability: tuple[StabilityFinding, ...] = ()
    """Of a trial that ended `ok`."""
    attempt: int = 1
    """Earlier ones were disturbed, and are kept in `set-aside/`."""
    files: dict[str, FileRecord]

    @property
    def disturbed(self) -> str | None:
        """What else took so much of the machine that the times decide nothing; None if nothing."""
        worst = [each for kind in DISTURBING for each in self.stability if each.kind is kind]
        return worst[0].text if worst else None

    @property
    def twin(self) -> bool:
        """True for a trial that is no repeat: its initial weights are changed by one rounding."""
        return bool(self.trial.get("twin"))

    @property
    def diverged(self) -> str | None:
        """The first loss that is not finite; steps that the loss scaler skipped do not count."""
        failed = []
        for rank in self.ranks:
            steps = max((epoch.end_step for epoch in rank.epochs), default=0)
            if rank.nonfinite_steps > rank.skipped_steps or 0 < steps <= rank.nonfinite_steps:
                first, kind = rank.first_nonfinite or (steps, "not finite")
                since = f" from step {first + 1} on" if rank.first_nonfinite else ""
                if rank.nonfinite_steps != steps - first:
                    since += f" in {rank.nonfinite_steps} of {steps} steps"
                failed.append((first, rank.rank, f"the loss is {kind}{since}"))
        if not failed:
            return None
        _, number, text = min(failed)
        return text if len(failed) == len(self.ranks) else f"{text} (rank {number})"


RankRecord.model_rebuild()
