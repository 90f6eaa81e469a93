"""Orders trials in rounds, until every cell has enough repeats or the time is up.  No torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from statistics import fmean

from shardmark.base.cells import cell_id
from shardmark.base.durations import duration
from shardmark.base.errors import ShardmarkError
from shardmark.base.recipe import Repeats
from shardmark.base.results.runs_folder import runs_named
from shardmark.base.results.schema import NOT_MEASURED, Outcome, TrialResult
from shardmark.base.results.store import StoredRun, is_run, load_run
from shardmark.base.text import counted
from shardmark.bench.analysis.advise.decided import decided_cells
from shardmark.bench.analysis.compare.rows import gathered
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
        by_cell = gathered(
            (self._cells[key], one) for key, one in self.results.items() if key in self._cells
        )
        new = {*self._cells.values()} - by_cell.keys() - self.refused
        if new and self._begun:
            return  # a race goes on with all of its cells
        sound = {
            cell: sum(r.outcome is Outcome.OK and r.disturbed is None for r in results)
            for cell, results in by_cell.items()
        }
        self.hopeless = frozenset(c for c, count in sound.items() if 2 * count < len(by_cell[c]))
        repeats = [result for result in self.results.values() if not result.twin]
        decided = decided_cells(
            repeats, self._repeats.until, self._plan.strategies, margin=self._repeats.margin
        )
        self.decided = decided & by_cell.keys() - self.hopeless
        left = by_cell.keys() - self.decided - self.hopeless - self.refused
        if self.refused and len(left) == 1:  # nothing is left to compare it with
            self.decided |= left


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
    seconds = gathered(
        (cell_id(result.trial), result.total_seconds)
        for result in results
        if result.outcome in (Outcome.OK, Outcome.TIMED_OUT)
    )
    if not seconds:
        return None
    means: Mapping[str, float] = {cell: fmean(values) for cell, values in seconds.items()}
    mean_cell = fmean(means.values())
    return sum(means.get(cell_of(trial), mean_cell) for trial in trials)


def time_lines(
    remaining: Sequence[Trial], out: Path | None, budget_seconds: float | None, *, verify: bool
) -> list[str]:
    """Return lines with the expected time of the trials, and the share that a budget covers.

    The estimate rests on trials in `out`, otherwise on the newest run with some of these cells.
    `verify` adds the verification of cells that have no verdict.
    """
    if not remaining:
        return []
    continued = load_run(out) if out is not None and is_run(out) else None
    cells = {cell_of(trial) for trial in remaining}
    paths = (path for path in runs_named(remaining[0].experiment) if is_run(path) and path != out)
    for run in chain([continued] if continued else [], _readable_runs(paths)):
        results = [result for result in run.trials if cell_id(result.trial) in cells]
        if (seconds := expected_seconds(remaining, results)) is not None:
            break
    else:
        longest = duration(remaining[0].limits.trial_seconds)
        line = f"time: not known before a trial has run; each ends after {longest} at most"
        return [line, *(_audit_lines(remaining) if verify else [])]
    repeats = remaining[0].measure.repeats
    certain = [trial for trial in remaining if trial.repeat < repeats.at_least]
    least_seconds = expected_seconds(certain, results) or 0.0
    verified = continued.verification.verdicts if continued and continued.verification else ()
    verification_seconds: float | None = 0.0
    if verify and not cells <= {verdict.id for verdict in verified}:
        verification_seconds = run.verification.seconds if run.verification else None
    unknown = "loading" if verification_seconds is not None else "loading and verifying"
    before = verification_seconds or 0.0
    between = duration(before + least_seconds)
    if repeats.adaptive:
        between += f" to {duration(before + seconds)}"
    lines = [f"time: about {between}, as in {run.path}; plus {unknown}"]
    if budget_seconds is not None:
        left_seconds = budget_seconds - before
        if left_seconds > seconds:
            share = f"all, with {duration(left_seconds - seconds)} for {unknown}"
        else:
            planned = len({trial.repeat for trial in remaining})
            rounds = int(max(0.0, left_seconds) / seconds * planned)
            share = f"at most {rounds} of the {repeats} repeats"
        lines.append(f"budget: {duration(budget_seconds)}, enough for {share}")
    return lines


def _audit_lines(trials: Sequence[Trial]) -> list[str]:
    """Say what the audits of scripts cost."""
    cells = {cell_of(t) for t in trials if t.script is not None and t.world_size > 1}
    if not cells:
        return []
    count = counted(len(cells), "audit")
    return [f"{count} before the first trial; an audit starts its script at least 3 times"]


def _readable_runs(folders: Iterable[Path]) -> Iterator[StoredRun]:
    """Yield the runs that can be read; a damaged one does not affect the estimate."""
    for folder in folders:
        with suppress(ShardmarkError, OSError):
            yield load_run(folder)
