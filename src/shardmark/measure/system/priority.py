"""Who goes first on a busy core: ranks, before everything that starts, watches or samples them.

A watcher that wakes up takes a core from a rank for some milliseconds, and every other rank waits
for that one: under `fsdp` on two cores it cost 3 to 5 % of the speed (docs/method/measurement.md).
A thread of the kernel's policy SCHED_BATCH waits until a core is free or its turn has come, and
needs no privilege to come back, as a higher nice value would.  See sched(7).
"""

from __future__ import annotations

import os
from contextlib import suppress


def give_way() -> None:
    """This thread, and what is forked from it, wakes up without taking a core from others."""
    _policy(os.SCHED_BATCH)


def take_part() -> None:
    """This thread is scheduled as ever."""
    _policy(os.SCHED_OTHER)


def _policy(policy: int) -> None:
    with suppress(OSError):  # a sandbox may forbid it: then all are equal
        os.sched_setscheduler(0, policy, os.sched_param(0))
