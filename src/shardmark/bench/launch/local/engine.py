"""The engine for this machine: trials are forked from one process that has loaded the libraries."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from shardmark.base.machine import Machine
from shardmark.base.system.processes import schedule_as_batch, schedule_normally
from shardmark.bench.launch.engine import OUT_OF_REACH, Task, TurnsRefusedError
from shardmark.bench.launch.local.fork_server import ForkServer, ProcessDiedError
from shardmark.bench.launch.outcome import Ending, kernel_oom_kills
from shardmark.bench.launch.trial_artifacts import agent_exit_code, process_ends
from shardmark.ranks.trial import Trial

TICK_SECONDS = 0.5
"""Time between two calls of `on_tick`; the end of a trial is noticed at once."""


class LocalEngine:
    """Runs trials on this machine."""

    samples = False

    def __init__(self) -> None:
        self._fork_server = ForkServer()

    def machine(self, device: str) -> Machine:
        return self._fork_server.machine(device)

    def environments(self) -> list[dict[str, Any]]:
        return []

    def load(self, modules: Sequence[str], device_type: str) -> None:
        self._fork_server.load(modules, device_type)

    def unavailable_reason(self, nodes: int) -> str | None:
        return None if nodes == 1 else f"{nodes} nodes are asked for, and `local` has this machine"

    def prepare(self, trial: Trial) -> None:  # noqa: ARG002  (no trial is another)
        """Start a new fork server if the last one died, outside the trial's time."""
        with suppress(ProcessDiedError):  # the trial tries again, and fails if that fails
            self._fork_server.make_ready()

    def run(
        self,
        directory: Path,
        *,
        trial_seconds: float,
        on_tick: Callable[[], None],
        task: Task = "measure",
    ) -> Ending:
        kills_before = kernel_oom_kills()
        self._fork_server.begin(directory, task, {})
        status, exit_code = self._watch(trial_seconds, on_tick)
        return Ending(
            status=status,
            agent_exit_code=exit_code,
            failures=process_ends(directory),
            oom_kills=kernel_oom_kills() - kills_before,
        )

    def run_in_turns(
        self, directories: Sequence[Path], *, trial_seconds: float, on_tick: Callable[[], None]
    ) -> list[Ending]:
        """Run the trials described in the folders side by side, and return their ends."""
        self._fork_server.begin_in_turns(directories)
        status, exit_code = self._watch(trial_seconds, on_tick)
        if status == "timed_out":
            raise TurnsRefusedError("trials side by side did not end in their limits.trial_seconds")
        if exit_code == OUT_OF_REACH:
            raise TurnsRefusedError("a script has a process outside of its process group")
        return [
            Ending(
                status=status,
                agent_exit_code=agent_exit_code(directory, otherwise=exit_code),
                failures=process_ends(directory),
            )
            for directory in directories
        ]

    def _watch(
        self, trial_seconds: float, on_tick: Callable[[], None]
    ) -> tuple[Literal["exited", "timed_out", "interrupted"], int]:
        """Return the status of the trial's end, and the agent's exit code."""
        deadline = time.monotonic() + trial_seconds
        schedule_as_batch()
        try:
            while time.monotonic() < deadline:
                exit_code = self._fork_server.ended(TICK_SECONDS)
                on_tick()
                if exit_code is not None:
                    return "exited", exit_code
            self._fork_server.show_stacks()
            exit_code = self._fork_server.reap()
            on_tick()
        except KeyboardInterrupt:
            return "interrupted", self._fork_server.reap()
        except BaseException:
            self._fork_server.reap()
            raise
        finally:
            schedule_normally()
        return "timed_out", exit_code

    def close(self) -> None:
        self._fork_server.close()
