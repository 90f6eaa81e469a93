"""PyTorch's elastic launcher on one node, with what it leaves out: whose death came first."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    WorkerGroup,
    WorkerSpec,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.api import MultiprocessContext

from shardmark.launch.local.rendezvous import NodesRendezvous
from shardmark.launch.outcome import ProcessEnd
from shardmark.launch.placement import MeetingPoint
from shardmark.launch.trial_artifacts import LOGS
from shardmark.trials.trial import Trial

PAUSE_SECONDS = 0.005
LOOK_SECONDS = 0.5
"""Longest time between two looks at the ranks."""


class DeathWatch:
    """A thread that waits for this process's children and leaves collecting them to others.

    PyTorch's launcher names the lowest of the ranks that it finds dead at once; the one that died
    first is the cause.
    """

    def __init__(self) -> None:
        self.deaths: dict[int, tuple[int, float]] = {}
        """Exit code (negative: the signal) and Unix time by process, first death first."""
        self._ended = threading.Event()
        threading.Thread(target=self._watch, name="death-watch", daemon=True).start()

    def wait(self, timeout_seconds: float) -> None:
        """Return as soon as a child ends, or has ended since the last call."""
        self._ended.wait(timeout_seconds)
        self._ended.clear()

    def _watch(self) -> None:
        while True:
            try:
                status = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
            except ChildProcessError:
                status = None  # no child yet, or none left
            if status is not None and status.si_pid not in self.deaths:
                signalled = status.si_code != os.CLD_EXITED
                exit_code = -status.si_status if signalled else status.si_status
                self.deaths[status.si_pid] = exit_code, time.time()
                self._ended.set()
                continue
            time.sleep(PAUSE_SECONDS if self.deaths else 10 * PAUSE_SECONDS)


class KillSafeEvent:
    """Sets free the ranks that have finished and wait for it.

    PyTorch's launcher has `multiprocessing.Event` for that, whose `set` never returns where a
    process that waits has been killed.
    """

    def __init__(self) -> None:
        self._descriptor = os.eventfd(0)

    def __del__(self) -> None:
        os.close(self._descriptor)

    def wait(self) -> None:
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        poll.poll()

    def set(self) -> None:
        os.eventfd_write(self._descriptor, 1)


def _start_with_kill_safe_event(
    context: MultiprocessContext, start: Callable[..., None] = MultiprocessContext._start
) -> None:
    context._worker_finished_event = KillSafeEvent()  # type: ignore[assignment]
    start(context)


class Launcher(LocalElasticAgent):
    """The launcher of one node of a trial, and of all ranks there."""

    def __init__(
        self,
        main: Callable[..., None],
        arguments: tuple[object, ...],
        *,
        folder: Path,
        trial: Trial,
        here: MeetingPoint,
    ) -> None:
        """Each rank is `main` with the arguments, forked from this process."""
        MultiprocessContext._start = _start_with_kill_safe_event  # type: ignore[method-assign]
        self._ranks = trial.layout.ranks_by_node[here.node]
        self._nodes_rendezvous = NodesRendezvous(trial.id, trial.nodes, here)
        spec = WorkerSpec(
            role="default",
            local_world_size=len(self._ranks),
            entrypoint=main,
            args=arguments,
            rdzv_handler=self._nodes_rendezvous,
            max_restarts=0,
            monitor_interval=0.01,  # it sleeps so long before it looks, and waits there for a death
        )
        logs = DefaultLogsSpecs(log_dir=str(folder / LOGS), redirects=Std.ALL)
        # How long ranks that are told to end may take; PyTorch before 2.12 has 30 s, fixed.
        settable = "shutdown_timeout" in signature(LocalElasticAgent.__init__).parameters
        patience: dict[str, Any] = {"shutdown_timeout": 3} if settable else {}
        super().__init__(spec, logs, start_method="fork", **patience)
        self._watch = DeathWatch()

    def launch(self) -> tuple[bool, tuple[ProcessEnd, ...]]:
        """Run the ranks; whether all ended well, and how the others of this node ended."""
        try:
            result = self.run()
        finally:
            self._nodes_rendezvous.shutdown()
        return not result.is_failed(), self._ends(result.failures) if result.is_failed() else ()

    def _ends(self, failures: dict[int, Any]) -> tuple[ProcessEnd, ...]:
        """Return how ranks ended that did not end well."""
        # Not from the ranks' records: one that dies early has none, and is then not blamed.
        rank_of = {
            worker.id: self._ranks[worker.local_rank] for worker in self._worker_group.workers
        }
        ends = {pid: death for pid, death in list(self._watch.deaths.items()) if death[0] != 0}
        for failure in failures.values():  # collected before the watch could look
            ends.setdefault(failure.pid, (failure.exitcode, float(failure.timestamp)))
        return tuple(
            ProcessEnd(rank=rank_of[pid], exit_code=exit_code, at_seconds=at_seconds)
            for pid, (exit_code, at_seconds) in ends.items()
            if pid in rank_of
        )

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        # PyTorch's launcher would look ten times a second, and take a core from a rank each time.
        self._watch.wait(LOOK_SECONDS)
        result: RunResult = super()._monitor_workers(worker_group)
        return result
