"""Other processes that are busy when a run starts: a disturbed machine should be seen."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import psutil

BUSY_PERCENT = 5.0
BUSY_SECONDS = 0.2
"""How long the processes are watched."""


def busy_processes(*, sleep: Callable[[float], None] = time.sleep) -> list[dict[str, Any]]:
    """At most five processes, not ours, that use the CPU now: only their names are kept."""
    before = _cpu_seconds(_foreign_processes())
    started = time.monotonic()
    sleep(BUSY_SECONDS)
    elapsed = max(time.monotonic() - started, 1e-3)
    after = _cpu_seconds(process for process, _ in before.values())
    busy = [
        (100 * (seconds - before[pid][1]) / elapsed, process)
        for pid, (process, seconds) in after.items()
    ]
    busy = sorted((one for one in busy if one[0] >= BUSY_PERCENT), key=lambda one: -one[0])[:5]
    return [{"name": _name(process), "cpu_percent": round(percent, 1)} for percent, process in busy]


def _foreign_processes() -> list[psutil.Process]:
    own = psutil.Process()
    ours = {own.pid, *(child.pid for child in own.children(recursive=True))}
    return [process for process in psutil.process_iter() if process.pid not in ours]


def _cpu_seconds(
    processes: Iterable[psutil.Process],
) -> dict[int, tuple[psutil.Process, float]]:
    found = {}
    for process in processes:
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue  # ended meanwhile, or another user's
        found[process.pid] = (process, times.user + times.system)
    return found


def _name(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.Error:
        return "a process that has ended"
