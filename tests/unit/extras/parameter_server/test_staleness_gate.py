"""Barrier, bound, meetings and step shards of one server, from one thread for each worker."""

from __future__ import annotations

import threading
import time

import pytest

from shardmark.extras.parameter_server.staleness_gate import StalenessGate, State

LIMIT_SECONDS = 20.0
WORKERS = 4


@pytest.mark.parametrize("before", [True, False])
def test_a_worker_that_has_closed_is_not_waited_for(before: bool) -> None:
    """It may leave before the others come, or while they wait for it."""
    gate = StalenessGate(2, bound=0)
    met: list[list[object]] = []
    if before:
        gate.leave(1)
    waiting = threading.Thread(target=lambda: met.append(gate.gather(0, "here")), daemon=True)
    waiting.start()
    if not before:
        with gate.changed:
            states = gate._states
            assert gate.changed.wait_for(lambda: states[0] is State.GATHERING, LIMIT_SECONDS)
        assert met == []
        gate.leave(1)
    waiting.join(LIMIT_SECONDS)
    assert met == [["here"]]
    assert gate.present() == [0]


class Crowd:
    """Workers that take step shards as threads happen to run; the bound is checked throughout."""

    def __init__(self, bound: int | None) -> None:
        self.gate = StalenessGate(WORKERS, bound)
        self.gate.on_gathered = self.begin_anew
        self.taken: list[tuple[int, int]] = []
        self.ahead = 0
        self.ended: list[int] = []
        self.start = threading.Barrier(WORKERS)
        self.begin_anew()

    def begin_anew(self) -> None:
        self.counts = dict.fromkeys(range(WORKERS), 0)
        self.running = set(range(WORKERS))

    def work(self, rank: int) -> None:
        self.start.wait(LIMIT_SECONDS)
        for end_step in (5, 6, 12):
            while (step_shard := self.gate.step_shard(rank, end_step)) is not None:
                self.taken.append(step_shard)
                self.step(rank)
            with self.gate.changed:
                self.running.discard(rank)
            met = self.gate.gather(rank, (end_step, rank))
            assert met == [(end_step, other) for other in range(WORKERS)]
        self.gate.leave(rank)
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


@pytest.mark.parametrize("bound", [0, 1, 3, None])
def test_concurrent_workers_keep_the_bound_and_finish(bound: int | None) -> None:
    crowd = Crowd(bound)
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
