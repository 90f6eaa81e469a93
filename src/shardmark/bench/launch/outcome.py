"""Decides the outcome of a trial and its cause from the files of its ranks.  No torch."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from shardmark.base.files.run_files import LOG_FILE
from shardmark.base.results.schema import Failure, Outcome, RankError, RankRecord

MEMORY_REMEDY = (
    "use a smaller batch, gradient_accumulation, activation_checkpointing, "
    "or a strategy that shards more (fsdp, zero-3)"
)
MISMATCHES = ("op.preamble.length <= op.nbytes", "collective mismatch")
LOST_PEER = ("Connection closed by peer", "Connection reset by peer")
MISMATCH = (
    "the ranks exchanged different tensors, which happens where they use different parts of the "
    "model in one step (skipped layers, experts without a token)"
)
MISMATCH_REMEDY = (
    "call every part on every rank, for example multiplied by zero, or use ddp with "
    "find_unused_parameters: true"
)
SEE_LOG = f"see {LOG_FILE}"
PROVOKED = frozenset({signal.SIGTERM, signal.SIGABRT})
"""Signals that end a rank because another one has ended, from the launcher or a library."""
SAME_TIME_SECONDS = 1.0
"""Time within which several deaths may have one cause.  Clocks of nodes differ, and a rank sees the
connection to a dead rank close before the launcher notices the death."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessEnd:
    """The end of one rank's process, as its launcher saw it."""

    rank: int
    exit_code: int
    """Exit code; negative for the signal that ended the process."""
    at_seconds: float

    @property
    def unprovoked(self) -> bool:
        """True if a signal ended the process that another rank's end cannot cause."""
        return self.exit_code < 0 and -self.exit_code not in PROVOKED

    def __str__(self) -> str:
        return f"rank {self.rank} {describe(self.exit_code)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LostNode:
    """A node that became silent while a trial ran on it."""

    node: int
    host: str
    reason: str

    def __str__(self) -> str:
        return f"node {self.node} ({self.host}) was lost: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """The end of a trial's processes, as the engine saw it."""

    status: Literal["exited", "timed_out", "interrupted"]
    agent_exit_code: int | None
    failures: tuple[ProcessEnd, ...] = ()
    oom_kills: int = 0
    """Processes that the kernel killed meanwhile because memory ran out, on the whole machine."""
    lost: LostNode | None = None
    """The first node that was lost; the trial was then ended on the others."""
    clocks_ahead_seconds: Mapping[int, float] = field(default_factory=dict)
    """Seconds by which the clock of each rank's node is ahead; `failures` are corrected for it."""


