"""Barrier, bound, meetings and step shards of one server, from one thread for each worker."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from shardmark.strategies.parameter_server.staleness_gate import StalenessGate

LIMIT_SECONDS = 20.0
WORKERS = 4


@contextmanager
def together(*jobs: Callable[[], object]) -> Iterator[None]:
    """The jobs run meanwhile, and must end; what one of them raises is raised here."""
    errors: list[BaseException] = []

    def run(job: Callable[[], object]) -> None:
        try:
            job()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(job,), daemon=True) for job in jobs]
    for thread in threads:
        thread.start()
    yield
    deadline = time.monotonic() + LIMIT_SECONDS
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    stuck = sum(thread.is_alive() for thread in threads)
    assert not errors, errors
    assert not stuck, f"{stuck} of {len(threads)} wait for ever"


def push(gate: StalenessGate, rank: int) -> None:
    with gate.changed:
        gate.pushed(rank)


def may_go_on(gate: StalenessGate, rank: int) -> bool:
    with gate.changed:
        return gate.may_go_on(rank)


@pytest.mark.parametrize("how", ["gathering", "closed", "lost"])
def test_nobody_is_held_back_for_one_who_does_not_run(how: str) -> None:
    """As at an epoch's end, when the slowest finds nothing left and goes to the meeting."""
    gate = StalenessGate(2, bound=0)
    push(gate, 0)
    assert not may_go_on(gate, 0)

    def held() -> None:
        with gate.changed:
            gate.wait_for(lambda: gate.may_go_on(0))
        gate.gather(0, None)

    def goes() -> None:
        if how == "gathering":
            gate.gather(1, None)
        else:
            gate.leave(1, "closed" if how == "closed" else "lost")

    with together(held, goes):
        pass
    assert gate.present() == ([0, 1] if how == "gathering" else [0])


def test_a_meeting_begins_a_new_count() -> None:
    gate = StalenessGate(2, bound=1)
    told: list[bool] = []
    gate.on_gathered = lambda: told.append(gate.changed._is_owned())  # type: ignore[attr-defined]
    push(gate, 0)
    push(gate, 0)
    assert not may_go_on(gate, 0)

    def meets(rank: int) -> None:
        gate.gather(rank, None)
        assert told == [True], "before anybody goes on"

    with together(lambda: meets(0), lambda: meets(1)):
        pass
    push(gate, 0)
    assert may_go_on(gate, 0)


def test_everybody_gets_what_all_brought() -> None:
    gate = StalenessGate(WORKERS, bound=None)

    def meets(rank: int) -> None:
        for number in range(20):
            met = gate.gather(rank, (number, rank))
            assert met == [(number, other) for other in range(WORKERS)]

    with together(*(lambda rank=rank: meets(rank) for rank in range(WORKERS))):
        pass


@pytest.mark.parametrize("before", [True, False])
def test_who_is_gone_is_not_met(before: bool) -> None:
    """Whether it leaves before the others come, or while they wait for it."""
    gate = StalenessGate(3, bound=None)
    met: list[list[object]] = []
    if before:
        gate.leave(1, "lost")
    with together(*(lambda r=r: met.append(gate.gather(r, r)) for r in (0, 2))):
        if not before:
            with gate.changed:
                states = gate._states.values()
                assert gate.changed.wait_for(lambda: [*states].count("gathering") == 2, 20)
            assert met == []
            gate.leave(1, "closed")
    assert met == [[0, 2], [0, 2]]


def test_step_shards_are_handed_out_once_until_the_end() -> None:
    gate = StalenessGate(3, bound=None)
    first = [gate.step_shard(rank % 3, 2) for rank in range(7)]
    assert first == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), None]
    assert gate.step_shard(1, 2) is None
    assert gate.step_shard(1, 3) == (2, 0), "the next epoch"


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


def test_time_held_back_is_added_up() -> None:
    now = iter((10.0, 10.5, 20.0, 20.25))
    gate = StalenessGate(1, bound=None, clock=lambda: next(now))
    with gate.changed:
        gate.wait_for(lambda: True)
        gate.wait_for(lambda: True)
    assert gate.wait_seconds == 0.75


class Crowd:
    """Workers that take step shards with random delays; the bound is checked throughout."""

    def __init__(self, bound: int | None, seed: int, dying: int | None) -> None:
        self.gate = StalenessGate(WORKERS, bound)
        self.gate.on_gathered = self.begin_anew
        self.random = [random.Random(f"{seed}/{rank}") for rank in range(WORKERS)]
        self.dying = dying
        self.taken: list[tuple[int, int]] = []
        self.died = self.ahead = 0
        self.begin_anew()

    def begin_anew(self) -> None:
        self.counts = dict.fromkeys(range(WORKERS), 0)
        self.running = {rank for rank in range(WORKERS) if not self.died or rank != self.dying}

    def work(self, rank: int) -> None:
        for end_step in (5, 6, 12):
            while (step_shard := self.gate.step_shard(rank, end_step)) is not None:
                self.taken.append(step_shard)
                if rank == self.dying and len(self.taken) > 10:
                    with self.gate.changed:
                        self.running.discard(rank)
                        self.died = 1
                    self.gate.leave(rank, "lost")
                    return
                self.step(rank)
            with self.gate.changed:
                self.running.discard(rank)
            self.gate.gather(rank, None)
        self.gate.leave(rank, "closed")

    def step(self, rank: int) -> None:
        slow = 4 if rank == 0 else 1
        time.sleep(slow * self.random[rank].random() / 3000)
        with self.gate.changed:
            self.counts[rank] += 1
            self.gate.pushed(rank)
            self.gate.wait_for(lambda: self.gate.may_go_on(rank))
            others = [self.counts[other] for other in self.running]
            self.ahead = max(self.ahead, self.counts[rank] - min(others, default=self.counts[rank]))


@pytest.mark.parametrize("dying", [None, 0, 3])
@pytest.mark.parametrize("bound", [0, 1, 3, None])
@pytest.mark.parametrize("seed", range(2))
def test_a_crowd_keeps_the_bound_and_comes_to_an_end(
    bound: int | None, seed: int, dying: int | None
) -> None:
    crowd = Crowd(bound, seed, dying)
    with together(*(lambda rank=rank: crowd.work(rank) for rank in range(WORKERS))):
        pass
    everything = [(step, share) for step in range(12) for share in range(WORKERS)]
    assert sorted(crowd.taken) == everything, "each step shard once"
    if bound is not None:
        assert crowd.ahead <= bound
    assert crowd.gate.lost_step_shards == crowd.died
    assert not crowd.gate.everybody_lost
