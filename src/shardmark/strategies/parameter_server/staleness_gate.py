"""Whose turn it is: barrier, bound, meetings and step shards of one parameter server.

Knows nothing of tensors and messages; one thread for each worker calls it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Condition
from typing import Literal

State = Literal["running", "meeting", "closed", "lost"]


class StalenessGate:
    """`bound` is how many steps a worker may be ahead of the slowest; None for any number.

    With a bound of 0 all gradients of a step are gathered, then used at once.
    """

    def __init__(
        self, workers: int, bound: int | None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.changed = Condition()
        """Guards everything here, and what the server does with gradients and parameters."""
        self._bound = bound
        self._clock = clock
        self._states: dict[int, State] = dict.fromkeys(range(workers), "running")
        self._steps = dict.fromkeys(range(workers), 0)
        """Pushes of each worker since the last meeting."""
        self._brought: dict[int, object] = {}
        self._met: list[object] = []
        self._meetings = 0
        self.on_gathered: Callable[[], None] = lambda: None
        """Called with `changed` held when everybody is there and nothing is under way."""
        self._workers = workers
        self._next_step_shard = 0
        self._out = dict.fromkeys(range(workers), 0)
        """Portions handed to each worker whose gradient has not come."""
        self.wait_seconds = 0.0

    def present(self) -> list[int]:
        """Workers that train or meet, in order."""
        return [rank for rank, state in self._states.items() if state in ("running", "meeting")]

    @property
    def everybody_lost(self) -> bool:
        return all(state == "lost" for state in self._states.values())

    @property
    def lost_step_shards(self) -> int:
        """Those that died with their worker."""
        return sum(self._out[rank] for rank, state in self._states.items() if state == "lost")

    def pushed(self, rank: int) -> None:
        """A gradient of the worker is whole.  Called with `changed` held."""
        self._steps[rank] += 1
        self._out[rank] = max(0, self._out[rank] - 1)
        self.changed.notify_all()

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Called with `changed` held, as a worker's answer is held back until then."""
        started = self._clock()
        self.changed.wait_for(condition)
        self.wait_seconds += self._clock() - started

    def may_go_on(self, rank: int) -> bool:
        """Whether the worker is within the bound of the slowest that runs."""
        if self._bound is None or self._states[rank] == "lost":
            return True
        running = [r for r, state in self._states.items() if state == "running"]
        return self._steps[rank] - min(self._steps[r] for r in running) <= self._bound

    def step_shard(self, rank: int, end_step: int) -> tuple[int, int] | None:
        """The next (step, share) before that step; None where all are handed out."""
        with self.changed:
            if self._next_step_shard >= end_step * self._workers or self._states[rank] == "lost":
                return None
            self._next_step_shard += 1
            self._out[rank] += 1
            return divmod(self._next_step_shard - 1, self._workers)

    def step_shards_taken(self) -> int:
        """How many step shards have been handed out."""
        return self._next_step_shard

    def go_on_from(self, step_shards: int, *, wait_seconds: float) -> None:
        """So many were handed out, and so long was waited, in an earlier life."""
        self._next_step_shard = step_shards
        self.wait_seconds = wait_seconds

    def meet(self, rank: int, brought: object) -> list[object]:
        """Wait until every present worker is here; what each brought, in order of rank."""
        with self.changed:
            if self._states[rank] == "lost":
                return []
            meeting = self._meetings
            self._brought[rank] = brought
            self._states[rank] = "meeting"
            self._end_meeting()
            self.changed.notify_all()  # those at the bound wait for running workers only
            self.changed.wait_for(lambda: self._meetings > meeting or self._states[rank] == "lost")
            return self._met

    def _end_meeting(self) -> None:
        present = self.present()
        if not present or any(self._states[rank] != "meeting" for rank in present):
            return
        self._met = [self._brought[rank] for rank in present]
        self._brought = {}
        for rank in present:
            self._states[rank] = "running"
        self._steps = dict.fromkeys(self._steps, 0)
        self._meetings += 1
        self.on_gathered()
        self.changed.notify_all()

    def leave(self, rank: int, how: Literal["closed", "lost"]) -> None:
        """The worker is done, or has died: nobody waits for it.  The first word counts."""
        with self.changed:
            if self._states[rank] in ("closed", "lost"):
                return
            self._states[rank] = how
            self._brought.pop(rank, None)
            self._end_meeting()
            self.changed.notify_all()
