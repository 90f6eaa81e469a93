"""PyTorch's elastic launcher on one node, with what it leaves out: whose death came first, why it
starts the ranks anew, and when that is of no use."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Sequence
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
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from shardmark.core.environment_variables import LAUNCHED_VARIABLE
from shardmark.core.run_files import JOINED_FILE, LOST_FILE, rank_file
from shardmark.launch.local.deaths import DeathWatch, first_cause
from shardmark.launch.outcome import Ending, ProcessEnd, decide, kernel_oom_kills, on_node
from shardmark.launch.restarts import RESTARTS_FILE, NoticedCause
from shardmark.launch.seats import Place
from shardmark.launch.trial_artifacts import LOGS, rank_record
from shardmark.measure.step.progress import progress_file
from shardmark.results.schema import Outcome
from shardmark.train.checkpoint_files import ABSENT_FILE, rank_folder
from shardmark.train.checkpoint_folder import folder_of_rank
from shardmark.trials.trial import Trial


class Launcher(LocalElasticAgent):
    """The launcher of one node.  A trial without restarts is started once, as it always was."""

    def __init__(
        self,
        spec: WorkerSpec,
        logs: DefaultLogsSpecs,
        *,
        folder: Path,
        ranks: Sequence[int],
        node: int | None,
    ) -> None:
        """`node` is this one's number, None where a trial has no other."""
        super().__init__(spec, logs, start_method="fork", shutdown_timeout=3)
        self._folder = folder
        self._ranks = ranks
        self._node = node
        self._deaths = DeathWatch()
        self._starts = 0
        self._kills_before = kernel_oom_kills()

    def ends(self, failures: dict[int, Any]) -> list[ProcessEnd]:
        """How this node's ranks ended in the last attempt, those that did not end well."""
        ranks = {failure.pid: self._ranks[failure.local_rank] for failure in failures.values()}
        for rank in self._ranks:
            record = rank_record(self._folder, rank)
            if record is not None:
                ranks[record.pid] = rank
        ends = [
            ProcessEnd(
                rank=ranks[death.pid], exit_code=death.exit_code, at_seconds=death.at_seconds
            )
            for death in self._deaths.deaths
            if death.pid in ranks and death.exit_code != 0
        ]
        noticed = {end.rank for end in ends}
        return ends + [
            ProcessEnd(
                rank=ranks[failure.pid],
                exit_code=failure.exitcode,
                at_seconds=float(failure.timestamp),
            )
            for failure in failures.values()
            if ranks[failure.pid] not in noticed  # collected before the watch could look
        ]

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        if result.state is WorkerState.FAILED and self._remaining_restarts > 0:
            self._note_cause(result.failures)
        return result

    def _note_cause(self, failures: dict[int, Any]) -> None:
        """Write down why the ranks are started anew, or see to it that they are not."""
        records = [r for rank in self._ranks if (r := rank_record(self._folder, rank)) is not None]
        ending = Ending(
            how="exited",
            agent_exit_code=1,
            failures=tuple(self.ends(failures)),
            oom_kills=kernel_oom_kills() - self._kills_before,
        )
        outcome, failure = decide(
            ending, records, processes=len(self._ranks), trial_seconds=0, progress=()
        )
        lasting = any(r.error is not None and r.error.kind in ("data", "input") for r in records)
        if outcome is not Outcome.FAILED or failure is None or lasting:
            self._remaining_restarts = 0  # it would end in the same way again
            return
        if self._node is not None and failure.rank is not None:
            failure = on_node(failure, self._node, platform.node())
        end = first_cause(ending.failures)
        times = [end.at_seconds for end in ending.failures]
        times += [r.error.at_seconds for r in records if r.error is not None]
        cause = NoticedCause(
            restart=self._starts,
            at_seconds=min(times, default=time.time()),
            reason=failure.reason,
            unprovoked=end is not None and end.unprovoked,
        )
        with (self._folder / RESTARTS_FILE).open("a") as file:
            file.write(cause.model_dump_json() + "\n")

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        # torch keeps one store for all rounds: ranks that are started anew would find the addresses
        # of the dead there, and a node that takes another's place would not find the store.
        handler: Any = worker_group.spec.rdzv_handler
        handler._bootstrap_store_info = handler._shared_tcp_store_server = None
        super()._rendezvous(worker_group)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        if self._worker_group.spec.max_restarts:
            # A node that finds another one waiting starts its ranks anew without counting it, and
            # ranks whose numbers of restarts differ would wait for each other at different places.
            restarts = _agreed(worker_group, self._starts)
            self._remaining_restarts = worker_group.spec.max_restarts - restarts
            if self._remaining_restarts < 0:
                raise RuntimeError(f"{restarts} restarts are more than limits.max_restarts")
            if restarts:
                self._tidy()
            self._starts = restarts + 1
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
            for name in (LOST_FILE.format(rank), JOINED_FILE.format(rank), rank_file(rank)):
                (self._folder / name).unlink(missing_ok=True)
            progress_file(self._folder, rank).unlink(missing_ok=True)


def launched(
    main: Callable[..., None],
    arguments: Sequence[str],
    *,
    trial: Trial,
    place: Place,
    seats: Sequence[int],
    max_restarts: int,
) -> tuple[bool, list[ProcessEnd]]:
    """Run the trial's ranks of this node; whether all ended well, and how the others ended."""
    folder = Path(arguments[0])
    os.environ[LAUNCHED_VARIABLE] = str(time.time())
    rendezvous = get_rendezvous_handler(
        RendezvousParameters(
            backend="c10d",
            endpoint=place.endpoint,
            run_id=trial.id,
            min_nodes=trial.nodes,
            max_nodes=trial.nodes,
            local_addr=place.address,
            is_host=place.node == 0,
        )
    )
    spec = WorkerSpec(
        role="default",
        local_world_size=len(seats),
        entrypoint=main,
        args=tuple(arguments),
        rdzv_handler=rendezvous,
        max_restarts=max_restarts,
        monitor_interval=0.05,
        local_addr=place.address,
    )
    logs = DefaultLogsSpecs(log_dir=str(folder / LOGS), redirects=Std.ALL)
    node = place.node if trial.nodes > 1 else None
    launcher = Launcher(spec, logs, folder=folder, ranks=seats, node=node)
    try:
        result = launcher.run()
    finally:
        rendezvous.shutdown()
    return not result.is_failed(), launcher.ends(result.failures) if result.is_failed() else []


def _agreed(worker_group: WorkerGroup, starts: int) -> int:
    """The most starts of any node so far; every node's launcher asks once in each rendezvous."""
    store, own = worker_group.store, worker_group.group_rank
    assert store is not None, "the nodes have met"
    assert own is not None, "and know their numbers"
    store.set(f"starts-{own}", str(starts))
    found = [int(store.get(f"starts-{n}")) for n in range(worker_group.group_world_size or 1)]
    return max(found)
