"""PyTorch's elastic launcher on one node, with what it leaves out: whose death came first, why it
starts the ranks anew, and when that is of no use."""

from __future__ import annotations

import os
import platform
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
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.api import MultiprocessContext

from shardmark.core.environment_variables import LAUNCHED_VARIABLE
from shardmark.core.errors import STORAGE_EXIT
from shardmark.core.run_files import JOINED_FILE, LOST_FILE, rank_file
from shardmark.launch.local.rendezvous import NodesRendezvous
from shardmark.launch.outcome import (
    Ending,
    NoticedCause,
    ProcessEnd,
    decide,
    first_cause,
    kernel_oom_kills,
    on_node,
)
from shardmark.launch.placement import MeetingPoint
from shardmark.launch.trial_artifacts import LOGS, RESTARTS_FILE, rank_records
from shardmark.measure.step.progress import progress_file
from shardmark.results.schema import Outcome
from shardmark.train.checkpoint_folder import ABSENT_FILE, folder_of_rank, rank_folder
from shardmark.trials.trial import Trial

PAUSE_SECONDS = 0.005
LOOK_SECONDS = 0.5
"""Longest time between two looks at the ranks, and at nodes that want to join."""


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
        max_restarts: int,
    ) -> None:
        """Each rank is `main` with the arguments, forked from this process."""
        os.environ[LAUNCHED_VARIABLE] = str(time.time())
        MultiprocessContext._start = _start_with_kill_safe_event  # type: ignore[method-assign]
        self._folder = folder
        self._ranks = trial.layout.ranks_by_node[here.node]
        self._node = here.node if trial.nodes > 1 else None
        self._rounds = NodesRendezvous(trial.id, trial.nodes, here)
        spec = WorkerSpec(
            role="default",
            local_world_size=len(self._ranks),
            entrypoint=main,
            args=arguments,
            rdzv_handler=self._rounds,
            max_restarts=max_restarts,
            monitor_interval=0.01,  # it sleeps so long before it looks, and waits there for a death
        )
        logs = DefaultLogsSpecs(log_dir=str(folder / LOGS), redirects=Std.ALL)
        # How long ranks that are told to end may take; PyTorch before 2.12 has 30 s, fixed.
        settable = "shutdown_timeout" in signature(LocalElasticAgent.__init__).parameters
        patience: dict[str, Any] = {"shutdown_timeout": 3} if settable else {}
        super().__init__(spec, logs, start_method="fork", **patience)
        self._watch = DeathWatch()
        self._kills_before = kernel_oom_kills()

    def launch(self) -> tuple[bool, tuple[ProcessEnd, ...]]:
        """Run the ranks; whether all ended well, and how the others of this node ended."""
        try:
            result = self.run()
        finally:
            self._rounds.shutdown()
        return not result.is_failed(), self._ends(result.failures) if result.is_failed() else ()

    def _ends(self, failures: dict[int, Any]) -> tuple[ProcessEnd, ...]:
        """How ranks ended in the last attempt, those that did not end well."""
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
        if result.state is WorkerState.FAILED and self._remaining_restarts > 0:
            self._note_cause(result.failures)
        if result.state is WorkerState.SUCCEEDED and not self._rounds.wait_for_others():
            return RunResult(state=WorkerState.HEALTHY)  # PyTorch's looks for waiting nodes then
        return result

    def _note_cause(self, failures: dict[int, Any]) -> None:
        """Write down why the ranks are started anew, or see to it that they are not."""
        records = rank_records(self._folder, self._ranks)
        ends = self._ends(failures)
        kills = kernel_oom_kills() - self._kills_before
        outcome, failure = decide(
            Ending(how="exited", agent_exit_code=1, failures=ends, oom_kills=kills),
            records,
            processes=len(self._ranks),
            trial_seconds=0,
            progress=(),
        )
        errors = [record.error for record in records if record.error is not None]
        lasting = any(error.kind in ("data", "input", "storage") for error in errors)
        lasting |= any(end.exit_code == STORAGE_EXIT for end in ends)
        if outcome is not Outcome.FAILED or failure is None or lasting:
            self._remaining_restarts = 0  # it would end in the same way again
            return
        if self._node is not None and failure.rank is not None:
            failure = on_node(failure, self._node, platform.node())
        first = first_cause(ends)
        times = [end.at_seconds for end in ends] + [error.at_seconds for error in errors]
        cause = NoticedCause(
            restart=self._rounds.round + 1,
            at_seconds=min(times, default=time.time()),
            reason=failure.reason,
            unprovoked=first is not None and first.unprovoked,
        )
        with (self._folder / RESTARTS_FILE).open("a") as file:
            file.write(cause.model_dump_json() + "\n")

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        # A node that finds another one waiting starts its ranks anew without counting it, and ranks
        # whose numbers of restarts differ would wait for each other at different places.
        restarts = self._rounds.round
        self._remaining_restarts = worker_group.spec.max_restarts - restarts
        if self._remaining_restarts < 0:
            raise RuntimeError(f"{restarts} restarts are more than limits.max_restarts")
        if restarts:
            self._tidy()
        started: dict[int, Any] = super()._start_workers(worker_group)
        return started

    def _tidy(self) -> None:
        """Remove what the ranks' last attempt would be mistaken for."""
        for rank in self._ranks:
            lost = self._folder / LOST_FILE.format(rank)
            if lost.exists():
                folder = rank_folder(folder_of_rank(self._folder), rank)
                folder.mkdir(parents=True, exist_ok=True)
                (folder / ABSENT_FILE).touch()
            joined = self._folder / JOINED_FILE.format(rank)
            record = self._folder / rank_file(rank)
            for left in (lost, joined, record, progress_file(self._folder, rank)):
                left.unlink(missing_ok=True)
