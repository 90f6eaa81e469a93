"""Orders trials in rounds, until every cell has enough repeats or the time is up.  No torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean

from shardmark.base.cells import cell_id
from shardmark.base.recipe import Repeats
from shardmark.base.results.schema import NOT_MEASURED, Outcome, TrialResult
from shardmark.bench.analysis.advise.decided import decided_cells
from shardmark.experiment.matrix import TrialPlan
from shardmark.ranks.trial import Trial


def cell_of(trial: Trial) -> str:
    """Return the id of the trial's cell, which is the same for all its repeats."""
    return cell_id(trial.model_dump(mode="json"))


class TrialQueue:
    """The trials of a plan that have no result yet.

    A round runs every cell once.  After `at_least` rounds, the queue drops cells whose samples/s
    are known precisely enough, and cells whose trials mostly fail or are disturbed.
    """

    def __init__(
        self,
        plan: TrialPlan,
        repeats: Repeats,
        results: Iterable[TrialResult],
        *,
        budget_seconds: float | None = None,
        started_at_seconds: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`started_at_seconds` is the time of the clock at which the budget begins; None is now."""
        self.results = {result.id: result for result in results}
        self._plan = plan
        self._repeats = repeats
        self._trials = plan.with_twin
        self._cells = {trial.id: cell_of(trial) for trial in plan.trials}
        self.decided: frozenset[str] = frozenset()
        """Cells whose samples/s are known precisely enough."""
        self.hopeless: frozenset[str] = frozenset()
        """Cells whose trials mostly fail or are disturbed."""
        self.refused: frozenset[str] = frozenset()
        """Cells of a race that do not train what its first one trains."""
        self._begun: set[int] = set()
        """Rounds of a race that an earlier command began: the trials of a pair run together."""
        if repeats.margin is not None:
            self._begun = {trial.repeat for trial in plan.trials if trial.id in self.results}
        self._round = 0
        self.budget_seconds = budget_seconds
        self._clock = clock
        self._started_at_seconds = clock() if started_at_seconds is None else started_at_seconds

    @property
    def remaining(self) -> list[tuple[int, Trial]]:
        """Trials that are still to be run, each with its place in the random order."""
        dropped = self.decided | self.hopeless | self.refused
        return [
            (order, trial)
            for order, trial in enumerate(self._trials)
            if trial.id not in self.results
            and not (trial.twin and self._fails(trial))
            and (trial.twin or trial.repeat not in self._begun)
            and (trial.repeat < self._repeats.at_least or self._cells[trial.id] not in dropped)
        ]

    def _fails(self, twin: Trial) -> bool:
        """Return True if no finished trial of the twin's cell has a quality to compare with."""
        cell = cell_of(twin)
        results = [result for key, result in self.results.items() if self._cells.get(key) == cell]
        return bool(results) and all(r.outcome is not Outcome.OK or r.diverged for r in results)

    def next(self) -> tuple[int, Trial] | None:
        """Return the next trial with its order; None if none is left, or no time for it."""
        remaining = self.remaining
        if remaining and remaining[0][1].repeat != self._round:
            self._round = remaining[0][1].repeat
            if self._round >= self._repeats.at_least:
                self._drop_cells()
                remaining = self.remaining
        return remaining[0] if remaining and self._round_fits(remaining) else None

    def rest_of_round(self) -> list[tuple[int, Trial]]:
        """Return the trials of the current round that have no result yet."""
        return [upcoming for upcoming in self.remaining if upcoming[1].repeat == self._round]

    def has_time_for(self, seconds: float) -> bool:
        """Return whether something that takes so long ends within the budget."""
        elapsed_seconds = self._clock() - self._started_at_seconds
        return self.budget_seconds is None or elapsed_seconds + seconds <= self.budget_seconds

    def _round_fits(self, remaining: Sequence[tuple[int, Trial]]) -> bool:
        """Return whether the rest of the round, or of round 0 its next trial, fits the budget."""
        if self.budget_seconds is None:
            return True
        trials = [trial for _, trial in remaining if trial.repeat == self._round]
        expected = expected_seconds(trials if self._round else trials[:1], self.results.values())
        return self.has_time_for(expected or 0.0)

    def _drop_cells(self) -> None:
        by_cell: dict[str, list[TrialResult]] = {}
        for trial_id, result in self.results.items():
            if trial_id in self._cells:
                by_cell.setdefault(self._cells[trial_id], []).append(result)
        new = {*self._cells.values()} - by_cell.keys() - self.refused
        if new and self._begun:
            return  # a race goes on with all of its cells
        self.hopeless = frozenset(
            cell
            for cell, results in by_cell.items()
            if 2 * sum(is_sound(result) for result in results) < len(results)
        )
        repeats = [result for result in self.results.values() if not result.twin]
        decided = decided_cells(
            repeats,
            self._repeats.until,
            self._plan.strategies,
            margin=self._repeats.margin,
        )
        self.decided = decided & by_cell.keys() - self.hopeless
        left = by_cell.keys() - self.decided - self.hopeless - self.refused
        if self.refused and len(left) == 1:  # nothing is left to compare it with
            self.decided |= left


def is_sound(result: TrialResult) -> bool:
    """Return whether a decision may rest on the result."""
    return result.outcome is Outcome.OK and result.disturbed is None


def runs_again(result: TrialResult, *, retry: bool) -> bool:
    """Return whether the next command runs the trial of the stored result again."""
    if result.outcome in NOT_MEASURED:
        return True  # what was missing may be installed by now, and asking costs nothing
    failed = result.outcome in (Outcome.FAILED, Outcome.TIMED_OUT)
    return retry and (failed or result.disturbed is not None)


def expected_seconds(trials: Sequence[Trial], results: Iterable[TrialResult]) -> float | None:
    """Predict the trials' total time from results of the same cells, or of the mean cell.

    Returns None if no result has a time.
    """
    seconds: dict[str, list[float]] = {}
    for result in results:
        if result.outcome in (Outcome.OK, Outcome.TIMED_OUT):
            seconds.setdefault(cell_id(result.trial), []).append(result.total_seconds)
    if not seconds:
        return None
    means: Mapping[str, float] = {cell: fmean(values) for cell, values in seconds.items()}
    mean_cell = fmean(means.values())
    return sum(means.get(cell_of(trial), mean_cell) for trial in trials)
