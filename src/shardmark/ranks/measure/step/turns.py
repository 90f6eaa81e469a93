"""Turns of trials that run side by side: all but one are stopped, and their clocks with them.

The speed of a machine wanders, as much within a second as within a minute, so that the pairs of a
race scatter less the closer its candidates alternate (decision 039).
"""

from __future__ import annotations

import os
import signal
import sys
import time
from mmap import mmap

from shardmark.ranks.measure.step.recorder import HostClock

PAGE_BYTES = 24
LEAST_STEPS = 5
"""Steps of a turn: at its end, other ranks may still wait for what then comes between turns."""


class Turn:
    """A trial's turn, in memory that its processes share with the one that gives out turns.

    Only the trial's first rank ends a turn, between two steps: what a step waits for is part of it.
    """

    current: Turn | None = None
    """The turn of this process; None where trials run one after the other."""

    def __init__(self) -> None:
        # The end of the turn, the instant at which it ended, and the seconds between turns so far.
        self._seconds = memoryview(mmap(-1, PAGE_BYTES)).cast("d")
        self._steps = sys.maxsize
        """Steps of the turn; the first one, which warms up, may end at once."""
        self.group = 0
        """Process group of the trial, which a script may leave; 0 is that of this process."""

    def seconds(self) -> float:
        """Return the monotonic clock's seconds without those between turns."""
        while True:
            between = self._seconds[2]
            now = time.perf_counter()
            if between == self._seconds[2]:  # otherwise the turn ended here
                return now - between

    def begin(self, seconds: float) -> None:
        """Begin the next turn of so many seconds.  Called while the processes are stopped."""
        now = time.perf_counter()
        self._seconds[2] += now - self._seconds[1]
        self._seconds[0] = now + seconds

    def stepped(self, least_steps: int = LEAST_STEPS) -> None:
        """End the turn if its time is over.  Called by the first rank, between two steps."""
        self._steps += 1
        if self._steps >= least_steps and time.perf_counter() >= self._seconds[0]:
            self._steps = 0
            self._seconds[1] = time.perf_counter()
            os.killpg(self.group, signal.SIGSTOP)

    def last(self) -> None:
        """Make this turn the last one: what follows is not measured."""
        self._seconds[0] = float("inf")


class TurnClock(HostClock):
    """A host's clock that stands still between turns."""

    def __init__(self, turn: Turn) -> None:
        self._turn = turn

    def wall_seconds(self) -> float:
        return self._turn.seconds()
