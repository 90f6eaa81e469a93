"""Decides how a trial ended and what was the cause, from whatever its ranks left.  No torch."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from shardmark.core.errors import STORAGE_EXIT
from shardmark.results.schema import Failure, Outcome, RankError, RankRecord

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
SEE_LOG = "see log.txt"
PROVOKED = frozenset({signal.SIGTERM, signal.SIGABRT})
"""Signals that end a rank because another one has ended: the launcher's, and a library's own."""
SAME_TIME_SECONDS = 1.0
"""So far apart nodes may tell of one end: their clocks differ, and a rank that waits for another
sees its connection close before that one's launcher has taken note."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessEnd:
    """How one rank's process ended, as the launcher saw it."""

    rank: int
    exit_code: int
    """Negative: the signal that ended it."""
    at_seconds: float

    @property
    def unprovoked(self) -> bool:
        """Whether a signal ended it that no other rank's end can have brought about."""
        return self.exit_code < 0 and -self.exit_code not in PROVOKED

    def __str__(self) -> str:
        return f"rank {self.rank} {describe(self.exit_code)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LostNode:
    """A node of which nothing was heard any more while a trial ran on it."""

    node: int
    host: str
    reason: str

    def __str__(self) -> str:
        return f"node {self.node} ({self.host}) was lost: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a trial's processes ended, as the engine saw it."""

    how: Literal["exited", "timed_out", "interrupted"]
    agent_exit_code: int | None
    failures: tuple[ProcessEnd, ...] = ()
    oom_kills: int = 0
    """Processes that the kernel killed for want of memory meanwhile, on the whole machine."""
    lost: LostNode | None = None
    """The first node that was lost; the trial was then ended on the others."""
    clocks_ahead_seconds: Mapping[int, float] = field(default_factory=dict)
    """By rank: how far its node's clock is ahead of the controller's.  `failures` are put right."""

    @property
    def stopped_by_disk(self) -> bool:
        """Whether a disk stopped a process, and kept it from leaving a word of it."""
        codes = (self.agent_exit_code, *(end.exit_code for end in self.failures))
        return STORAGE_EXIT in codes


def kernel_oom_kills() -> int:
    """Processes that the kernel has killed for want of memory since it started; 0 if untold."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    counts = dict(line.split() for line in lines)
    return int(counts.get("oom_kill", 0))


def describe(exit_code: int) -> str:
    """How a process ended, in words."""
    if exit_code < 0:
        names = {number.value: number.name for number in signal.Signals}
        return f"was ended by {names.get(-exit_code, f'signal {-exit_code}')}"
    return f"ended with exit code {exit_code}"


def first_death(deaths: Sequence[ProcessEnd]) -> ProcessEnd | None:
    """Return the death that came first; of those within a second, one that no rank provoked."""
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
    """The trial's outcome and its reason.  `progress` is each rank's steps taken, if known."""
    if ending.how == "interrupted":
        return Outcome.INTERRUPTED, Failure(
            reason="interrupted by the user", remedy="run again with the same --out to finish"
        )
    ahead_seconds = ending.clocks_ahead_seconds
    errors = [(rank.rank, rank.error) for rank in ranks if rank.error is not None]
    errors.sort(key=lambda told: told[1].at_seconds - ahead_seconds.get(told[0], 0.0))
    by_kind = {error.kind: (rank, error) for rank, error in reversed(errors)}  # the first of each
    if memory := by_kind.get("out_of_memory"):
        return Outcome.OUT_OF_MEMORY, _failure(*memory, remedy=MEMORY_REMEDY)
    first = first_death(ending.failures)
    rank_killed = first is not None and first.exit_code == -signal.SIGKILL
    agent_killed = first is None and ending.agent_exit_code == -signal.SIGKILL
    if ending.oom_kills and (rank_killed or agent_killed) and ending.how == "exited":
        victim = f"rank {first.rank}" if first is not None else "the launcher"
        return Outcome.OUT_OF_MEMORY, Failure(
            reason=f"the kernel killed {victim} for want of memory",
            remedy=MEMORY_REMEDY,
            rank=first.rank if first is not None else None,
        )
    if ending.how == "timed_out":
        return Outcome.TIMED_OUT, _timed_out(trial_seconds, progress)
    if unavailable := by_kind.get("unavailable"):
        return Outcome.UNAVAILABLE, _failure(*unavailable)
    failure = _exited(ending, errors, finished=len(ranks) - len(errors), processes=processes)
    return (Outcome.OK if failure is None else Outcome.FAILED), failure


def with_cause(failure: Failure, log: Iterable[str]) -> Failure:
    """The failure, explained where gloo's lines in the ranks' output tell its cause.

    An error that a rank recorded is its own cause, unless it is what another rank's end does.
    """
    head, _, recorded = failure.reason.partition(": ")
    own = recorded and not any(text in recorded for text in LOST_PEER)
    lines = (failure.reason,) if own else (failure.reason, *log)
    if not any(text in line for line in lines for text in MISMATCHES):
        return failure
    reason = f"{head}: {MISMATCH}"
    return failure.model_copy(update={"reason": reason, "remedy": MISMATCH_REMEDY})


def on_node(failure: Failure, node: int, host: str | None) -> Failure:
    """The failure of a rank with its node, for trials that have several."""
    where = f"node {node}" if host is None else f"node {node}, {host}"
    reason = f"{failure.reason} (rank {failure.rank} is on {where})"
    return failure.model_copy(update={"node": node, "reason": reason})


def _exited(
    ending: Ending, errors: Sequence[tuple[int, RankError]], *, finished: int, processes: int
) -> Failure | None:
    """What failed, of processes that have all ended; None where nothing did."""
    if (lost := ending.lost) is not None:
        return Failure(
            reason=str(lost),
            remedy="see whether the machine and the network to it are alive",
            node=lost.node,
        )
    # What dies drags the others down with it, so the first death is the cause.
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
    how = "did not tell how it ended" if code is None else describe(code)
    return Failure(
        reason=f"the launcher {how}; {finished} of {processes} ranks had finished",
        remedy=SEE_LOG,
    )


def _failure(rank: int, error: RankError, *, remedy: str | None = None) -> Failure:
    """What a rank reported, without a stack that a library appended to its message."""
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
    known = [steps for steps in progress if steps is not None]
    return Failure(
        reason=f"not done after limits.trial_seconds = {trial_seconds:g} s: {places}",
        remedy="raise limits.trial_seconds, or look in log.txt where each rank stood",
        rank=progress.index(min(known)) if known and len(known) == len(progress) else None,
    )
