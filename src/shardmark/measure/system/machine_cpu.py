"""CPU time of the whole machine, beside which the ranks' own shows what others took."""

from __future__ import annotations

from pathlib import Path

from shardmark.measure.system.process_tree import TICKS_PER_SECOND

_IDLE = (3, 4)  # idle, and waiting for a disk
_LAST = 8  # stolen by other virtual machines; guests after it are counted in user time already


def machine_cpu(proc: Path = Path("/proc")) -> dict[str, float] | None:
    """Seconds that any core was busy since the machine started, and the number of cores.

    Time that a hypervisor gave to other virtual machines counts as busy.  None where the kernel
    does not tell.  See proc_stat(5).
    """
    try:
        lines = (proc / "stat").read_bytes().split(b"\n")
    except OSError:
        return None
    if not lines[0].startswith(b"cpu "):
        return None
    ticks = [int(field) for field in lines[0].split()[1:]][:_LAST]
    busy = sum(count for index, count in enumerate(ticks) if index not in _IDLE)
    cores = sum(line.startswith(b"cpu") for line in lines[1:])
    return {"cpu_seconds": busy / TICKS_PER_SECOND, "cores": cores}