def kernel_oom_kills() -> int:
    """Return how many processes the kernel has killed because memory ran out; 0 if unknown."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    counts = dict(line.split() for line in lines)
    return int(counts.get("oom_kill", 0))


def describe(exit_code: int) -> str:
    """Return the end of a process in words."""
    if exit_code < 0:
        names = {number.value: number.name for number in signal.Signals}
        return f"was ended by {names.get(-exit_code, f'signal {-exit_code}')}"
    return f"ended with exit code {exit_code}"


def first_death(deaths: Sequence[ProcessEnd]) -> ProcessEnd | None:
    """Return the first death; of those within a second, one that no other rank provoked."""
    first = min(deaths, key=lambda end: end.at_seconds, default=None)
    if first is None:
        return None
    last_seconds = first.at_seconds + SAME_TIME_SECONDS
    unprovoked = [end for end in deaths if end.unprovoked and end.at_seconds <= last_seconds]
    return min(unprovoked, key=lambda end: end.at_seconds, default=first)


def decide(
    ending: Ending,
    ranks: Sequence[RankRecord],
    *,
    processes: int,
    trial_seconds: float,
    progress: Sequence[int | None],
) -> tuple[Outcome, Failure | None]:
    """Return the trial's outcome and its reason.

    `progress` has each rank's steps, if known; it is empty if the ranks do not write them.
    """
    if ending.status == "interrupted":
        return Outcome.INTERRUPTED, Failure(
            reason="interrupted by the user", remedy="run again with the same --out to finish"
        )
    ahead_seconds = ending.clocks_ahead_seconds
    errors = [(rank.rank, rank.error) for rank in ranks if rank.error is not None]
    errors.sort(key=lambda entry: entry[1].at_seconds - ahead_seconds.get(entry[0], 0.0))
    # Reversed, so that the first error of each kind is kept.
    by_kind = {error.kind: (rank, error) for rank, error in reversed(errors)}
    if memory := by_kind.get("out_of_memory"):
        return Outcome.OUT_OF_MEMORY, _failure(*memory, remedy=MEMORY_REMEDY)
    first = first_death(ending.failures)
    rank_killed = first is not None and first.exit_code == -signal.SIGKILL
    agent_killed = first is None and ending.agent_exit_code == -signal.SIGKILL
    if ending.oom_kills and (rank_killed or agent_killed) and ending.status == "exited":
        victim = f"rank {first.rank}" if first is not None else "the launcher"
        return Outcome.OUT_OF_MEMORY, Failure(
            reason=f"the kernel killed {victim}, because memory ran out",
            remedy=MEMORY_REMEDY,
            rank=first.rank if first is not None else None,
        )
    if ending.status == "timed_out":
        return Outcome.TIMED_OUT, _timed_out(trial_seconds, progress)
    if unavailable := by_kind.get("unavailable"):
        return Outcome.UNAVAILABLE, _failure(*unavailable)
    failure = _exited(ending, errors, finished=len(ranks) - len(errors), processes=processes)
    return (Outcome.OK if failure is None else Outcome.FAILED), failure


def explain_mismatch(failure: Failure, log: Iterable[str]) -> Failure:
    """Return the failure, explained if gloo reports different tensors in the ranks' output.

    The output counts unless a rank recorded an error that another rank's end does not cause.
    """
    head, _, recorded = failure.reason.partition(": ")
    independent = recorded and not any(text in recorded for text in LOST_PEER)
    lines = (failure.reason,) if independent else (failure.reason, *log)
    if not any(text in line for line in lines for text in MISMATCHES):
        return failure
    reason = f"{head}: {MISMATCH}"
    return failure.model_copy(update={"reason": reason, "remedy": MISMATCH_REMEDY})


def _exited(
    ending: Ending, errors: Sequence[tuple[int, RankError]], *, finished: int, processes: int
) -> Failure | None:
    """Return the failure of processes that have all ended; None if all succeeded."""
    if (lost := ending.lost) is not None:
        return Failure(
            reason=str(lost), remedy="check the machine and the network to it", node=lost.node
        )
    # A death makes the other ranks fail, so the first one is the cause.
    end, code = first_death(ending.failures), ending.agent_exit_code
    launcher_killed = code is not None and code < 0 and not (end is not None and end.unprovoked)
    if launcher_killed:
        errors, end = (), None
    if errors and (end is None or end.exit_code >= 0 or end.exit_code == -signal.SIGTERM):
        return _failure(*errors[0])
    if end is not None:
        return Failure(reason=str(end), remedy=SEE_LOG, rank=end.rank)
    if code == 0 and finished == processes:
        return None
    end_text = "left no exit code" if code is None else describe(code)
    return Failure(
        reason=f"the launcher {end_text}; {finished} of {processes} ranks had finished",
        remedy=SEE_LOG,
    )


def _failure(rank: int, error: RankError, *, remedy: str | None = None) -> Failure:
    """Return the error of a rank, without a stack that a library appended to its message."""
    lines = [line.strip()[:500] for line in error.message.splitlines() if line.strip()]
    return Failure(
        reason=f"rank {rank}: {lines[0] if lines else 'no message'}",
        remedy=remedy or error.remedy or SEE_LOG,
        rank=rank,
    )


def _timed_out(trial_seconds: float, progress: Sequence[int | None]) -> Failure:
    places = ", ".join(
        f"rank {rank} " + ("had not begun" if steps is None else f"had taken {steps} steps")
        for rank, steps in enumerate(progress)
    )
    steps_taken = [steps for steps in progress if steps is not None]
    complete = steps_taken and len(steps_taken) == len(progress)
    reason = f"not done after limits.trial_seconds = {trial_seconds:g} s"
    return Failure(
        reason=f"{reason}: {places}" if places else reason,
        remedy=f"raise limits.trial_seconds, or look in {LOG_FILE} for the stack of each rank",
        rank=progress.index(min(steps_taken)) if complete else None,
    )
