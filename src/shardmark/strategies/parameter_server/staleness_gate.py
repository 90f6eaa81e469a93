"""Which worker may go on: barrier, bound, gathering and step shards of one parameter server.

Knows nothing of tensors and messages; one thread for each worker calls it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import Enum, auto
from threading import Condition


class State(Enum):
    """What one worker does."""

    RUNNING = auto()
    GATHERING = auto()
    CLOSED = auto()


class StalenessGate:
    """`bound` is how many steps a worker may be ahead of the slowest; None for any number.

    With a bound of 0 all gradients of a step are collected, then used at once.
    """

    def __init__(self, workers: int, bound: int | None) -> None:
        self.changed = Condition()
        """Guards everything here, and what the server does with gradients and parameters."""
        self.on_gathered: Callable[[], None] = lambda: None
        """Called with `changed` held when every worker is there and nothing is under way."""
        self.wait_seconds = 0.0
        self.step_shards_taken = 0
        self._bound = bound
        self._workers = workers
        self._states: dict[int, State] = dict.fromkeys(range(workers), State.RUNNING)
        self._steps = dict.fromkeys(range(workers), 0)
        """Pushes of each worker since all were last gathered."""
        self._given: dict[int, object] = {}
        self._gathered: list[object] = []
        self._gatherings = 0

    def present(self) -> list[int]:
        """Workers that have not closed, in order."""
        return [rank for rank, state in self._states.items() if state is not State.CLOSED]

    def pushed(self, rank: int) -> None:
        """A gradient of the worker is whole.  Called with `changed` held."""
        self._steps[rank] += 1
        self.changed.notify_all()

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Called with `changed` held, while a worker waits for its answer."""
        started = time.perf_counter()
        self.changed.wait_for(condition)
        self.wait_seconds += time.perf_counter() - started

    def may_go_on(self, rank: int) -> bool:
        """Whether the worker is within the bound of the slowest that runs."""
        if self._bound is None:
            return True
        running = [r for r, state in self._states.items() if state is State.RUNNING]
        return self._steps[rank] - min(self._steps[r] for r in running) <= self._bound

    def step_shard(self, rank: int, end_step: int) -> tuple[int, int] | None:
        """The next (step, share) before that step; None where all are handed out."""
        with self.changed:
            if self.step_shards_taken >= end_step * self._workers:
                return None
            self.step_shards_taken += 1
            return divmod(self.step_shards_taken - 1, self._workers)

    def gather(self, rank: int, value: object) -> list[object]:
        """Wait until every present worker has come; return their values in order of rank."""
        with self.changed:
            number = self._gatherings
            self._given[rank] = value
            self._states[rank] = State.GATHERING
            self._end_gathering()
            self.changed.notify_all()  # those at the bound wait for running workers only
            self.changed.wait_for(lambda: self._gatherings > number)
            return self._gathered

    def _end_gathering(self) -> None:
        present = self.present()
        if not present or any(self._states[rank] is not State.GATHERING for rank in present):
            return
        self._gathered = [self._given[rank] for rank in present]
        self._given = {}
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
