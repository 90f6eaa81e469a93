"""Barrier, bound, meetings and step shards of one server, from one thread for each worker."""

from __future__ import annotations

import threading
import time

import pytest

from shardmark.strategies.parameter_server.staleness_gate import StalenessGate

LIMIT_SECONDS = 20.0
WORKERS = 4
EVERYBODY = [[0, 1, 2, 3], [1, 2, 3], [0, 1, 2]]
"""Or without who dies."""


def push(gate: StalenessGate, rank: int) -> None:
    with gate.changed:
        gate.pushed(rank)


@pytest.mark.parametrize("before", [True, False])
def test_who_is_gone_is_not_met(before: bool) -> None:
    """Whether it leaves before the others come, or while they wait for it."""
    gate = StalenessGate(2, bound=0)
    met: list[list[object]] = []
    if before:
        gate.leave(1, "lost")
    waiting = threading.Thread(target=lambda: met.append(gate.gather(0, "here")), daemon=True)
    waiting.start()
    if not before:
        with gate.changed:
            states = gate._states
            assert gate.changed.wait_for(lambda: states[0] == "gathering", LIMIT_SECONDS)
        assert met == []
        gate.leave(1, "closed")
    waiting.join(LIMIT_SECONDS)
    assert met == [["here"]]


def test_step_shards_of_the_dead_are_lost_unless_they_were_pushed() -> None:
    gate = StalenessGate(2, bound=None)
    push(gate, 1)  # without a step shard, as the probe's: it counts against no later one
    for rank, shards in ((0, 3), (1, 1)):
        for _ in range(shards):
            gate.step_shard(rank, 5)
    push(gate, 0)
    gate.leave(0, "lost")
    assert (gate.lost_step_shards, gate.everybody_lost) == (2, False)
    gate.leave(1, "lost")
    assert (gate.lost_step_shards, gate.everybody_lost) == (3, True)
    assert gate.present() == []


class Crowd:
    """Workers that take step shards as threads happen to run; the bound is checked throughout."""

    def __init__(self, bound: int | None, dying: int | None) -> None:
        self.gate = StalenessGate(WORKERS, bound)
        self.gate.on_gathered = self.begin_anew
        self.dying = dying
        self.taken: list[tuple[int, int]] = []
        self.died = self.ahead = 0
        self.ended: list[int] = []
        self.start = threading.Barrier(WORKERS)
        self.begin_anew()

    def begin_anew(self) -> None:
        self.counts = dict.fromkeys(range(WORKERS), 0)
        self.running = {rank for rank in range(WORKERS) if not self.died or rank != self.dying}

    def work(self, rank: int) -> None:
        self.start.wait(LIMIT_SECONDS)
        for end_step in (5, 6, 12):
            while (step_shard := self.gate.step_shard(rank, end_step)) is not None:
                self.taken.append(step_shard)
                if rank == self.dying and len(self.taken) > 10:
                    with self.gate.changed:
                        self.running.discard(rank)
                        self.died = 1
                    self.gate.leave(rank, "lost")
                    self.ended.append(rank)
                    return
                self.step(rank)
            with self.gate.changed:
                self.running.discard(rank)
            met = self.gate.gather(rank, (end_step, rank))
            assert met in [[(end_step, other) for other in who] for who in EVERYBODY]
        self.gate.leave(rank, "closed")
        self.ended.append(rank)

    def step(self, rank: int) -> None:
        for _ in range(4 if rank == 0 else 1):
            time.sleep(0)  # others run meanwhile, and less often than the first
        with self.gate.changed:
            self.counts[rank] += 1
            self.gate.pushed(rank)
            self.gate.wait_for(lambda: self.gate.may_go_on(rank))
            others = [self.counts[other] for other in self.running]
            self.ahead = max(self.ahead, self.counts[rank] - min(others, default=self.counts[rank]))


@pytest.mark.parametrize("dying", [None, 0, 3])
@pytest.mark.parametrize("bound", [0, 1, 3, None])
def test_a_crowd_keeps_the_bound_and_comes_to_an_end(bound: int | None, dying: int | None) -> None:
    crowd = Crowd(bound, dying)
    threads = [
        threading.Thread(target=crowd.work, args=(rank,), daemon=True) for rank in range(WORKERS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_SECONDS)
    assert sorted(crowd.ended) == [0, 1, 2, 3], "none waits for ever, and none has failed"
    everything = [(step, share) for step in range(12) for share in range(WORKERS)]
    assert sorted(crowd.taken) == everything, "each step shard once"
    if bound is not None:
        assert crowd.ahead <= bound
    assert crowd.gate.lost_step_shards == crowd.died
    assert not crowd.gate.everybody_lost
