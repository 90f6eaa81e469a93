"""Decides when the warm-up is over and when enough has been measured, the same on all ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

MAX_STEPS = 1000
"""Steps in one stretch: the device holds the marks and losses of at most so many steps."""
MARGIN = 1.05
"""Factor on the number of steps, so that no window of a few steps has to follow."""


@dataclass(slots=True, kw_only=True)
class Pacing:
    """The number of steps before the ranks synchronise again, and whether they are measured.

    It follows the times of the slowest rank, which the ranks exchange between windows.
    """

    warmup_steps: int
    """Least number of warm-up steps that remain."""
    warmup_seconds: float = 0.0
    """Least time of warm-up that remains."""
    window_seconds: float = 0.0
    """Least time in measured windows."""
    round_steps: int = 1
    """The windows hold a multiple of this number of steps, so that no round is measured in part."""
    _measured_steps: int = field(default=0, init=False)
    _measured_seconds: float = field(default=0.0, init=False)
    _step_seconds: float = field(default=0.0, init=False)

    @property
    def warm(self) -> bool:
        """True once the warm-up is over."""
        return self.warmup_steps <= 0 and self.warmup_seconds <= 0

    @property
    def next_steps(self) -> int:
        """Greatest number of steps in the next stretch."""
        if self.warmup_steps > 0:
            return min(self.warmup_steps, MAX_STEPS)
        return MAX_STEPS if self.warm else self._steps_lasting(self.warmup_seconds)

    @property
    def added_steps(self) -> int:
        """Number of steps to add after the recipe's steps; 0 once enough has been measured."""
        missing_seconds = self.window_seconds - self._measured_seconds
        if not self.warm:
            return self.next_steps if missing_seconds > 0 else 0
        added = self._steps_lasting(missing_seconds) if missing_seconds > 0 else 0
        added += -(self._measured_steps + added) % self.round_steps
        return min(MAX_STEPS, added)

    def record(self, steps: int, seconds: float, measured_seconds: float) -> None:
        """Record a stretch of steps; `measured_seconds` is the time in all windows so far."""
        if not self.warm:
            self.warmup_steps -= steps
            self.warmup_seconds -= seconds
        else:
            self._measured_steps += steps
        self._step_seconds = seconds / steps
        self._measured_seconds = measured_seconds

    def _steps_lasting(self, seconds: float) -> int:
        """Return the number of steps that take so long at the last pace; 1 before any step."""
        if self._step_seconds <= 0:
            return 1
        return min(MAX_STEPS, math.ceil(MARGIN * seconds / self._step_seconds))
