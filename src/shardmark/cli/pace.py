"""How fast the trial under way is, and how long the run will take, from readings of its steps."""

from __future__ import annotations

import time
from collections import deque
from statistics import fmean

RATE_SECONDS = 10.0
"""The rate is that of the last so many seconds."""
STILL_SECONDS = 10.0
"""With no step for so long, and for some steps' time, there is no rate to show."""
STILL_STEPS = 3


class Pace:
    """Watches steps go by.  All times are of the monotonic clock."""

    def __init__(self) -> None:
        self._trials_left = 0
        self._ended_after: list[float] = []
        self._begin(samples_per_step=0)

    def planned(self, trials_left: int) -> None:
        """So many trials are to be run."""
        self._trials_left = trials_left

    def trial_started(self, samples_per_step: int) -> None:
        self._trials_left = max(0, self._trials_left - 1)
        self._begin(samples_per_step)

    def stepped(self, steps: int, total_steps: int) -> None:
        """So many steps have been taken by now."""
        now = time.monotonic()
        self._remaining = total_steps - steps
        if not self._moves:
            self._first = (now, steps)
        elif steps <= self._moves[-1][1]:
            return
        self._moves.append((now, steps))
        while len(self._moves) > 2 and now - self._moves[1][0] >= RATE_SECONDS:
            self._moves.popleft()

    def trial_ended(self, *, ran_through: bool) -> None:
        """`ran_through` unless it broke off: then its time tells nothing of the trials to come."""
        if ran_through:
            self._ended_after.append(self.trial_seconds)

    @property
    def trial_seconds(self) -> float:
        """Since the trial was started."""
        return time.monotonic() - self._started_at

    @property
    def samples_per_second(self) -> float | None:
        """All ranks' samples between the first and the last of the latest readings with a step."""
        step_seconds = self._step_seconds()
        if step_seconds is None or self.still_seconds > 0:
            return None
        return self._samples_per_step / step_seconds

    @property
    def still_seconds(self) -> float:
        """Time without a step, once it is longer than the steps before give reason to expect."""
        step_seconds = self._step_seconds()
        if step_seconds is None:
            return 0.0
        still = time.monotonic() - self._moves[-1][0]
        return still if still > max(STILL_SECONDS, STILL_STEPS * step_seconds) else 0.0

    def run_left_seconds(self, *, between_trials: bool = False) -> float | None:
        """The trial's own steps, and for each trial to come the mean of those that ran through.

        Before one has, the trial under way stands for all, and between trials nothing is known.
        """
        own = 0.0 if between_trials else self._trial_left_seconds()
        if self._ended_after:
            each = fmean(self._ended_after)
            if own is None:
                own = max(0.0, each - self.trial_seconds)
        elif own is None or between_trials:
            return None
        else:
            each = self.trial_seconds + own
        return own + self._trials_left * each

    def _trial_left_seconds(self) -> float | None:
        """The remaining steps at the mean pace since the first reading, evaluations included."""
        if len(self._moves) < 2:
            return None
        (since, before), (until, after) = self._first, self._moves[-1]
        return self._remaining * (until - since) / (after - before)

    def _step_seconds(self) -> float | None:
        if len(self._moves) < 2:
            return None
        (since, before), (until, after) = self._moves[0], self._moves[-1]
        return (until - since) / (after - before)

    def _begin(self, samples_per_step: int) -> None:
        self._started_at = time.monotonic()
        self._samples_per_step = samples_per_step
        self._remaining = 0
        self._moves: deque[tuple[float, int]] = deque()
        self._first = (0.0, 0)
