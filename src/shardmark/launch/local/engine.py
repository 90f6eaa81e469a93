"""The engine for this machine: trials are forked from one process that has loaded the libraries."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from shardmark.core.environment_variables import FOLDER_VARIABLE
from shardmark.core.machine import Machine
from shardmark.launch.engine import Task
from shardmark.launch.local.fork_server import ForkServer, show_stacks
from shardmark.launch.outcome import Ending, kernel_oom_kills
from shardmark.launch.restarts import first_causes, read_restarts
from shardmark.launch.trial_artifacts import process_ends
from shardmark.train.checkpoint_folder import folder_on_node, remove
from shardmark.trials.trial import Trial

TICK_SECONDS = 0.2
TRIAL_FILE = "trial.json"


class LocalEngine:
    """One machine, this one."""

    samples = False

    def __init__(self) -> None:
        self._fork_server = ForkServer()

    def machine(self, device: str) -> Machine:
        return self._fork_server.machine(device)

    def environments(self) -> list[dict[str, Any]]:
        return []

    def load(self, modules: Sequence[str], device_type: str) -> None:
        self._fork_server.load(modules, device_type)

    def lacks(self, nodes: int) -> str | None:
        return None if nodes == 1 else f"{nodes} nodes are asked for, and `local` has this machine"

    def prepare(self, trial: Trial) -> None:
        """Nothing is missing here."""

    def run(
        self,
        directory: Path,
        *,
        trial_seconds: float,
        on_tick: Callable[[], None],
        task: Task = "measure",
    ) -> Ending:
        kills_before = kernel_oom_kills()
        started = time.monotonic()
        how = "exited"
        exit_code = None
        checkpoints = _checkpoints(directory, task)
        remove(checkpoints)  # an earlier command may have been killed
        variables = {} if checkpoints is None else {FOLDER_VARIABLE: str(checkpoints)}
        self._fork_server.begin(directory, task, variables)
        try:
            while exit_code is None:
                if time.monotonic() - started > trial_seconds:
                    how = "timed_out"
                    show_stacks(directory)
                    exit_code = self._fork_server.reap()
                else:
                    exit_code = self._fork_server.ended(TICK_SECONDS)
                on_tick()
        except KeyboardInterrupt:
            how = "interrupted"
            exit_code = self._fork_server.reap()
        except BaseException:
            self._fork_server.reap()
            raise
        finally:
            remove(checkpoints)
        return Ending(
            how=how,  # type: ignore[arg-type]  # one of its three values
            agent_exit_code=exit_code,
            failures=process_ends(directory),
            oom_kills=kernel_oom_kills() - kills_before,
            restarts=first_causes(read_restarts(directory)),
        )

    def close(self) -> None:
        self._fork_server.close()


def _checkpoints(directory: Path, task: Task) -> Path | None:
    """Where the trial's ranks keep them; None without any."""
    if task != "measure":
        return None
    trial = Trial.model_validate_json((directory / TRIAL_FILE).read_text())
    return folder_on_node(trial, str(directory.resolve()), 0, here=True)
