"""The agent of a node: the first death ends the other ranks."""

from __future__ import annotations

import os
import signal
import time
from multiprocessing import get_context

import pytest

from shardmark.launch.local import agent

FORK = get_context("fork")


def ignore_sigterm(writer: int) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.write(writer, b".")
    time.sleep(60)


def die_after(reader: int) -> None:
    os.read(reader, 1)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.timeout(30)
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


@pytest.mark.timeout(30)
def test_ranks_that_succeed_are_no_deaths() -> None:
    ranks = {rank: FORK.Process(target=time.sleep, args=(0.05,)) for rank in range(2)}
    for process in ranks.values():
        process.start()
    assert agent._wait_for_ranks(ranks) == []


@pytest.mark.timeout(30)
def test_rank_that_dies_before_the_next_rank_starts_is_a_death() -> None:
    ranks = {0: FORK.Process(target=os._exit, args=(3,))}
    ranks[0].start()
    assert ranks[0].pid is not None
    os.waitid(os.P_PID, ranks[0].pid, os.WEXITED | os.WNOWAIT)
    ranks[1] = FORK.Process(target=time.sleep, args=(60,))
    ranks[1].start()
    deaths = agent._wait_for_ranks(ranks)
    assert [(death.rank, death.exit_code) for death in deaths] == [(0, 3), (1, -signal.SIGTERM)]
