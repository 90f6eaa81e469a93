"""Reads what a rank's process and its descendants use from /proc.  Linux only."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from shardmark.ranks.measure.system.machine_load import TICKS_PER_SECOND

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
THREADS_PER_READING = 24
"""Context switches are counted by thread.  Above this number they are read less often."""

_READ_BYTES = 64 * 1024
_ZOMBIE = b"Z"


@dataclass(frozen=True, slots=True)
class ProcessStat:
    """Fields of /proc/PID/stat in base units."""

    alive: bool
    """False for a zombie: it has ended, and its parent has not waited for it."""
    cpu_seconds: float
    """Time of the process, and of its children that ended and were waited for."""
    threads: int
    started_ticks: int
    """Identifies the process together with its pid, since pids are used again."""
    rss_bytes: int


def parse_stat(text: bytes) -> ProcessStat:
    """Parse /proc/PID/stat, see proc_pid_stat(5).  The name in parentheses may contain anything."""
    fields = text[text.rindex(b")") + 2 :].split()
    return ProcessStat(
        alive=fields[0] != _ZOMBIE,
        cpu_seconds=sum(int(ticks) for ticks in fields[11:15]) / TICKS_PER_SECOND,
        threads=int(fields[17]),
        started_ticks=int(fields[19]),
        rss_bytes=int(fields[21]) * PAGE_BYTES,
    )


class ProcessTree:
    """A process and its descendants.  Counts include descendants that have ended."""

    def __init__(self, pid: int, proc: Path = Path("/proc")) -> None:
        self.pid = pid
        self._proc = str(proc)
        self._descendants: tuple[int, ...] = ()
        self._started_ticks: int | None = None
        self._cpu_seconds = 0.0
        self._written_bytes = 0
        self._switches = 0
        self._last_switches: dict[tuple[int, str], int] = {}
        """Last count by process and thread: /proc loses the count of a thread that ends."""

    @property
    def pids(self) -> tuple[int, ...]:
        """The process and its descendants at the last refresh."""
        return (self.pid, *self._descendants)

    def refresh(self) -> None:
        """Search for descendants again."""
        descendants: list[int] = []
        parents = [self.pid]
        while parents:
            children = [child for parent in parents for child in self._children(parent)]
            descendants.extend(children)
            parents = children
        self._descendants = tuple(descendants)

    def read(self, *, context_switches: bool = True) -> dict[str, object] | None:
        """Return the values of `samples.jsonl`, or None after the process has ended."""
        root = self._stat(self.pid)
        if root is None or not root.alive:
            return None
        if self._started_ticks is None:
            self._started_ticks = root.started_ticks
        if root.started_ticks != self._started_ticks:
            return None  # the pid is another process's now
        stats = {self.pid: root}
        for pid in self._descendants:
            stat = self._stat(pid)
            if stat is not None:
                stats[pid] = stat
        # The time of an ended descendant goes to the parent that waits for it, or is lost.
        self._cpu_seconds = max(self._cpu_seconds, sum(stat.cpu_seconds for stat in stats.values()))
        alive = {pid: stat for pid, stat in stats.items() if stat.alive}
        return {
            "pid": self.pid,
            "cpu_seconds": self._cpu_seconds,
            "rss_bytes": sum(stat.rss_bytes for stat in alive.values()),
            "threads": sum(stat.threads for stat in alive.values()),
            "processes": len(alive),
            "open_files": sum(self._open_files(pid) for pid in alive),
            "written_bytes": self._written(alive),
            "context_switches": self._count_switches(alive) if context_switches else None,
        }

    def _written(self, pids: Iterable[int]) -> int | None:
        """Return the bytes that went to sockets, files and pipes; None if they may not be read."""
        texts = [self._read(f"{pid}/io") for pid in pids]
        counts = [int(text.split()[3]) for text in texts if text.startswith(b"rchar:")]
        self._written_bytes = max(self._written_bytes, sum(counts))  # as of the CPU time
        return self._written_bytes if counts else None

    def _count_switches(self, pids: Iterable[int]) -> int:
        counts = {
            (pid, thread): count
            for pid in pids
            for thread, count in self._switches_by_thread(pid).items()
        }
        for thread, count in counts.items():
            before = self._last_switches.get(thread, 0)
            self._switches += count - before if count >= before else count  # the id is used again
        self._last_switches = counts
        return self._switches

    def _switches_by_thread(self, pid: int) -> dict[str, int]:
        counts = {}
        for thread in self._threads(pid):
            text = self._read(f"{pid}/task/{thread}/status")
            at = text.rfind(b"voluntary_ctxt_switches:", 0, text.rfind(b"nonvoluntary"))
            if at >= 0:
                words = text[at:].split()
                counts[thread] = int(words[1]) + int(words[3])
        return counts

    def _children(self, pid: int) -> list[int]:
        return [
            int(child)
            for thread in self._threads(pid)
            for child in self._read(f"{pid}/task/{thread}/children").split()
        ]

    def _threads(self, pid: int) -> list[str]:
        try:
            return os.listdir(f"{self._proc}/{pid}/task")  # noqa: PTH208  # five times a Path's speed
        except OSError:
            return []

    def _open_files(self, pid: int) -> int:
        folder = f"{self._proc}/{pid}/fd"
        try:
            # Since Linux 6.2 the folder's size is the number of its files; before, it is 0.
            return os.stat(folder).st_size or len(os.listdir(folder))  # noqa: PTH116, PTH208
        except OSError:
            return 0

    def _stat(self, pid: int) -> ProcessStat | None:
        text = self._read(f"{pid}/stat")
        return parse_stat(text) if text else None

    def _read(self, path: str) -> bytes:
        """Return the content; empty if the file no longer exists: processes end at any time."""
        try:
            descriptor = os.open(f"{self._proc}/{path}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return b""
        try:
            return os.read(descriptor, _READ_BYTES)
        except OSError:
            return b""
        finally:
            os.close(descriptor)
