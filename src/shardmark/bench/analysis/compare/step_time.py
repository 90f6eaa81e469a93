"""Divides the step of a row into the parts that `why` has for a script, from what was measured."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from statistics import fmean

from shardmark.base.results.schema import TrialResult
from shardmark.base.statistics.intervals import estimate_difference, trimmed_mean
from shardmark.bench.analysis.compare.rows import Row, gathered
from shardmark.bench.analysis.compare.verdicts import FAMILY_ERROR_RATE
from shardmark.bench.analysis.parts import (
    LATE,
    NOTEWORTHY,
    Division,
    Part,
    is_above,
    shown_and_undecided,
)
from shardmark.bench.analysis.trial.rank_metrics import (
    measured_steps,
    slowest,
    window_seconds,
    workers_of,
)

WORK = ("forward", "backward", "optimizer")
"""Spans in which a rank computes and communicates."""

MAY_LACK = ("input", "communication", "own_code")
"""Kinds of parts that some trials do not measure; the rest then holds them."""

Seconds = dict[str, float]
"""Seconds of a `step` and of its disjoint parts by kind, without those that were not measured."""


def division_of(row: Row) -> Division | None:
    """Divide the row's step; None if no trial has spans.  Intervals are those of the repeats."""
    late = _late_rank(row)
    values = _values(row.ok_trials, late)
    if not values:
        return None
    estimates = {kind: estimate_difference(of_kind) for kind, of_kind in values.items()}
    step, update = estimates.pop("step"), estimates.pop("update", None)
    if update is not None and not is_above(update, NOTEWORTHY * step.value):
        update = None
    ranks = {"late_rank": late}
    parts = [
        Part(kind=kind, seconds=seconds, known_by="measured", rank=ranks.get(kind))
        for kind, seconds in estimates.items()
        if seconds.value
    ]
    shown, undecided = shown_and_undecided(parts, step.value)
    unknown = tuple(kind for kind in MAY_LACK if kind not in values)
    return Division(step=step, parts=shown, undecided=undecided, unknown=unknown, update=update)


def mean_seconds(row: Row, samples: float | None, repeats: Collection[int]) -> Seconds | None:
    """Return the means over these repeats, for so many samples; None if they cannot be counted."""
    batch = samples_per_step(row)
    values = _values([t for t in row.ok_trials if t.repeat in repeats], _late_rank(row))
    if not values or not batch or samples is None:
        return None
    return {kind: samples / batch * fmean(of_kind) for kind, of_kind in values.items()}


def _values(trials: Sequence[TrialResult], late: int | None) -> dict[str, list[float]]:
    return gathered(item for trial in trials for item in _seconds(trial, late).items())


def _seconds(trial: TrialResult, late: int | None) -> Seconds:
    """Return the seconds of a trial's mean step; nothing without windows or spans.

    A span is a rank's median, and ranks are averaged: maxima of different ranks do not add up to
    the step of any of them.  Exposed communication lies within the spans of `WORK`.  Which of them
    holds it is not recorded, so that the update is known only where it calls no collective.
    """
    workers = workers_of(trial)
    spans = {name: _mean(trial, f"{name}_seconds") for name in ("data", *WORK)}
    work = sum(spans[name] or 0.0 for name in WORK)
    median = _mean(trial, "step_seconds")
    if slowest(workers) is None or median is None or work <= 0:
        return {}
    step = fmean(window_seconds(rank) / measured_steps(rank) for rank in workers)
    bubble = _mean(trial, "pipeline_bubble_fraction") or 0.0
    passes = (spans["forward"] or 0.0) + (spans["backward"] or 0.0)
    between = passes * bubble / (1 - bubble) if bubble < 1 else 0.0
    # A script's forward pass has no marks: its own code cannot be told from it.
    is_marked = spans["forward"] is not None
    most = work + between if is_marked else median - (spans["data"] or 0.0)
    # One process has nobody to wait for, whether that was recorded or not.
    exposed = _mean(trial, "exposed_communication_seconds") if trial.world_size > 1 else 0.0
    waiting = exposed
    if late is not None:
        by_rank = _exposed_by_rank(trial)
        exposed = by_rank.pop(late)
        waiting = fmean(by_rank.values())
    if exposed is not None and waiting is not None:  # the profiled step is slower
        exposed, waiting = min(exposed, most), min(waiting, most)
    phases = [rank.probe.collectives_by_phase for rank in trial.ranks if rank.probe]
    is_apart = bool(phases) and not any(kinds is None or kinds.get("update") for kinds in phases)
    seconds = {
        "step": step,
        "input": spans["data"],
        "communication": exposed,
        "late_rank": (waiting or 0.0) - (exposed or 0.0),
        "pipeline": max(0.0, between - (waiting or 0.0)),
        "slow_steps": step - median,
        "own_code": 0.0 if is_marked else None,
        "update": spans["optimizer"] if exposed == 0 or is_apart else None,
    }
    return {kind: value for kind, value in seconds.items() if value is not None}


def _mean(trial: TrialResult, name: str) -> float | None:
    """Return the mean of a metric over ranks."""
    summary = trial.metrics.get(name)
    return None if summary is None else summary.value if summary.mean is None else summary.mean


def _exposed_by_rank(trial: TrialResult) -> dict[int, float]:
    return {
        rank.rank: seconds
        for rank in workers_of(trial)
        if rank.probe and (seconds := rank.probe.exposed_communication_seconds) is not None
    }


def _late_rank(row: Row) -> int | None:
    """Return the rank that waits for none: it has significantly less exposed communication.

    The error rate is divided by the number of ranks, because each of them could have been selected.
    A single repeat is not enough for the test.
    """
    exposed = [_exposed_by_rank(trial) for trial in row.ok_trials]
    step = row.metrics.get("step_seconds")
    if step is None or len(exposed) < 2 or len(exposed[0]) < 2:
        return None
    if any(by_rank.keys() != exposed[0].keys() for by_rank in exposed):
        return None
    late = min(exposed[0], key=lambda rank: fmean(by_rank[rank] for by_rank in exposed))
    wait = trimmed_mean([fmean(by[r] for r in by if r != late) - by[late] for by in exposed])
    is_shown = wait.p_value * len(exposed[0]) <= FAMILY_ERROR_RATE
    return late if is_shown and wait.value >= LATE * step.value else None


def samples_per_step(row: Row) -> float | None:
    """Return the global batch of the recipe, or a script's mean number of samples; else None."""
    recipe = row.trials[0].trial.get("recipe", {})
    total, per_rank = recipe.get("global_batch"), recipe.get("per_rank_batch")
    if total is not None:
        return float(total)
    if per_rank is not None:
        return float(per_rank) * row.trials[0].layout.shares
    ranks = row.ok_trials[0].ranks if row.ok_trials else ()
    steps = max(map(measured_steps, ranks), default=0)
    return sum(rank.samples for rank in ranks) / steps or None if steps else None
