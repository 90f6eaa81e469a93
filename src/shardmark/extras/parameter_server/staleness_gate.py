"""Synchronisation of the workers of a parameter server: bound, gathering and step shards.

It handles no tensors and no messages; a thread for each worker calls it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import Enum, auto
from threading import Condition


class State(Enum):
    """Activity of a worker."""

    RUNNING = auto()
    GATHERING = auto()
    CLOSED = auto()


class StalenessGate:
    """Blocks workers that are more than `bound` steps ahead of the slowest; None never blocks.

    With a bound of 0 all gradients of a step are collected, then used at once.
    """

    def __init__(self, workers: int, bound: int | None) -> None:
        self.changed = Condition()
        """Lock of this object, and of the server's gradients and parameters."""
        self.on_gathered: Callable[[], None] = lambda: None
        """Called with `changed` held when all workers have gathered."""
        self.wait_seconds = 0.0
        self._step_shards_taken = 0
        self._bound = bound
        self._workers = workers
        self._states: dict[int, State] = dict.fromkeys(range(workers), State.RUNNING)
        self._steps = dict.fromkeys(range(workers), 0)
        """Number of pushes of each worker since the last gathering."""
        self._values: dict[int, object] = {}
        self._gathered: list[object] = []
        self._gatherings = 0

    def present(self) -> list[int]:
        """Workers that have not closed, in order."""
        return [rank for rank, state in self._states.items() if state is not State.CLOSED]

    def pushed(self, rank: int) -> None:
        """Count a complete gradient of the worker.  Called with `changed` held."""
        self._steps[rank] += 1
        self.changed.notify_all()

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait for the condition, and count the time.  Called with `changed` held."""
        started = time.perf_counter()
        self.changed.wait_for(condition)
        self.wait_seconds += time.perf_counter() - started

    def may_go_on(self, rank: int) -> bool:
        """True if the worker is within the bound of the slowest running worker."""
        if self._bound is None:
            return True
        running = [r for r, state in self._states.items() if state is State.RUNNING]
        return self._steps[rank] - min(self._steps[r] for r in running) <= self._bound

    def step_shard(self, rank: int, end_step: int) -> tuple[int, int] | None:
        """Return the next (step, share) before `end_step`; None if none is left."""
        with self.changed:
            if self._step_shards_taken >= end_step * self._workers:
                return None
            self._step_shards_taken += 1
            return divmod(self._step_shards_taken - 1, self._workers)

    def gather(self, rank: int, value: object) -> list[object]:
        """Wait until every present worker has called; return their values in order of rank."""
        with self.changed:
            number = self._gatherings
            self._values[rank] = value
            self._states[rank] = State.GATHERING
            self._end_gathering()
            self.changed.notify_all()  # those at the bound wait for running workers only
            self.changed.wait_for(lambda: self._gatherings > number)
            return self._gathered

    def _end_gathering(self) -> None:
        present = self.present()
        if not present or any(self._states[rank] is not State.GATHERING for rank in present):
            return
        self._gathered = [self._values[rank] for rank in present]
        self._values = {}
        for rank in present:
            self._states[rank] = State.RUNNING
        self._steps = dict.fromkeys(self._steps, 0)
        self._gatherings += 1
        self.on_gathered()
        self.changed.notify_all()

    def leave(self, rank: int) -> None:
        """Note that the worker has closed: nobody waits for it."""
        with self.changed:
            self._states[rank] = State.CLOSED
            self._end_gathering()
            self.changed.notify_all()
