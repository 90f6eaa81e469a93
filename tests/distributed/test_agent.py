"""The agent of a node: it forks ranks from one thread; the first death ends the other ranks."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import time
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from shardmark.base.files.run_files import TRIAL_FILE
from shardmark.base.system.environment_variables import RENDEZVOUS_VARIABLE
from shardmark.bench.launch.local import agent
from shardmark.bench.launch.local.fork_server import ForkServer
from shardmark.bench.launch.placement import MeetingPoint
from shardmark.experiment.load import from_mapping
from shardmark.experiment.matrix import expand
from tests.distributed.experiments import experiment
from tests.distributed.test_nobody_gets_in import meeting_points

if TYPE_CHECKING:
    import pytest

FORK = get_context("fork")


def ignore_sigterm(writer: int) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.write(writer, b".")
    time.sleep(60)


def die_after(reader: int) -> None:
    os.read(reader, 1)
    os.kill(os.getpid(), signal.SIGKILL)


def test_rank_that_ignores_sigterm_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "END_SECONDS", 0.1)
    reader, writer = os.pipe()
    ranks = {
        4: FORK.Process(target=ignore_sigterm, args=(writer,)),
        7: FORK.Process(target=die_after, args=(reader,)),
    }
    for process in ranks.values():
        process.start()
    deaths = agent._wait_for_ranks(ranks)
    os.close(reader)
    os.close(writer)
    assert [(death.rank, death.exit_code) for death in deaths] == [(7, -9), (4, -9)]
    assert deaths[0].at_seconds < deaths[1].at_seconds


def test_ranks_that_succeed_are_no_deaths() -> None:
    ranks = {rank: FORK.Process(target=time.sleep, args=(0.05,)) for rank in range(2)}
    for process in ranks.values():
        process.start()
    assert agent._wait_for_ranks(ranks) == []


def test_rank_that_dies_before_the_next_rank_starts_is_a_death() -> None:
    ranks = {0: FORK.Process(target=os._exit, args=(3,))}
    ranks[0].start()
    assert ranks[0].pid is not None
    os.waitid(os.P_PID, ranks[0].pid, os.WEXITED | os.WNOWAIT)
    ranks[1] = FORK.Process(target=time.sleep, args=(60,))
    ranks[1].start()
    deaths = agent._wait_for_ranks(ranks)
    assert [(death.rank, death.exit_code) for death in deaths] == [(0, 3), (1, -signal.SIGTERM)]


def prepared(folder: Path, **placement: int) -> Path:
    """The folder of a trial of four ranks, with its description."""
    folder.mkdir()
    content = experiment(matrix={"strategy": ["ddp"], "world_size": [4]})
    (trial,) = expand(from_mapping(content | {"placement": placement}), "cpu").trials
    (folder / TRIAL_FILE).write_text(trial.model_dump_json())
    return folder


def run_node(folder: Path, place: MeetingPoint) -> None:
    """Run an agent whose ranks do nothing; write the number of its threads at each fork."""
    threads: list[int] = []
    os.register_at_fork(before=lambda: threads.append(len([*Path("/proc/self/task").iterdir()])))
    os.environ[RENDEZVOUS_VARIABLE] = json.dumps(asdict(place))
    assert agent.run_agent(str(folder), "measure") == 0
    (folder / "threads.json").write_text(json.dumps(threads))


def test_ranks_of_several_nodes_are_forked_from_a_single_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lock that another thread holds during a fork stays locked in the rank for ever."""
    monkeypatch.setattr(agent, "rank_main", lambda *_: None)
    nodes = []
    for place in meeting_points(2):
        folder = prepared(tmp_path / str(place.node), nodes=2)
        nodes.append(FORK.Process(target=run_node, args=(folder, place)))
        nodes[-1].start()
    for node in nodes:
        node.join()
    counts = [json.loads((tmp_path / str(n) / "threads.json").read_text()) for n in range(2)]
    assert counts == [[1, 1], [1, 1]]


def test_stacks_of_ranks_that_have_not_joined_their_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No record names such a rank; one that has not set its handler yet lives on."""

    def wait_for_the_others(*arguments: object) -> None:
        rank = arguments[-1]["RANK"]  # type: ignore[index]
        with (tmp_path / rank).open("w") as log:
            if rank != "3":
                faulthandler.register(signal.SIGUSR1, log)
            (tmp_path / f"{rank} is ready").touch()
            time.sleep(60)

    monkeypatch.setattr(agent, "rank_main", wait_for_the_others)
    folder = prepared(tmp_path / "trial")
    process = FORK.Process(target=agent.run_agent, args=(str(folder), "measure"))
    process.start()
    while len([*tmp_path.glob("* is ready")]) < 4:
        time.sleep(0.01)
    server = ForkServer()
    server._agent_pid = process.pid
    server.show_stacks()
    ranks = psutil.Process(process.pid).children()
    for rank in ranks:
        rank.kill()
    process.join()
    logs = [(tmp_path / str(rank)).read_text() for rank in range(4)]
    assert ["in wait_for_the_others" in log for log in logs] == [True, True, True, False]
    assert len(ranks) == 4
