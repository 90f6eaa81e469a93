"""How fast the trial under way is, and how long the run will take, from readings of its steps."""

from __future__ import annotations

import time
from collections import deque
from math import inf
from statistics import fmean

RATE_SECONDS = 10.0
"""The rate is that of the last so many seconds."""
STILL_SECONDS = 10.0
"""With no step for so long, and for some steps' time, there is no rate to show."""
STILL_STEPS = 3

Reached = tuple[float, int]
"""When the steps changed, and to how many."""


class Pace:
    """Watches steps go by.  All times are of the monotonic clock."""

    def __init__(self, budget_seconds: float | None = None) -> None:
        """With a budget, which runs out from now on, no trial begins after its end."""
        self._budget_ends_at = time.monotonic() + (
            inf if budget_seconds is None else budget_seconds
        )
        self._trials_left = 0
        self._ended_after: list[float] = []
        self.trial_started(samples_per_step=0)

    def planned(self, trials_left: int) -> None:
        """So many trials are to be run."""
        self._trials_left = trials_left

    def trial_started(self, samples_per_step: int, tokens_per_sample: int | None = None) -> None:
        self._trials_left = max(0, self._trials_left - 1)
        self._started_at = time.monotonic()
        self._samples_per_step = samples_per_step
        self.tokens_per_sample = tokens_per_sample
        self._remaining = 0
        self._recent: deque[Reached] = deque()
        self._first: Reached = (0.0, 0)

    def stepped(self, steps: int, total_steps: int) -> None:
        """So many steps have been taken by now."""
        now = time.monotonic()
        self._remaining = total_steps - steps
        if self._recent and steps == self._recent[-1][1]:
            return
        if self._recent and steps < self._recent[-1][1]:
            self._recent.clear()  # measured again, or gone back to a checkpoint
        if not self._recent:
            self._first = (now, steps)
        self._recent.append((now, steps))
        while len(self._recent) > 2 and now - self._recent[1][0] >= RATE_SECONDS:
            self._recent.popleft()

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
        if len(self._recent) < 2 or self.still_seconds > 0:
            return None
        return self._samples_per_step / self._step_seconds(self._recent[0])

    @property
    def still_seconds(self) -> float:
        """Time without a step, once it is longer than the steps before give reason to expect."""
        if len(self._recent) < 2:
            return 0.0
        still = time.monotonic() - self._recent[-1][0]
        usual = STILL_STEPS * self._step_seconds(self._recent[0])
        return still if still > max(STILL_SECONDS, usual) else 0.0

    def run_left_seconds(self, *, between_trials: bool = False) -> float | None:
        """The trial's own steps, and for each trial to come the mean of those that ran through; no
        more than a budget has left.

        Before one has, the trial under way stands for all, and between trials nothing is known.
        """
        own = 0.0 if between_trials else None
        if own is None and len(self._recent) > 1:  # at the mean pace, evaluations included
            own = self._remaining * self._step_seconds(self._first)
        if self._ended_after:
            each = fmean(self._ended_after)
            own = max(0.0, each - self.trial_seconds) if own is None else own
        elif own is None or between_trials:
            return None
        else:
            each = self.trial_seconds + own
        budget_left = self._budget_ends_at - time.monotonic()
        return max(own, min(own + self._trials_left * each, budget_left))

    def _step_seconds(self, since: Reached) -> float:
        """Mean time of a step since then; there are at least two readings."""
        until, steps = self._recent[-1]
        return (until - since[0]) / (steps - since[1])
