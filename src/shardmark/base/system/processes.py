"""Linux process settings: the death signal of a parent and the scheduling policy of a thread."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
POLL_SECONDS = 0.02


def die_with_parent(parent_pid: int, death_signal: signal.Signals = signal.SIGKILL) -> None:
    """Ask the kernel to send this process a signal when its parent ends (Linux)."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, death_signal)
    if os.getppid() != parent_pid:  # the parent has ended already
        signal.raise_signal(death_signal)


def adopt_orphans() -> None:
    """Make this process the parent of all processes below it whose parents end (Linux)."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def end_descendants() -> None:
    """Kill all processes below this one, whatever session they are in, and wait for their end."""
    while True:
        for pid in _descendants():
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(POLL_SECONDS)


def _descendants() -> list[int]:
    """Return the processes below this one."""
    children: dict[int, list[int]] = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            _, parent, *_ = file.read_text(errors="replace").rpartition(")")[2].split()
            children.setdefault(int(parent), []).append(int(file.parent.name))
    descendants, below = [], [os.getpid()]
    while below:
        level = children.get(below.pop(), [])
        descendants += level
        below += level
    return descendants


def schedule_as_batch() -> None:
    """Give this thread, and processes forked from it, the policy SCHED_BATCH.

    A monitoring thread that wakes up takes a core from a rank for some milliseconds, and every
    other rank waits for that rank: under `fsdp` on two cores it cost 3 to 5 % of the speed
    (docs/method/measurement.md).  A thread with SCHED_BATCH does not preempt others when it wakes
    up.  Unlike a higher nice value, the policy can be changed back without a privilege.
    See sched(7).
    """
    _set_policy(os.SCHED_BATCH)


def schedule_normally() -> None:
    """Give this thread Linux's default policy SCHED_OTHER."""
    _set_policy(os.SCHED_OTHER)


def _set_policy(policy: int) -> None:
    with suppress(OSError):  # a sandbox may forbid the call: all threads then share one policy
        os.sched_setscheduler(0, policy, os.sched_param(0))
