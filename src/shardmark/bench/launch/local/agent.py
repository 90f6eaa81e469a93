"""The agent of one node: forks the ranks of a trial, waits for them, and notes how they ended."""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path

from shardmark.base.errors import STORAGE_EXIT, error_kind
from shardmark.base.files.run_files import TRIAL_FILE
from shardmark.base.files.scratch import create_scratch
from shardmark.base.system.environment_variables import (
    NODE_VARIABLE,
    ON_LOOPBACK,
    RENDEZVOUS_VARIABLE,
    STORE_VARIABLE,
)
from shardmark.base.system.processes import die_with_parent, schedule_as_batch, schedule_normally
from shardmark.base.text import say
from shardmark.bench.launch.local.rank_store import FileOfRanks, NodesStore
from shardmark.bench.launch.outcome import ProcessEnd
from shardmark.bench.launch.placement import MeetingPoint
from shardmark.bench.launch.trial_artifacts import AGENT_FILE, AGENT_LOG, LOGS
from shardmark.ranks.trial import Trial
from shardmark.scripts import isolation
from shardmark.scripts.start import TRACKERS_OFF

REPORTED = 1
"""Exit code of a rank that has left its error in its record."""
END_SECONDS = 3.0
"""Time that ranks have to end after SIGTERM, before they are killed."""
POLL_SECONDS = 0.01


def run_agent(directory: str, task: str) -> int:
    """Run the trial's ranks of this node, and return 0 if all of them ended well.

    Returns `STORAGE_EXIT` if a full disk kept a rank from writing its record.  The agent leads a
    process group, so that one signal can end the whole trial.
    """
    folder = Path(directory)
    _redirect(folder / AGENT_LOG)
    say(f"agent started at {time.time():.3f}")
    # The signal asks a rank for its stack; it must not end child processes without a handler.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    if task == "compare":
        from shardmark.bench.reference.verdict import compare_cells

        compare_cells(folder)
        return 0
    schedule_as_batch()
    trial = Trial.model_validate_json((folder / TRIAL_FILE).read_text())
    if trial.script is not None and not trial.script.writes_are_fine:
        layers, _ = create_scratch(away_from=Path.cwd())  # the controller removes it
        isolation.enter(layers, [folder])
        isolation.check_out(trial.script.revision)
        os.environ |= TRACKERS_OFF
    place = MeetingPoint(**json.loads(os.environ.get(RENDEZVOUS_VARIABLE, "{}")))
    if trial.nodes == 1:
        os.environ |= ON_LOOPBACK
    store: FileOfRanks | NodesStore = FileOfRanks()
    if trial.nodes > 1 or trial.script is not None:
        store = nodes_store = NodesStore(trial.nodes, place)
        place = nodes_store.place
    os.environ[STORE_VARIABLE] = store.address()
    ranks = _fork_ranks(trial, folder, task, place)
    store.open()  # not before the forks: the store of several nodes has a thread
    deaths = _wait_for_ranks(ranks)
    store.close(succeeded=not deaths)
    if not deaths:
        return 0
    if any(death.exit_code == STORAGE_EXIT for death in deaths):
        return STORAGE_EXIT
    (folder / AGENT_FILE).write_text(json.dumps([asdict(death) for death in deaths]))
    return 1


def _fork_ranks(
    trial: Trial, folder: Path, task: str, place: MeetingPoint
) -> dict[int, BaseProcess]:
    """Start a process for each of this node's ranks; return the processes by rank."""
    numbers = trial.layout.ranks_by_node[place.node]
    processes: dict[int, BaseProcess] = {}
    for local_rank, rank in enumerate(numbers):
        variables = {
            "RANK": str(rank),
            "LOCAL_RANK": str(local_rank),
            "GROUP_RANK": str(place.node),
            "WORLD_SIZE": str(trial.layout.processes),
            "LOCAL_WORLD_SIZE": str(len(numbers)),
            "GROUP_WORLD_SIZE": str(trial.nodes),
            "MASTER_ADDR": place.host,
            "MASTER_PORT": str(place.port),
            NODE_VARIABLE: str(place.node),
        }
        processes[rank] = get_context("fork").Process(
            target=rank_main,
            args=(os.getpid(), trial, folder, task, variables),
            name=f"rank-{rank}",
        )
        processes[rank].start()
    return processes


def _wait_for_ranks(ranks: Mapping[int, BaseProcess]) -> list[ProcessEnd]:
    """Wait until all ranks have ended, and return those that failed in order.

    The first failure ends the other ranks, which are returned after it.
    """
    running = dict(ranks)
    # Starting a process collects the ranks that have ended; `waitid` does not return for those.
    deaths = _collect(running)
    while running and not deaths:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
        deaths += _collect(running)
    for process in running.values():
        process.terminate()
    deadline = time.monotonic() + END_SECONDS
    while running and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
        deaths += _collect(running)
    for process in running.values():
        process.kill()
        process.join()
    return deaths + _collect(running)


def _collect(running: dict[int, BaseProcess]) -> list[ProcessEnd]:
    """Take ranks that have ended out of `running`, and return those that failed."""
    at_seconds = time.time()
    ended = {rank: process.exitcode for rank, process in running.items()}
    codes = {rank: code for rank, code in ended.items() if code is not None}
    for rank in codes:
        running.pop(rank)
    return [
        ProcessEnd(rank=rank, exit_code=code, at_seconds=at_seconds)
        for rank, code in codes.items()
        if code != 0
    ]


def rank_main(
    agent_pid: int, trial: Trial, folder: Path, task: str, variables: Mapping[str, str]
) -> None:
    """Run one rank in a forked process; its output goes to files of its own."""
    die_with_parent(agent_pid)
    schedule_normally()
    os.environ |= variables
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    from shardmark.bench.reference.capture import capture_rank
    from shardmark.ranks.train.rank import measure, measure_trial_links, run_rank

    tasks = {"measure": measure, "capture": capture_rank, "links": measure_trial_links}
    logs = folder / LOGS / variables["RANK"]
    try:
        logs.mkdir(parents=True)
        _redirect(logs / "stdout.log", logs / "stderr.log")
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        if trial.script is None:  # a script configures its own
            logging.basicConfig(level=logging.WARNING)
        succeeded = run_rank(trial, folder, tasks[task])
        sys.stdout.flush()
        sys.stderr.flush()
    except Exception as error:
        if error_kind(error) != "storage":
            raise
        os._exit(STORAGE_EXIT)  # not even its record can be written
    if not succeeded:
        os._exit(REPORTED)  # the process group may be broken: a tidy end could wait for ever
    if trial.script is not None:
        os._exit(0)  # threads of the script may wait for ever


def _redirect(output: Path, errors: Path | None = None) -> None:
    """Write standard output and standard error to files; read nothing from standard input."""
    for descriptor, path in ((1, output), (2, errors or output)):
        with path.open("ab") as file:
            os.dup2(file.fileno(), descriptor)
    with Path(os.devnull).open("rb") as empty:
        os.dup2(empty.fileno(), 0)
