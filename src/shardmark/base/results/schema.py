"""Models of the result files of a run.  Imports no torch."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Literal, get_args

from pydantic import model_validator

from shardmark.base.errors import ErrorKind
from shardmark.base.files.stored import Stored
from shardmark.base.layout import Layout
from shardmark.base.results.migrate import without_restarts
from shardmark.base.traffic import RequiredTraffic

SCHEMA_VERSION: Literal[1] = 1


class Outcome(StrEnum):
    """The outcome of a trial."""

    OK = "ok"
    OUT_OF_MEMORY = "out_of_memory"
    TIMED_OUT = "timed_out"
    FAILED = "failed"
    UNAVAILABLE = "unavailable"
    INTERRUPTED = "interrupted"


NOT_MEASURED = (Outcome.UNAVAILABLE, Outcome.INTERRUPTED)
"""Outcomes of trials that the next command runs again."""

Phase = Literal["forward", "backward", "update", "other"]
"""Phase of an optimizer step; `other` is outside of the three."""
PHASES: tuple[Phase, ...] = get_args(Phase)


class WindowRecord(Stored):
    """Consecutive measured steps of a rank, with the device idle at both ends."""

    first_step: int
    end_step: int
    started_at_seconds: float
    """Unix time."""
    window_seconds: float


class EpochRecord(Stored):
    """An epoch of a rank, or its full training if the recipe sets the number of steps."""

    epoch: int
    first_step: int
    end_step: int
    train_loss: float | None
    """Mean over the steps of this rank; a summary has the mean over all ranks."""
    evaluation_seconds: float | None
    """Time of the slowest rank; None if the epoch was not evaluated."""
    quality: dict[str, float | None] | None
    """Quality metrics; None for a value that is not a finite number, which JSON cannot store."""


class CollectiveRecord(Stored):
    """Collectives of the same kind that a rank called in an optimizer step.

    If the ranks synchronise only every few steps, these are means over such a round.
    """

    calls: float
    payload_bytes: float
    """Bytes of the rank's input tensors; for a gather, of its own shard."""


class ProbeRecord(Stored):
    """Counts of the untimed steps after the training on a rank; None if not available."""

    parameter_bytes: int | None = None
    gradient_bytes: int | None = None
    optimizer_state_bytes: int | None = None
    host_state_bytes: int | None = None
    """Bytes of these three kinds in host memory, on a rank with a CUDA device; None on a CPU."""
    peak_memory_bytes: int | None = None
    """CPU: counted from the allocator's events.  CUDA: None, as the measured windows have it."""
    collectives: dict[str, CollectiveRecord] | None = None
    collectives_by_phase: dict[Phase, dict[str, CollectiveRecord]] | None = None
    """Collectives by phase of the step, then by kind; None in results of earlier versions."""
    exposed_communication_seconds: float | None = None
    """Time in a step during which communication ran and no computation did."""
    parameters: int | None = None
    """Number of parameters of the full model; stored by the first rank."""
    trained_parameters: int | None = None
    """Number of parameters that have gradients."""
    trained_matrices: tuple[tuple[int, int, int], ...] = ()
    """Shapes of the trained parameters, in the form of `ModelSize.trained_matrices`."""
    frozen_element_bytes: float = 4.0
    """Mean bytes of an element of the frozen parameters."""
    flops_per_sample: int | None = None
    """Floating-point operations of a sample's forward and backward passes."""
    hardware_flops_per_sample: int | None = None
    """The same with the recomputation of activation checkpointing."""
    divided: dict[str, int] | None = None
    """Communication of split layers, in the form of `ModelSize.divided`."""
    divided_again: dict[str, int] = {}
    between_stages_bytes: int = 0
    """Bytes of a sample that pipeline stages send each other."""
    tied_parameters: int = 0
    batch_norms: int | None = None
    """Number of modules of the full model that compute batch statistics of a rank's share."""
    reasons: dict[str, str] = {}
    """Reasons for missing values, by field."""


class ExchangeRecord(Stored):
    """Communication of a rank with others in a trial with parameter servers."""

    pushes: int = 0
    """Number of complete gradients that a worker sent, or a server received."""
    pulls: int = 0
    """Number of times that a server sent parameters to a worker."""
    sent_bytes: dict[str, int] = {}
    """Payload of gradients and parameters, by the number of the other rank."""
    received_bytes: dict[str, int] = {}
    updates: int | None = None
    """Number of optimizer steps of a server; None for a worker."""
    staleness: dict[str, int] = {}
    """Number of gradients of a server by staleness: updates since their parameters were sent."""
    wait_seconds: float = 0.0
    """Time for which workers waited at the barrier or for the staleness bound."""


