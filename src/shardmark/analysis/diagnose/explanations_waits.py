"""Which rank the others wait for, and how long."""

from __future__ import annotations

from statistics import fmean

from shardmark.analysis.advise.candidates import Field
from shardmark.analysis.advise.selection import is_positive
from shardmark.analysis.compare.rows import Row
from shardmark.analysis.diagnose.surprise import NOTEWORTHY, Explanation
from shardmark.analysis.statistics.intervals import estimate_mean
from shardmark.results.schema import TrialResult

EXPOSED = "exposed_communication_seconds"


def wait_explanations(field: Field) -> list[Explanation]:
    """Rows in which one rank communicates shown less than the rest: the rest waits for it."""
    rows = (row for row in (*field.candidates, *field.weaker) if row.world_size > 1)
    return [one for row in rows if (one := _explain(row)) is not None]


def _explain(row: Row) -> Explanation | None:
    """The rank that has the least exposed communication comes last, so that it waits for none.

    A wait is noteworthy from `NOTEWORTHY` of the step.  All ranks could have been the one: the
    interval is tested with the error shared among them.  Some rank is always last, so that one
    repeat shows nothing.
    """
    by_trial = [_exposed(trial) for trial in row.ok_trials]
    if not by_trial or any(len(one) < 2 or one.keys() != by_trial[0].keys() for one in by_trial):
        return None
    late = min(by_trial[0], key=lambda rank: fmean(one[rank] for one in by_trial))
    waits = [fmean(one[rank] for rank in one if rank != late) - one[late] for one in by_trial]
    wait = estimate_mean(waits)
    step = row.metrics.get("step_seconds")
    if step is None or wait.value < NOTEWORTHY * step.value:
        return None
    if not is_positive(wait, len(by_trial[0])):
        return None
    return Explanation(
        kind="a rank is waited for",
        row=row,
        other=None,
        metric=EXPOSED,
        size=wait,
        shown=True,
        unit="seconds",
        difference=wait.value,
        facts={"rank": float(late), "step_seconds": step.value},
    )


def _exposed(trial: TrialResult) -> dict[int, float]:
    """Of the workers that have it."""
    return {
        rank.rank: rank.probe.exposed_communication_seconds
        for rank in trial.ranks
        if rank.role == "worker"
        and rank.probe is not None
        and rank.probe.exposed_communication_seconds is not None
    }
