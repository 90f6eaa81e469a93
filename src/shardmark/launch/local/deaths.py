"""Notices in which order the children of this process end, and leaves reaping them to others."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

PAUSE_SECONDS = 0.005
PROVOKED = frozenset({signal.SIGTERM, signal.SIGABRT})
"""Signals that end a rank because another one has ended: the launcher's, and a library's own."""
SAME_TIME_SECONDS = 1.0
"""So far apart nodes may tell of one end: their clocks differ, and a rank that waits for another
sees its connection close before that one's launcher has taken note."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """One ended child."""

    pid: int
    exit_code: int
    """Negative: the signal that ended it."""
    at_seconds: float


class Cause(Protocol):
    """What may have ended a trial's ranks."""

    @property
    def at_seconds(self) -> float: ...

    @property
    def unprovoked(self) -> bool: ...


CauseT = TypeVar("CauseT", bound=Cause)


def first_cause(found: Sequence[CauseT]) -> CauseT | None:
    """The one that came first; of those that came with it, one that no other rank provoked."""
    first = min(found, key=lambda one: one.at_seconds, default=None)
    if first is None:
        return None
    last_seconds = first.at_seconds + SAME_TIME_SECONDS
    with_it = [one for one in found if one.unprovoked and one.at_seconds <= last_seconds]
    return min(with_it, key=lambda one: one.at_seconds, default=first)


def is_unprovoked(exit_code: int) -> bool:
    """Whether something from outside its trial, or its own fault, ended the process by a signal."""
    return exit_code < 0 and -exit_code not in PROVOKED


class DeathWatch:
    """A thread that waits for children without collecting them.

    PyTorch's launcher names the lowest of the ranks that it finds dead at once; the one that died
    first is the cause.
    """

    def __init__(self) -> None:
        self._seen: dict[int, Death] = {}
        threading.Thread(target=self._watch, name="death-watch", daemon=True).start()

    @property
    def deaths(self) -> list[Death]:
        """The ended children so far, first death first."""
        return list(self._seen.values())

    def _watch(self) -> None:
        while True:
            try:
                found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
            except ChildProcessError:
                found = None  # no child yet, or none left
            if found is not None and found.si_pid not in self._seen:
                signalled = found.si_code != os.CLD_EXITED
                self._seen[found.si_pid] = Death(
                    pid=found.si_pid,
                    exit_code=-found.si_status if signalled else found.si_status,
                    at_seconds=time.time(),
                )
                continue
            time.sleep(PAUSE_SECONDS if self._seen else 10 * PAUSE_SECONDS)


def describe(exit_code: int) -> str:
    """How a process ended, in words."""
    if exit_code < 0:
        names = {number.value: number.name for number in signal.Signals}
        return f"was ended by {names.get(-exit_code, f'signal {-exit_code}')}"
    return f"ended with exit code {exit_code}"
