"""Which trial comes next: in rounds, until the repeats are enough or the time is up.  No torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean

from shardmark.analysis.advise.decided import decided_cells
from shardmark.core.recipe import Repeats
from shardmark.results.schema import Outcome, TrialResult
from shardmark.trials.matrix import Plan
from shardmark.trials.trial import Trial, cell_id


def cell_of(trial: Trial) -> str:
    """Names the cell of which the trial is a repeat."""
    return cell_id(trial.model_dump(mode="json"))


class Agenda:
    """The trials of a plan that have no result yet.

    A round takes every cell once.  After `at_least` rounds, cells whose samples/s are known well
    enough take no part any more, nor do those that mostly fail or are disturbed: more of the same
    would decide nothing.
    """

    def __init__(
        self,
        plan: Plan,
        repeats: Repeats,
        results: Iterable[TrialResult],
        *,
        budget_seconds: float | None = None,
        began: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.results = {result.id: result for result in results}
        self._plan = plan
        self._repeats = repeats
        self._trials = plan.with_twin
        self._cells = {trial.id: cell_of(trial) for trial in plan.trials}
        self.known: frozenset[str] = frozenset()
        """Cells that are known well enough."""
        self.hopeless: frozenset[str] = frozenset()
        """Cells that mostly fail or are disturbed."""
        self._round = 0
        self.budget_seconds = budget_seconds
        self._clock = clock
        self._began = clock() if began is None else began
        """When the budget began to run out, by the clock."""

    @property
    def todo(self) -> list[tuple[int, Trial]]:
        """As far as is known by now, each with its place in the random order."""
        ended = self.known | self.hopeless
        return [
            (order, trial)
            for order, trial in enumerate(self._trials)
            if trial.id not in self.results
            and not (trial.twin and self._fails(trial))
            and (trial.repeat < self._repeats.at_least or self._cells[trial.id] not in ended)
        ]

    def _fails(self, twin: Trial) -> bool:
        """Return True if no finished trial of the twin's cell has a quality to compare with."""
        cell = cell_of(twin)
        ran = [result for key, result in self.results.items() if self._cells.get(key) == cell]
        return bool(ran) and all(r.outcome is not Outcome.OK or r.diverged for r in ran)

    def next(self) -> tuple[int, Trial] | None:
        """The trial to run now; None where none is left, or no time for it."""
        todo = self.todo
        if todo and todo[0][1].repeat != self._round:
            self._round = todo[0][1].repeat
            if self._round >= self._repeats.at_least:
                self._end_cells()
                todo = self.todo
        return todo[0] if todo and self._in_time(todo) else None

    def has_seconds(self, expected_seconds: float) -> bool:
        """Whether something that takes so long ends within the budget."""
        gone_seconds = self._clock() - self._began
        return self.budget_seconds is None or gone_seconds + expected_seconds <= self.budget_seconds

    def _in_time(self, todo: Sequence[tuple[int, Trial]]) -> bool:
        """Whether the rest of the round fits into the budget; of the first one, its next trial."""
        if self.budget_seconds is None:
            return True
        rest = [trial for _, trial in todo if trial.repeat == self._round]
        expected = expected_seconds(rest if self._round else rest[:1], self.results.values())
        return self.has_seconds(expected or 0.0)

    def _end_cells(self) -> None:
        by_cell: dict[str, list[TrialResult]] = {}
        for trial_id, result in self.results.items():
            if trial_id in self._cells:
                by_cell.setdefault(self._cells[trial_id], []).append(result)
        self.hopeless = frozenset(
            cell
            for cell, results in by_cell.items()
            if 2 * sum(is_sound(result) for result in results) < len(results)
        )
        repeats = [result for result in self.results.values() if not result.twin]
        decided = decided_cells(repeats, self._repeats.until, self._plan.strategies)
        self.known = decided & by_cell.keys() - self.hopeless


def is_sound(result: TrialResult) -> bool:
    """Whether something can be decided from it."""
    return result.outcome is Outcome.OK and result.disturbed is None


def expected_seconds(trials: Sequence[Trial], results: Iterable[TrialResult]) -> float | None:
    """From what trials of the same cells took, else the mean cell; None where none was measured."""
    seconds: dict[str, list[float]] = {}
    for result in results:
        if result.outcome in (Outcome.OK, Outcome.TIMED_OUT):
            seconds.setdefault(cell_id(result.trial), []).append(result.total_seconds)
    if not seconds:
        return None
    means: Mapping[str, float] = {cell: fmean(values) for cell, values in seconds.items()}
    typical = fmean(means.values())
    return sum(means.get(cell_of(trial), typical) for trial in trials)
