"""Reads small files of /proc and /sys, and in them the limits of a container or batch system."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_UNLIMITED_BYTES = 2**60  # cgroup v1 writes "no limit" as a number near 2**63


def read_kernel_file(path: Path) -> str:
    """Return the stripped text; empty if the file does not exist or cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CgroupLimits:
    """Limits of this process by cgroup v1 or v2; None for no limit, or one that cannot be read."""

    cpu_cores: float | None
    """CPU time per wall time."""
    memory_bytes: int | None


def cgroup_limits(root: Path = Path("/")) -> CgroupLimits:
    """Return the tightest limits of this process's groups and their parents."""
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
    """Read a group's quota: one file `QUOTA PERIOD` in version 2, two files in version 1."""
    words = read_kernel_file(folder / "cpu.max").split() or [
        read_kernel_file(folder / "cpu.cfs_quota_us"),
        read_kernel_file(folder / "cpu.cfs_period_us"),
    ]
    if len(words) == 2 and all(word.isdecimal() and int(word) > 0 for word in words):
        return [int(words[0]) / int(words[1])]
    return []


def cgroup_folders(root: Path) -> list[Path]:
    """Return the folder of each group of this process, and of its parents up to the mount."""
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
