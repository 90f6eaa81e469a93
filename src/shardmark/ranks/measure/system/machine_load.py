"""Reads the load of the whole machine: CPU time, pressure and heat.  Linux only, no torch."""

from __future__ import annotations

import os
from pathlib import Path

from shardmark.ranks.measure.kernel_files import cgroup_folders, read_kernel_file

TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_IDLE = (3, 4)  # idle, and waiting for a disk
_LAST = 8  # stolen by other virtual machines; guest time after it is part of user time


class MachineLoad:
    """Counters since the machine started, for the cores that this process may use."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        cores = sorted(os.sched_getaffinity(0))
        root = proc.parent
        groups = cgroup_folders(root)[:1]  # this process's group counts how long its tasks waited
        heat = f"sys/devices/system/cpu/cpu{cores[0]}/thermal_throttle"
        self._cores = {f"cpu{core}" for core in cores}
        self._stat = proc / "stat"
        self._heat = root / heat / "package_throttle_total_time_ms"
        self._pressure = {
            resource: [*(group / f"{resource}.pressure" for group in groups), proc / file]
            for resource, file in (("cpu", "pressure/cpu"), ("memory", "pressure/memory"))
        }

    def read(self) -> dict[str, float | None] | None:
        """Return the values of `samples.jsonl`; None where the kernel does not report them.

        Time that a hypervisor gave to other virtual machines counts as busy.  Sources:
        proc_stat(5), and `psi` and `thermal_throttle` of the kernel's documentation.
        """
        lines = (line.split() for line in read_kernel_file(self._stat).splitlines())
        ticks = [words[1 : _LAST + 1] for words in lines if words and words[0] in self._cores]
        if not ticks:
            return None
        busy = sum(int(n) for of_core in ticks for at, n in enumerate(of_core) if at not in _IDLE)
        heat = read_kernel_file(self._heat)
        return {
            "cpu_seconds": busy / TICKS_PER_SECOND,
            "cores": len(ticks),
            "cpu_pressure_seconds": self._waited_seconds("cpu"),
            "memory_pressure_seconds": self._waited_seconds("memory"),
            "throttled_seconds": int(heat) / 1e3 if heat else None,
        }

    def _waited_seconds(self, resource: str) -> float | None:
        """Time in which at least one task waited for the resource."""
        for file in self._pressure[resource]:
            total = read_kernel_file(file).partition("\n")[0].rpartition("total=")[2]
            if total:
                return int(total) / 1e6
        return None
