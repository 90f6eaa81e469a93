"""The limits that a container or a batch system puts on this process.  Linux, cgroup v1 and v2."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from shardmark.measure.kernel_files import read_kernel_file

_UNLIMITED_BYTES = 2**60  # cgroup v1 writes "no limit" as a number near 2**63


@dataclass(frozen=True, slots=True, kw_only=True)
class CgroupLimits:
    """None: not limited, or not to be seen from here."""

    cpu_cores: float | None
    """CPU time per wall time that the quota allows."""
    memory_bytes: int | None


def cgroup_limits(root: Path = Path("/")) -> CgroupLimits:
    """The tightest limits of this process's groups and of those around them."""
    cores: list[float] = []
    memory: list[int] = []
    for folder in cgroup_folders(root):
        cores.extend(_cores(folder))
        for name in ("memory.max", "memory.limit_in_bytes"):
            text = read_kernel_file(folder / name)
            if text.isdecimal() and int(text) < _UNLIMITED_BYTES:
                memory.append(int(text))
    return CgroupLimits(cpu_cores=min(cores, default=None), memory_bytes=min(memory, default=None))


def _cores(folder: Path) -> list[float]:
    """Version 2: `max 100000` or `QUOTA PERIOD` in one file; version 1: two files, -1 for none."""
    words = read_kernel_file(folder / "cpu.max").split() or [
        read_kernel_file(folder / "cpu.cfs_quota_us"),
        read_kernel_file(folder / "cpu.cfs_period_us"),
    ]
    if len(words) == 2 and all(word.isdecimal() and int(word) > 0 for word in words):
        return [int(words[0]) / int(words[1])]
    return []


def cgroup_folders(root: Path) -> list[Path]:
    """Each group of this process and its parents; a container may show only the mount's top."""
    folders: list[Path] = []
    for line in read_kernel_file(root / "proc/self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        for controller in controllers.split(","):
            mount = root / "sys/fs/cgroup"
            if controller:
                mount = mount / controller.removeprefix("name=")
            folder = mount / group.lstrip("/")
            folders.extend([folder, *folder.parents][: len(folder.parts) - len(mount.parts) + 1])
    return list(dict.fromkeys(folders))
