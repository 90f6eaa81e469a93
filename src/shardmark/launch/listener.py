"""What a run tells whoever watches it.  Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self

from shardmark.measure.step.progress import RankProgress
from shardmark.results.schema import TrialResult
from shardmark.trials.matrix import LeftOut
from shardmark.trials.trial import Trial


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A look at the trial under way, from outside its ranks."""

    steps: int
    """Of the rank that has come furthest: another may be slow, or dead while the rest train on."""
    total_steps: int
    loss: float | None = None
    """Mean over the ranks that have told one."""
    loss_steps: int | None = None
    """Steps that had been taken at that loss: on a GPU it is told at the ends of epochs alone."""

    @classmethod
    def of(cls, ranks: Sequence[RankProgress]) -> Self:
        """At least one rank is needed."""
        furthest = max(ranks, key=lambda rank: rank.steps)
        losses = [rank.loss for rank in ranks if rank.loss is not None]
        return cls(
            steps=furthest.steps,
            total_steps=furthest.total_steps,
            loss=sum(losses) / len(losses) if losses else None,
            loss_steps=max((r.loss_steps for r in ranks if r.loss_steps is not None), default=None),
        )


class ProgressListener(Protocol):
    """Told of a run's progress, from the controller's process and thread."""

    def planned(self, total: int, finished: int, left_out: tuple[LeftOut, ...]) -> None:
        """`total` trials, of which `finished` already have their result."""

    def note(self, text: str) -> None:
        """Something to know that is no result."""

    def doing(self, text: str) -> None:
        """What is under way before the first trial; of no interest once it is over."""

    def trial_started(self, number: int, total: int, trial: Trial) -> None: ...

    def trial_stepped(self, reading: Reading) -> None:
        """How far the trial under way has come; called a few times a second at most."""

    def trial_ended(self, number: int, total: int, result: TrialResult) -> None: ...


class NullListener:
    """Ignores all progress."""

    def planned(self, total: int, finished: int, left_out: tuple[LeftOut, ...]) -> None: ...
    def note(self, text: str) -> None: ...
    def doing(self, text: str) -> None: ...
    def trial_started(self, number: int, total: int, trial: Trial) -> None: ...
    def trial_stepped(self, reading: Reading) -> None: ...
    def trial_ended(self, number: int, total: int, result: TrialResult) -> None: ...
