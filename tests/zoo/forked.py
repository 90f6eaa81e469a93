"""Starts scripts of the zoo by forks of a process that has imported torch, to save time."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from shardmark.scripts.command import ScriptCommand
from shardmark.scripts.recording import Plan
from shardmark.scripts.start import Started

FAILED_SECONDS = 5.0
"""Time for the other ranks to end after one has failed, as torchrun gives them."""
CONTEXT: Any = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.zoo.preload"])
FRAMEWORKS_VARIABLE = "SHARDMARK_ZOO_FRAMEWORKS"
"""Modules that the process imports besides torch, for tests of all scripts."""


class ForkedScript(Started):
    """Ranks that run a script as torchrun starts them, without its launcher."""

    def __init__(
        self,
        script: Sequence[str],
        ranks: int,
        variables: Mapping[str, str],
        log: Path,
        *,
        hooked: bool = True,
    ) -> None:
        self.log = log
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._processes = []
        for rank in range(ranks):
            of_rank = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "LOCAL_WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
                **variables,
            }
            process = CONTEXT.Process(
                target=run_rank, args=(list(script), of_rank, str(log), hooked)
            )
            process.start()
            self._processes.append(process)

    def wait(self, seconds: float) -> int | None:
        until = time.monotonic() + seconds
        while waiting := [process.sentinel for process in self._processes if process.is_alive()]:
            if not multiprocessing.connection.wait(waiting, max(0.0, until - time.monotonic())):
                break
            if any(process.exitcode for process in self._processes):  # others may wait for it
                until = min(until, time.monotonic() + FAILED_SECONDS)
        codes = [process.exitcode for process in self._processes]
        self.end()
        failed = [abs(code) for code in codes if code]
        return max(failed, default=None if None in codes else 0)

    def end(self) -> None:
        for process in self._processes:
            if process.exitcode is None:
                process.kill()
            process.join()


def start_forked(command: ScriptCommand, ranks: int, plan: Plan, log: Path) -> Started:
    """Start a script's ranks, in place of `start_command`."""
    return ForkedScript(command.script, ranks, plan.variables(), log)


def run_rank(script: list[str], variables: Mapping[str, str], log: str, hooked: bool) -> None:
    """Run the script as `__main__`, with the hooks of the audit or without."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(variables)
    multiprocessing.set_start_method(None, force=True)  # the script's workers: not forked as ranks
    os.chdir(Path(log).parent)
    import torch

    torch.set_num_threads(1)
    if hooked:
        from shardmark.scripts.hooks import install

        install()
    sys.argv = script
    sys.path.insert(0, str(Path(script[0]).parent))
    main = ModuleType("__main__")
    main.__file__ = script[0]
    sys.modules["__main__"] = main
    if dill := sys.modules.get("dill._dill"):  # it was imported beside another `__main__`
        vars(dill)["_main_module"] = main
    exec(compile(Path(script[0]).read_bytes(), script[0], "exec"), vars(main))
