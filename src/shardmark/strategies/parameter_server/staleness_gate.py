"""Which worker may go on: barrier, bound, gathering and step shards of one parameter server.

Knows nothing of tensors and messages; one thread for each worker calls it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Condition
from typing import Literal

State = Literal["running", "gathering", "closed", "lost"]


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
        self._states: dict[int, State] = dict.fromkeys(range(workers), "running")
        self._steps = dict.fromkeys(range(workers), 0)
        """Pushes of each worker since all were last gathered."""
        self._given: dict[int, object] = {}
        self._gathered: list[object] = []
        self._gatherings = 0
        self._unpushed = dict.fromkeys(range(workers), 0)
        """Step shards handed to each worker whose gradient has not come."""

    def present(self) -> list[int]:
        """Workers that train or gather, in order."""
        return [rank for rank, state in self._states.items() if state in ("running", "gathering")]

    @property
    def everybody_lost(self) -> bool:
        return all(state == "lost" for state in self._states.values())

    @property
    def lost_step_shards(self) -> int:
        """Those that died with their worker."""
        return sum(self._unpushed[rank] for rank, state in self._states.items() if state == "lost")

    def pushed(self, rank: int) -> None:
        """A gradient of the worker is whole.  Called with `changed` held."""
        self._steps[rank] += 1
        self._unpushed[rank] = max(0, self._unpushed[rank] - 1)
        self.changed.notify_all()

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Called with `changed` held, while a worker waits for its answer."""
        started = time.perf_counter()
        self.changed.wait_for(condition)
        self.wait_seconds += time.perf_counter() - started

    def may_go_on(self, rank: int) -> bool:
        """Whether the worker is within the bound of the slowest that runs."""
        if self._bound is None or self._states[rank] == "lost":
            return True
        running = [r for r, state in self._states.items() if state == "running"]
        return self._steps[rank] - min(self._steps[r] for r in running) <= self._bound

    def step_shard(self, rank: int, end_step: int) -> tuple[int, int] | None:
        """The next (step, share) before that step; None where all are handed out."""
        with self.changed:
            if self.step_shards_taken >= end_step * self._workers or self._states[rank] == "lost":
                return None
            self.step_shards_taken += 1
            self._unpushed[rank] += 1
            return divmod(self.step_shards_taken - 1, self._workers)

    def gather(self, rank: int, value: object) -> list[object]:
        """Wait until every present worker is here; the value of each, in order of rank."""
        with self.changed:
            if self._states[rank] == "lost":
                return []
            number = self._gatherings
            self._given[rank] = value
            self._states[rank] = "gathering"
            self._end_gathering()
            self.changed.notify_all()  # those at the bound wait for running workers only
            self.changed.wait_for(lambda: self._gatherings > number or self._states[rank] == "lost")
            return self._gathered

    def _end_gathering(self) -> None:
        present = self.present()
        if not present or any(self._states[rank] != "gathering" for rank in present):
            return
        self._gathered = [self._given[rank] for rank in present]
        self._given = {}
        for rank in present:
            self._states[rank] = "running"
        self._steps = dict.fromkeys(self._steps, 0)
        self._gatherings += 1
        self.on_gathered()
        self.changed.notify_all()

    def leave(self, rank: int, how: Literal["closed", "lost"]) -> None:
        """The worker is done, or has died: nobody waits for it.  The first word counts."""
        with self.changed:
            if self._states[rank] in ("closed", "lost"):
                return
            self._states[rank] = how
            self._end_gathering()
            self.changed.notify_all()
