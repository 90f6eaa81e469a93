"""Follows a job to its end: what it prints, and what SLURM says of it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from shardmark.launch.engine import Tell
from shardmark.launch.slurm.state import AT_WORK, JobState, job_state

LOOK_SECONDS = 0.5
"""Between two looks at the log."""
ASK_SECONDS = (2.0, 20.0)
"""Between two questions to the scheduler: from that to that, a tenth of the time gone."""
LOG_SECONDS = 60.0
"""For a job's log to be seen here once the job is at work; a shared folder may lag."""
LATE_SECONDS = 10.0
"""For it to be seen after the job's end."""
HIDDEN = ("submitit INFO", "submitit WARNING", "interrupted; go on with:")
"""Lines of the job's that say nothing here, or what the follower says itself."""


class Echo:
    """Prints what is new at the end of some files, whole lines at a time."""

    def __init__(self, files: Mapping[Path, TextIO]) -> None:
        self._files = dict(files)
        self._read = dict.fromkeys(files, 0)

    @property
    def any_seen(self) -> bool:
        """Whether any of the files is there."""
        return any(path.exists() for path in self._files)

    def look(self, *, last: bool = False) -> None:
        """`last` prints a line without an end, too."""
        for path, stream in self._files.items():
            with suppress(OSError):
                # Network file systems show what is new once the folder is opened anew.
                os.listdir(path.parent)  # noqa: PTH208  # nothing is made of the entries
                with path.open("rb") as file:
                    file.seek(self._read[path])
                    content = file.read()
                whole = len(content) if last else content.rfind(b"\n") + 1
                self._read[path] += whole
                for line in content[:whole].decode(errors="replace").splitlines():
                    if not line.startswith(HIDDEN):
                        print(line, file=stream, flush=True)


def follow(
    job: str,
    echo: Echo,
    tell: Tell,
    *,
    seconds: float | None = None,
    ask: Callable[[str], JobState | None] | None = None,
) -> JobState:
    """How the job ended.  Raises `TimeoutError` after so many seconds, if they are given."""
    started = time.monotonic()
    teller = _Teller(job, tell)
    due = started
    while True:
        echo.look()
        now = time.monotonic()
        if now >= due:
            state = (ask or job_state)(job)
            least, most = ASK_SECONDS
            due = now + min(most, max(least, (now - started) / 10))
            if state is not None and not state.is_alive:
                _last_look(echo, state)
                return state
            teller.saw(state, echo)
        if seconds is not None and now - started > seconds:
            raise TimeoutError(job)
        time.sleep(LOOK_SECONDS)


def _last_look(echo: Echo, ended: JobState) -> None:
    """Whatever came late; a file system may show the log of a job only after its end."""
    deadline = time.monotonic() + (LATE_SECONDS if ended.first_node is not None else 0.0)
    while not echo.any_seen and time.monotonic() < deadline:
        time.sleep(LOOK_SECONDS)
        echo.look()
    echo.look(last=True)


class _Teller:
    """Says what has changed since it last did."""

    def __init__(self, job: str, tell: Tell) -> None:
        self._job = job
        self._tell = tell
        self._told: dict[str, str] = {}
        self._at_work_since: float | None = None

    def saw(self, state: JobState | None, echo: Echo) -> None:
        silent = "SLURM's scheduler does not answer; asking again"
        self._say("state", silent if state is None else str(state))
        if state is None or state.state not in AT_WORK or echo.any_seen:
            self._at_work_since = None
            return
        now = time.monotonic()
        self._at_work_since = self._at_work_since or now
        if now - self._at_work_since > LOG_SECONDS:
            where = state.first_node or "its first node"
            hint = f"its log, written on {where}, is not to be seen here: is the folder shared?"
            self._say("log", hint)

    def _say(self, topic: str, text: str) -> None:
        if text != self._told.get(topic):
            self._told[topic] = text
            self._tell(f"job {self._job}: {text}")
