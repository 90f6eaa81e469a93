"""Estimates the speed of the current trial and the remaining time from readings of steps."""

from __future__ import annotations

import time
from collections import deque
from math import inf, isinf
from statistics import fmean

RATE_SECONDS = 10.0
"""Length of the interval over which the rate is measured."""
STILL_SECONDS = 10.0
"""Least time without a step after which no rate is shown."""
STILL_STEPS = 3
"""Least number of usual step times without a step after which no rate is shown."""

StepCount = tuple[float, int]
"""Time of a change of the steps, and their new number."""


class Pace:
    """Estimates speed and remaining time.  All times are of the monotonic clock."""

    def __init__(self, budget_seconds: float | None = None) -> None:
        """The budget starts now; no trial starts after its end."""
        self._budget_ends_at = time.monotonic() + (
            inf if budget_seconds is None else budget_seconds
        )
        self._trials_left = 0.0
        self._ended_after: list[float] = []
        self.trial_started(samples_per_step=0)

    def planned(self, trials_left: int | None) -> None:
        """Set the number of trials that are to be run; None until the budget ends."""
        self._trials_left = inf if trials_left is None else trials_left

    def trial_started(
        self, samples_per_step: int | None, tokens_per_sample: int | None = None
    ) -> None:
        self._trials_left = max(0, self._trials_left - 1)
        self._started_at = time.monotonic()
        self._samples_per_step = samples_per_step
        self.tokens_per_sample = tokens_per_sample
        self._remaining = 0
        self._recent: deque[StepCount] = deque()
        self._first: StepCount = (0.0, 0)

    def stepped(self, steps: int, total_steps: int) -> None:
        """Set the number of steps of the current trial."""
        now = time.monotonic()
        self._remaining = max(0, total_steps - steps)
        if self._recent and steps == self._recent[-1][1]:
            return
        if self._recent and steps < self._recent[-1][1]:
            self._recent.clear()  # the trial is measured again
        if not self._recent:
            self._first = (now, steps)
        self._recent.append((now, steps))
        while len(self._recent) > 2 and now - self._recent[1][0] >= RATE_SECONDS:
            self._recent.popleft()

    def trial_ended(self, *, ran_through: bool) -> None:
        """Count the trial's time for those that follow, if it `ran_through`."""
        if ran_through:
            self._ended_after.append(self.trial_seconds)

    @property
    def trial_seconds(self) -> float:
        """Time since the trial was started."""
        return time.monotonic() - self._started_at

    @property
    def samples_per_second(self) -> float | None:
        """Samples of all ranks per second over the latest readings; None if unknown."""
        if self._samples_per_step is None or len(self._recent) < 2 or self.still_seconds > 0:
            return None
        return self._samples_per_step / self._step_seconds(self._recent[0])

    @property
    def still_seconds(self) -> float:
        """Time without a step if it is unusually long; otherwise 0."""
        if len(self._recent) < 2:
            return 0.0
        still = time.monotonic() - self._recent[-1][0]
        usual = STILL_STEPS * self._step_seconds(self._recent[0])
        return still if still > max(STILL_SECONDS, usual) else 0.0

    def run_left_seconds(self, *, between_trials: bool = False) -> float | None:
        """Estimate the run's remaining time, at most the rest of the budget; None if unknown.

        It is the rest of the current trial, and for each trial that follows the mean of those that
        ran through, or the current trial's time before one has.
        """
        trial_left = 0.0 if between_trials else None
        if trial_left is None and len(self._recent) > 1:  # the mean pace includes evaluations
            trial_left = self._remaining * self._step_seconds(self._first)
        if self._ended_after:
            mean_seconds = fmean(self._ended_after)
            if trial_left is None:
                trial_left = max(0.0, mean_seconds - self.trial_seconds)
        elif trial_left is None or between_trials:
            return None
        else:
            mean_seconds = self.trial_seconds + trial_left
        budget_left = self._budget_ends_at - time.monotonic()
        left = max(trial_left, min(trial_left + self._trials_left * mean_seconds, budget_left))
        return None if isinf(left) else left

    def _step_seconds(self, since: StepCount) -> float:
        """Return the mean time of a step since the reading; there are at least two readings."""
        until, steps = self._recent[-1]
        return (until - since[0]) / (steps - since[1])
