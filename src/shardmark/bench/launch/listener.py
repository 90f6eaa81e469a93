"""Listeners of a run's progress.  Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from shardmark.base.results.schema import TrialResult
from shardmark.experiment.matrix import LeftOut
from shardmark.ranks.measure.step.progress import RankProgress
from shardmark.ranks.trial import Trial


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialProgress:
    """Progress of the current trial, read from outside its ranks."""

    steps: int
    """Steps of the fastest rank: another may be slow, or dead while the rest train on."""
    total_steps: int
    loss: float | None = None
    """Mean over the ranks that have reported a loss."""
    loss_steps: int | None = None
    """Number of steps at that loss; on a GPU, ranks report losses at the ends of epochs only."""

    @classmethod
    def combine(cls, ranks: Sequence[RankProgress]) -> Self:
        """Combine the progress of at least one rank."""
        furthest = max(ranks, key=lambda rank: rank.steps)
        losses = [rank.loss for rank in ranks if rank.loss is not None]
        return cls(
            steps=furthest.steps,
            total_steps=furthest.total_steps,
            loss=sum(losses) / len(losses) if losses else None,
            loss_steps=max((r.loss_steps for r in ranks if r.loss_steps is not None), default=None),
        )


class ProgressListener:
    """Receives a run's progress, in the controller's process and thread.  This one ignores it."""

    def planned(self, total: int | None, finished: int, left_out: tuple[LeftOut, ...]) -> None:
        """Called before the first trial; `finished` of the `total` trials have a result already.

        None stands for as many as a decision needs, here and below.
        """

    def note(self, text: str) -> None:
        """Called with a message that is no result."""

    def doing(self, text: str) -> None:
        """Called with the activity before the first trial; the text is obsolete when it ends."""

    def trial_started(self, number: int, total: int | None, trial: Trial) -> None: ...

    def trial_stepped(self, progress: TrialProgress) -> None:
        """Called with the progress of the current trial, a few times a second at most."""

    def trial_ended(self, number: int, total: int | None, result: TrialResult) -> None: ...
