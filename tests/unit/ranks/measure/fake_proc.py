"""A /proc in a temporary folder."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from shardmark.ranks.measure.system.machine_load import TICKS_PER_SECOND


def write_process(
    proc: Path,
    pid: int,
    *,
    children: Sequence[int] = (),
    cpu_seconds: float = 0.0,
    waited_seconds: float = 0.0,
    rss_pages: int = 10,
    switches: Sequence[int] = (3,),
    open_files: int = 4,
    started_ticks: int = 77,
    state: str = "S",
) -> None:
    """Write or overwrite a process; it has a thread for each number of `switches`."""
    folder = proc / str(pid)
    shutil.rmtree(folder, ignore_errors=True)
    for index, count in enumerate(switches):
        task = folder / "task" / str(pid + index * 1000)
        task.mkdir(parents=True)
        listed = " ".join(map(str, children)) if index == 0 else ""
        (task / "children").write_text(listed)
        (task / "status").write_text(
            f"Name:\tx\nvoluntary_ctxt_switches:\t{count - 1}\nnonvoluntary_ctxt_switches:\t1\n"
        )
    (folder / "fd").mkdir(parents=True)
    for number in range(open_files):
        (folder / "fd" / str(number)).touch()
    fields = ["0"] * 50
    fields[0] = state
    fields[11] = str(round(cpu_seconds * TICKS_PER_SECOND))
    fields[13] = str(round(waited_seconds * TICKS_PER_SECOND))
    fields[17] = str(len(switches))
    fields[19] = str(started_ticks)
    fields[21] = str(rss_pages)
    (folder / "stat").write_text(f"{pid} (odd) name) {' '.join(fields)}\n")


def end_process(proc: Path, pid: int) -> None:
    shutil.rmtree(proc / str(pid))
