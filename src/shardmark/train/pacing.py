"""When the warm-up is over and when enough has been measured, decided alike on all ranks."""

from __future__ import annotations

import math

MOST_STEPS = 1000
"""In one go: so many steps' marks and losses lie on the device at most."""
MARGIN = 1.05
"""More than the last steps' pace asks for, so that no window of a few steps has to follow."""


class Pacing:
    """How many steps to take before the ranks meet again, and whether they are measured.

    It goes by the slowest rank's times, which all ranks tell each other between windows.
    """

    def __init__(
        self, *, warmup_steps: int, warmup_seconds: float = 0.0, window_seconds: float = 0.0
    ) -> None:
        """At least so many steps and seconds of warm-up, and so many seconds in windows."""
        self._warmup_steps = warmup_steps
        self._warmup_seconds = warmup_seconds
        self._window_seconds = window_seconds
        self._measured_seconds = 0.0
        self._step_seconds = 0.0

    @property
    def warm(self) -> bool:
        return self._warmup_steps <= 0 and self._warmup_seconds <= 0

    @property
    def next_steps(self) -> int:
        """How many steps to take at once, at most."""
        if self._warmup_steps > 0:
            return min(self._warmup_steps, MOST_STEPS)
        return MOST_STEPS if self.warm else self._lasting(self._warmup_seconds)

    @property
    def added_steps(self) -> int:
        """How many to take at once after the recipe's; 0 where enough has been measured."""
        lacking_seconds = self._window_seconds - self._measured_seconds
        if lacking_seconds <= 0:
            return 0
        return self._lasting(lacking_seconds) if self.warm else self.next_steps

    def took(self, steps: int, seconds: float, measured_seconds: float) -> None:
        """These steps lasted so long; `measured_seconds` are those of all windows so far."""
        if not self.warm:
            self._warmup_steps -= steps
            self._warmup_seconds -= seconds
        self._step_seconds = seconds / steps
        self._measured_seconds = measured_seconds

    def _lasting(self, seconds: float) -> int:
        """So many steps as last so long at the pace of the last ones; one where none is known."""
        if self._step_seconds <= 0:
            return 1
        return min(MOST_STEPS, math.ceil(MARGIN * seconds / self._step_seconds))
