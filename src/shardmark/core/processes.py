"""What ties a process to its parent, and who goes first on a busy core."""

from __future__ import annotations

import ctypes
import os
import signal
from contextlib import suppress

PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int, end: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send a signal when the parent ends, however that happens (Linux)."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, end)
    if os.getppid() != parent_pid:  # it has ended already
        signal.raise_signal(end)


def give_way() -> None:
    """This thread, and what is forked from it, wakes up without taking a core from others.

    A watcher that wakes up takes a core from a rank for some milliseconds, and every other rank
    waits for that one: under `fsdp` on two cores it cost 3 to 5 % of the speed
    (docs/method/measurement.md).  A thread of the kernel's policy SCHED_BATCH waits until a core is
    free or its turn has come, and needs no privilege to come back, as a higher nice value would.
    See sched(7).
    """
    _set_policy(os.SCHED_BATCH)


def take_part() -> None:
    """This thread is scheduled as ever."""
    _set_policy(os.SCHED_OTHER)


def _set_policy(policy: int) -> None:
    with suppress(OSError):  # a sandbox may forbid it: then all are equal
        os.sched_setscheduler(0, policy, os.sched_param(0))
