"""What a rank's process and its descendants use, read from /proc.  Linux only."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from shardmark.measure.system.machine_load import TICKS_PER_SECOND

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
THREADS_PER_READING = 24
"""Context switches are kept by thread: with more threads than this they are read less often."""

_READ_BYTES = 64 * 1024
_ZOMBIE = b"Z"


@dataclass(frozen=True, slots=True)
class ProcessStat:
    """The fields of /proc/PID/stat that are used, in base units."""

    alive: bool
    """False for one that has ended and whose parent has not looked yet."""
    cpu_seconds: float
    """Own, and of children that ended and were waited for."""
    threads: int
    started_ticks: int
    """With the pid, names a process: pids are used again."""
    rss_bytes: int


def parse_stat(text: bytes) -> ProcessStat:
    """See proc_pid_stat(5); the name, in parentheses, may hold anything."""
    fields = text[text.rindex(b")") + 2 :].split()
    return ProcessStat(
        alive=fields[0] != _ZOMBIE,
        cpu_seconds=sum(int(ticks) for ticks in fields[11:15]) / TICKS_PER_SECOND,
        threads=int(fields[17]),
        started_ticks=int(fields[19]),
        rss_bytes=int(fields[21]) * PAGE_BYTES,
    )


class ProcessTree:
    """A process and its descendants; counts go on when a descendant ends."""

    def __init__(self, pid: int, proc: Path = Path("/proc")) -> None:
        self.pid = pid
        self._proc = str(proc)
        self._descendants: tuple[int, ...] = ()
        self._started_ticks: int | None = None
        self._cpu_seconds = 0.0
        self._switches = 0
        self._last_switches: dict[tuple[int, str], int] = {}
        """By process and thread: one that ends takes its count out of /proc."""

    @property
    def pids(self) -> tuple[int, ...]:
        """The process and its descendants, when last looked for."""
        return (self.pid, *self._descendants)

    def refresh(self) -> None:
        """Look for descendants anew."""
        descendants: list[int] = []
        parents = [self.pid]
        while parents:
            children = [child for parent in parents for child in self._children(parent)]
            descendants.extend(children)
            parents = children
        self._descendants = tuple(descendants)

    def read(self, *, context_switches: bool = True) -> dict[str, object] | None:
        """The values of `samples.jsonl`, or None once the process is gone."""
        own = self._stat(self.pid)
        if own is None or not own.alive:
            return None
        if self._started_ticks is None:
            self._started_ticks = own.started_ticks
        if own.started_ticks != self._started_ticks:
            return None  # the pid is another process's now
        stats = {self.pid: own}
        for pid in self._descendants:
            stat = self._stat(pid)
            if stat is not None:
                stats[pid] = stat
        # A descendant's time goes to its parent when it is waited for, else it is lost.
        self._cpu_seconds = max(self._cpu_seconds, sum(stat.cpu_seconds for stat in stats.values()))
        alive = {pid: stat for pid, stat in stats.items() if stat.alive}
        return {
            "pid": self.pid,
            "cpu_seconds": self._cpu_seconds,
            "rss_bytes": sum(stat.rss_bytes for stat in alive.values()),
            "threads": sum(stat.threads for stat in alive.values()),
            "processes": len(alive),
            "open_files": sum(self._open_files(pid) for pid in alive),
            "context_switches": self._count_switches(alive) if context_switches else None,
        }

    def _count_switches(self, pids: Iterable[int]) -> int:
        counts = {
            (pid, thread): count
            for pid in pids
            for thread, count in self._switches_by_thread(pid).items()
        }
        for thread, count in counts.items():
            before = self._last_switches.get(thread, 0)
            self._switches += count - before if count >= before else count  # its id is used again
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
        """Empty where there is no such file any more: processes end at any time."""
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
