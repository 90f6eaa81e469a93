"""When the warm-up is over and when enough has been measured, decided alike on all ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

MOST_STEPS = 1000
"""In one go: so many steps' marks and losses lie on the device at most."""
MARGIN = 1.05
"""More than the last steps' pace asks for, so that no window of a few steps has to follow."""


@dataclass(slots=True, kw_only=True)
class Pacing:
    """How many steps to take before the ranks meet again, and whether they are measured.

    It goes by the slowest rank's times, which all ranks tell each other between windows.
    """

    warmup_steps: int
    """That are left, at least."""
    warmup_seconds: float = 0.0
    """As well."""
    window_seconds: float = 0.0
    """In windows, at least."""
    round_steps: int = 1
    """The windows hold a multiple of so many steps: no round's communication in part."""
    _measured_steps: int = field(default=0, init=False)
    _measured_seconds: float = field(default=0.0, init=False)
    _step_seconds: float = field(default=0.0, init=False)

    @property
    def warm(self) -> bool:
        return self.warmup_steps <= 0 and self.warmup_seconds <= 0

    @property
    def next_steps(self) -> int:
        """How many steps to take at once, at most."""
        if self.warmup_steps > 0:
            return min(self.warmup_steps, MOST_STEPS)
        return MOST_STEPS if self.warm else self._lasting(self.warmup_seconds)

    @property
    def added_steps(self) -> int:
        """How many to take at once after the recipe's; 0 where enough has been measured."""
        lacking_seconds = self.window_seconds - self._measured_seconds
        if not self.warm:
            return self.next_steps if lacking_seconds > 0 else 0
        added = self._lasting(lacking_seconds) if lacking_seconds > 0 else 0
        added += -(self._measured_steps + added) % self.round_steps
        return min(MOST_STEPS, added)

    def took(self, steps: int, seconds: float, measured_seconds: float) -> None:
        """These steps lasted so long; `measured_seconds` are those of all windows so far."""
        if not self.warm:
            self.warmup_steps -= steps
            self.warmup_seconds -= seconds
        else:
            self._measured_steps += steps
        self._step_seconds = seconds / steps
        self._measured_seconds = measured_seconds

    def _lasting(self, seconds: float) -> int:
        """So many steps as last so long at the pace of the last ones; one where none is known."""
        if self._step_seconds <= 0:
            return 1
        return min(MOST_STEPS, math.ceil(MARGIN * seconds / self._step_seconds))
