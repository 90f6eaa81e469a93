"""Metrics of a row's epochs: training time, loss and quality."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardmark.base.results.schema import EpochRecord, RankRecord, TrialResult
from shardmark.base.statistics.intervals import Estimate, estimate_mean
from shardmark.bench.analysis.compare.rows import (
    Row,
    can_be_disturbed,
    over_seeds,
    seed_of,
    trained,
)
from shardmark.bench.analysis.trial.over_ranks import Value, derived
from shardmark.bench.analysis.trial.rank_metrics import train_loss, workers_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Epoch:
    """An epoch of a row."""

    number: int
    """Number of the epoch, from 1."""
    metrics: Mapping[str, Estimate | None]
    """`epoch_seconds`, `elapsed_seconds`, `train_loss`, `evaluation_seconds` and every quality."""
    missing: Mapping[str, str]
    """Reasons for metrics that are None, by metric."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochsOfRow:
    """The epochs of a row; empty if the recipe sets the number of steps."""

    row: Row
    epochs: tuple[Epoch, ...] = ()
    warmup_steps: int = 0
    """Number of warm-up steps, which count in the time of the first epoch."""
    reason: str | None = None
    """Reason for a row without epochs."""


def epochs_of(row: Row) -> EpochsOfRow:
    """Return the row's epochs as means over the repeats; times without those of disturbed ones."""
    trials = trained(row.trials)
    if not trials:
        return EpochsOfRow(row=row, reason="no trial ended ok")
    steps = trials[0].trial.get("recipe", {}).get("steps")
    if steps is not None:
        return EpochsOfRow(row=row, reason=f"the recipe counts {steps} steps and no epochs")
    numbers = sorted({epoch.epoch for trial in trials for epoch in workers_of(trial)[0].epochs})
    windows = workers_of(row.ok_trials[0])[0].windows
    return EpochsOfRow(
        row=row,
        epochs=tuple(_epoch(trials, row.ok_trials, number) for number in numbers),
        warmup_steps=windows[0].first_step if windows else 0,
        reason=None if numbers else "no epoch was recorded",
    )


def training_seconds(trial: TrialResult, number: int) -> Value:
    """Return the training time of an epoch on the slowest rank without evaluation, or a reason.

    An epoch consists of measured windows, with the device idle at their ends.  The first epoch also
    has the warm-up, which has no window: the time from the first step of the training to the first
    window (Unix time, with an idle device) is added.
    """
    seconds = [_rank_seconds(rank, number) for rank in workers_of(trial)]
    no_record = "no rank that trains left a record"
    return derived(lambda *values: max(values), *seconds) if seconds else no_record


def epoch_values(trial: TrialResult, number: int) -> dict[str, Value]:
    """Return the metrics of an epoch, or the reasons for missing ones.

    The elapsed time is the training time from the first step, without evaluations.
    """
    record = _record(workers_of(trial)[0], number)
    until = [training_seconds(trial, earlier) for earlier in range(number + 1)]
    values = {
        "epoch_seconds": until[-1],
        "elapsed_seconds": derived(lambda *seconds: sum(seconds), *until),
    }
    if record is None:
        return values
    values["train_loss"] = train_loss(workers_of(trial), number)
    if record.evaluation_seconds is not None:
        values["evaluation_seconds"] = record.evaluation_seconds
    for name, value in (record.quality or {}).items():
        finite = value is not None and math.isfinite(value)
        values[name] = value if finite and value is not None else "it is not a finite number"
    return values


def _rank_seconds(rank: RankRecord, number: int) -> Value:
    epoch = _record(rank, number)
    if epoch is None:
        return f"rank {rank.rank} did not record this epoch"
    windows = [
        window
        for window in rank.windows
        if epoch.first_step <= window.first_step and window.end_step <= epoch.end_step
    ]
    if not windows:
        return "all its steps are warm-up, which is not timed"
    first, seconds = windows[0], sum(window.window_seconds for window in windows)
    timed_steps = sum(window.end_step - window.first_step for window in windows)
    timed_to_the_end = timed_steps == epoch.end_step - first.first_step
    if timed_to_the_end and first.first_step == epoch.first_step:
        return seconds
    if timed_to_the_end and epoch.first_step == 0 and rank.first_step_at_seconds is not None:
        return first.started_at_seconds - rank.first_step_at_seconds + seconds
    return "some of its steps are warm-up, which is not timed"


def _epoch(trials: Sequence[TrialResult], undisturbed: Sequence[TrialResult], number: int) -> Epoch:
    by_trial = {trial.id: epoch_values(trial, number) for trial in trials}
    seeds = len(set(map(seed_of, trials)))
    metrics: dict[str, Estimate | None] = {}
    missing: dict[str, str] = {}
    for name in dict.fromkeys(name for values in by_trial.values() for name in values):
        timed = name == "elapsed_seconds" or can_be_disturbed(name)
        counted = undisturbed if timed else trials
        values = [by_trial[trial.id].get(name, "not recorded") for trial in counted]
        numbers = [value for value in values if not isinstance(value, str)]
        metrics[name] = over_seeds(name, estimate_mean(numbers), seeds) if numbers else None
        if not numbers:
            missing[name] = next(value for value in values if isinstance(value, str))
    return Epoch(number=number + 1, metrics=metrics, missing=missing)


def _record(rank: RankRecord, number: int) -> EpochRecord | None:
    return next((epoch for epoch in rank.epochs if epoch.epoch == number), None)
