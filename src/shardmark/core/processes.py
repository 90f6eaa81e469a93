"""What ties a process to the one that started it."""

from __future__ import annotations

import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int, end: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send a signal when the parent ends, however that happens (Linux)."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, end)
    if os.getppid() != parent_pid:  # it has ended already
        signal.raise_signal(end)
