"""What a run tells whoever watches it.  Imports no torch."""

from __future__ import annotations

from typing import Protocol

from shardmark.experiment.matrix import LeftOut
from shardmark.experiment.schema import Trial
from shardmark.results.schema import TrialResult


class ProgressListener(Protocol):
    """Told of a run's progress, from the controller's process and thread."""

    def planned(self, total: int, finished: int, left_out: tuple[LeftOut, ...]) -> None:
        """`total` trials, of which `finished` already have their result."""

    def note(self, text: str) -> None:
        """Something to know that is no result."""

    def trial_started(self, number: int, total: int, trial: Trial) -> None: ...

    def trial_stepped(self, steps: int, total_steps: int) -> None:
        """The trial under way has taken so many steps; called a few times a second at most."""

    def trial_ended(self, number: int, total: int, result: TrialResult) -> None: ...


class Silent:
    """Listens to nothing."""

    def planned(self, total: int, finished: int, left_out: tuple[LeftOut, ...]) -> None: ...
    def note(self, text: str) -> None: ...
    def trial_started(self, number: int, total: int, trial: Trial) -> None: ...
    def trial_stepped(self, steps: int, total_steps: int) -> None: ...
    def trial_ended(self, number: int, total: int, result: TrialResult) -> None: ...