class RankRecord(Stored):
    """Measurements of a rank, which it writes to a file when it ends."""

    rank: int
    role: Literal["worker", "server"]
    host: str
    node: int = 0
    """Number of the rank's machine in the trial."""
    kernel: str | None = None
    """Identifier of the running kernel, which containers on the same machine share."""
    local_rank: int | None = None
    """Number of the rank on its machine, and of its CUDA device."""
    pid: int
    device: str
    """`cpu`, or the name of the CUDA device."""
    device_uuids: tuple[str, ...] = ()
    """UUIDs of all CUDA devices on which the rank computes."""
    threads: int
    first_step_at_seconds: float | None
    """Unix time at which the first training step began, warm-up included."""
    windows: tuple[WindowRecord, ...] = ()
    synthetic: bool = False
    """True if the data are generated."""
    steps_per_epoch: int | None = None
    """Number of optimizer steps in an epoch."""
    samples: int = 0
    """Number of samples in the measured windows."""
    tokens: int | None = None
    """Number of tokens in the windows without padding; None if samples have no tokens."""
    samples_total: int = 0
    """Number of samples in all steps of the recipe, including the warm-up."""
    epochs: tuple[EpochRecord, ...] = ()
    evaluation_seconds: tuple[float, ...] = ()
    compile_seconds: float | None = None
    """Time of torch.compile until the end of the training; None without compilation."""
    recompilations: int | None = None
    """Number of compilations in the windows."""
    peak_memory_bytes: int | None = None
    """Largest value of the CUDA allocator in the windows."""
    peak_reserved_bytes: int | None = None
    nonfinite_steps: int = 0
    first_nonfinite: tuple[int, str] | None = None
    """Number, from 0, of the first step with a non-finite loss, and the loss: NaN or infinite."""
    skipped_steps: int = 0
    data_errors: tuple[str, ...] = ()
    better: dict[str, Literal["lower", "higher"]] = {}
    """Direction of improvement of the user's metrics, by name, if the task defines it."""
    corpora: dict[str, str] = {}
    """SHA-256 of the installed text corpora, by name."""
    initial_weights_sha256: str | None = None
    final_weights_sha256: str | None = None
    sample_order_sha256: str | None = None
    """Hash of the rank's sample numbers in the order of training, to the end of the recipe."""
    structure_sha256: str | None = None
    """Hash of the model's modules with their settings, and of the names and shapes of tensors."""
    probe: ProbeRecord | None = None
    exchange: ExchangeRecord | None = None
    """None for strategies without parameter servers."""
    settings: dict[str, Any] = {}
    """Settings of the numerics: averaging, clipping, precision of master weights, ..."""
    error: RankError | None = None


class RankError(Stored):
    """The error that ended a rank."""

    kind: ErrorKind
    message: str
    remedy: str | None = None
    at_seconds: float


class Failure(Stored):
    """The reason for an outcome other than `ok`."""

    reason: str
    remedy: str | None = None
    rank: int | None = None
    node: int | None = None
    """Number of the failed rank's node, or of the lost node; None on a single node."""


class Summary(Stored):
    """The value of a metric of a trial."""

    value: float
    over: Literal["maximum", "sum", "mean", "trial"]
    """Aggregation of the ranks' values; `trial` for a metric that ranks do not have."""
    mean: float | None = None
    maximum: float | None = None
    imbalance: float | None = None
    """Maximum over mean of the ranks, minus one."""


class FileRecord(Stored):
    """Size and hash of a file of the trial, by which a truncated or changed file is detected."""

    size_bytes: int
    sha256: str


class StabilityKind(StrEnum):
    """Kinds of disturbances of a measurement."""

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
"""Disturbances from outside the trial, which exclude it from comparisons of speed, the most
informative first."""


class StabilityFinding(Stored):
    """A disturbance of a trial, detected in its raw files when it ended."""

    kind: StabilityKind
    text: str
    severity: float
    """Fraction or logarithm that is comparable among findings of this kind."""
    p_value: float | None = None
    """Probability of such a finding in an undisturbed trial; None if chance cannot cause it."""


class TrialResult(Stored):
    """Result of a trial, stored as `trials/ID/result.json`."""

    schema_version: Literal[1] = SCHEMA_VERSION
    id: str
    trial: dict[str, Any]
    """The description of the trial that the ranks received."""
    strategy: str
    strategy_options: dict[str, Any]
    world_size: int
    layout: Layout
    """Places of the ranks in the strategy's layout."""
    needed_traffic: RequiredTraffic | None = None
    """Traffic that the strategy's definition requires in a step; None if no rank counted the
    model's parameters."""
    precision: str
    varied: dict[str, Any]
    synthetic: bool
    repeat: int
    order: int
    """Position in the random order of the run."""
    outcome: Outcome
    failure: Failure | None
    started_at_seconds: float
    """Unix time."""
    total_seconds: float
    ranks: tuple[RankRecord, ...]
    metrics: dict[str, Summary | None]
    """Metrics in `TRIAL_METRICS`; `missing` has the reason for each that is None."""
    missing: dict[str, str]
    """Reasons for metrics that are None, by metric."""
    stability: tuple[StabilityFinding, ...] = ()
    """Disturbances of a trial with the outcome `ok`."""
    attempt: int = 1
    """Number of the attempt; results of disturbed attempts are in `set-aside/`."""
    files: dict[str, FileRecord]

    @model_validator(mode="before")
    @classmethod
    def _of_earlier_versions(cls, data: Any) -> Any:
        return without_restarts(data)

    @property
    def disturbed(self) -> str | None:
        """Description of a disturbance that makes the times unusable, or None."""
        findings = [
            finding for kind in DISTURBING for finding in self.stability if finding.kind is kind
        ]
        return findings[0].text if findings else None

    @property
    def twin(self) -> bool:
        """True for a trial whose initial weights differ by one rounding; it is not a repeat."""
        return bool(self.trial.get("twin"))

    @property
    def diverged(self) -> str | None:
        """Description of the first non-finite loss, without steps that the loss scaler skipped."""
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
