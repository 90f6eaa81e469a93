"""Decides how a trial ended, from whatever its ranks left.  Imports no torch."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from shardmark.launch.local.deaths import describe, first_cause, is_unprovoked
from shardmark.results.schema import Failure, Outcome, RankError, RankRecord, RestartRecord

MEMORY_REMEDY = (
    "use a smaller batch, gradient_accumulation, activation_checkpointing, "
    "or a strategy that shards more (fsdp, zero-3)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessEnd:
    """How one rank's process ended, as the launcher saw it."""

    rank: int
    exit_code: int
    """Negative: the signal that ended it."""
    at_seconds: float

    @property
    def unprovoked(self) -> bool:
        """Whether no other rank's end can have ended it in this way."""
        return is_unprovoked(self.exit_code)


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
    failures: tuple[ProcessEnd, ...]
    oom_kills: int
    """Processes that the kernel killed for want of memory meanwhile, on the whole machine."""
    lost: LostNode | None = None
    """The first node that was lost; the trial was then ended on the others."""
    clocks_ahead_seconds: Mapping[int, float] = field(default_factory=dict)
    """By rank: how far its node's clock is ahead of the controller's.  `failures` are put right."""
    restarts: tuple[RestartRecord, ...] = ()
    """Why the ranks were started anew, each time; the last attempt's end is the trial's."""


def kernel_oom_kills() -> int:
    """Processes that the kernel has killed for want of memory since it started; 0 if untold."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    counts = dict(line.split() for line in lines)
    return int(counts.get("oom_kill", 0))


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
    errors = [
        (rank.rank, _by_our_clock(rank.error, ending.clocks_ahead_seconds.get(rank.rank, 0.0)))
        for rank in ranks
        if rank.error is not None
    ]
    if found := _first_of_kind(errors, "out_of_memory"):
        rank, error = found
        return Outcome.OUT_OF_MEMORY, Failure(
            reason=f"rank {rank}: {_first_line(error.message)}", remedy=MEMORY_REMEDY, rank=rank
        )
    first = first_cause(ending.failures)
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
    if found := _first_of_kind(errors, "unavailable"):
        return Outcome.UNAVAILABLE, _failure(*found)
    return _exited(ending, errors, finished=len(ranks) - len(errors), processes=processes)


def on_node(failure: Failure, node: int, host: str | None) -> Failure:
    """The failure of a rank with its node, for trials that have several."""
    where = f"node {node}" if host is None else f"node {node}, {host}"
    reason = f"{failure.reason} (rank {failure.rank} is on {where})"
    return failure.model_copy(update={"node": node, "reason": reason})


def _node_lost(lost: LostNode) -> Failure:
    return Failure(
        reason=str(lost),
        remedy="see whether the machine and the network to it are alive",
        node=lost.node,
    )


def _by_our_clock(error: RankError, ahead_seconds: float) -> RankError:
    return error.model_copy(update={"at_seconds": error.at_seconds - ahead_seconds})


def _exited(
    ending: Ending, errors: Sequence[tuple[int, RankError]], *, finished: int, processes: int
) -> tuple[Outcome, Failure | None]:
    if ending.lost is not None:
        return Outcome.FAILED, _node_lost(ending.lost)
    # A rank that dies drags the others down with it, so the first death is the cause.
    end = first_cause(ending.failures)
    if errors and (end is None or end.exit_code >= 0 or end.exit_code == -signal.SIGTERM):
        return Outcome.FAILED, _failure(*min(errors, key=lambda found: found[1].at_seconds))
    if end is not None:
        return Outcome.FAILED, Failure(
            reason=f"rank {end.rank} {describe(end.exit_code)}",
            remedy="see log.txt",
            rank=end.rank,
        )
    if ending.agent_exit_code != 0 or finished < processes:
        return Outcome.FAILED, Failure(
            reason=f"the launcher ended with code {ending.agent_exit_code} and "
            f"{finished} of {processes} ranks finished",
            remedy="see log.txt",
        )
    return Outcome.OK, None


def _first_of_kind(
    errors: Sequence[tuple[int, RankError]], kind: str
) -> tuple[int, RankError] | None:
    of_kind = [found for found in errors if found[1].kind == kind]
    return min(of_kind, key=lambda found: found[1].at_seconds, default=None)


def _failure(rank: int, error: RankError) -> Failure:
    return Failure(
        reason=f"rank {rank}: {_first_line(error.message)}",
        remedy=error.remedy or "see log.txt",
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


def _first_line(message: str) -> str:
    """The message without a stack that a library appended."""
    lines = [line for line in message.splitlines() if line.strip()]
    return lines[0].strip()[:500] if lines else "no message"
