"""Notes on trials that may be restarted: what happened to them, and what their checkpoints cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardmark.analysis.compare.rows import Row
from shardmark.results.schema import TrialResult


def restarted(rows: Sequence[Row]) -> list[str]:
    """Trials that went on from a checkpoint: what happened, and what it took."""
    notes = []
    for row in rows:
        for trial in row.ok_trials:
            lost = trial.metrics.get("lost_seconds")
            if trial.restarts and lost is not None:
                count = len(trial.restarts)
                times = "1 time" if count == 1 else f"{count} times"
                notes.append(
                    f"RESTARTED: {row.place}: trial {trial.id} {times}, lost {lost.value:.3g} s;"
                    f" the first time because {trial.restarts[0].reason}."
                )
    return notes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cost:
    """Of one trial's checkpoints."""

    place: str
    count: int
    seconds: float
    """Of one."""
    percent: float
    """Of all, beside the time of the measured steps."""


def checkpoints(rows: Sequence[Row]) -> list[str]:
    """One note, where some trials wrote checkpoints: no rate contains their time."""
    found = [
        cost
        for row in rows
        for trial in row.ok_trials
        if (cost := _cost(row.place, trial)) is not None
    ]
    if not found:
        return []
    dearest = max(found, key=lambda one: one.percent)
    where = "" if len({one.place for one in found}) == 1 else f", most with {dearest.place}"
    return [
        f"CHECKPOINTS: {_range([one.count for one in found])} a trial,"
        f" {_range([one.seconds for one in found])} s each: they add"
        f" {_range([one.percent for one in found])} % to the measured training time{where};"
        " samples/s and all other rates leave them out."
    ]


def _cost(place: str, trial: TrialResult) -> _Cost | None:
    """None where no checkpoint was written, or no step measured."""
    workers = [rank for rank in trial.ranks if rank.role == "worker" and rank.lost is None]
    count = max((len(rank.checkpoints) for rank in workers), default=0)
    one = trial.metrics.get("checkpoint_seconds")
    measured = max((sum(w.window_seconds for w in rank.windows) for rank in workers), default=0.0)
    if not count or one is None or not measured:
        return None
    percent = 100 * count * one.value / measured
    return _Cost(place=place, count=count, seconds=one.value, percent=percent)


def _range(values: Sequence[float]) -> str:
    """The least and the most, to two digits."""
    least, most = _two_digits(min(values)), _two_digits(max(values))
    return least if least == most else f"{least} to {most}"


def _two_digits(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"
