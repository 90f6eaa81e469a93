"""A trial as trackers see one: settings, final metrics, and named values over steps and epochs."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from shardmark.report.export.source import Source
from shardmark.report.export.tables import epoch_rows, step_rows, values_of
from shardmark.results.schema import Outcome, TrialResult

MEANS = {"loss": "train_loss", "learning_rate": "learning_rate"}
SPANS = [f"{part}_seconds" for part in ("step", "data", "forward", "backward", "optimizer")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One value of one series."""

    name: str
    """`step/...` or `epoch/...`."""
    index: int
    """The optimizer step, from 0, or the epoch, from 1."""
    step: int
    """The optimizer step it belongs to; for an epoch its last one."""
    at_seconds: float
    """Unix time at which the training had got there."""
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedTrial:
    """One trial of one run; a trial that did not end ok has no number."""

    source: Source
    result: TrialResult

    @property
    def measurement(self) -> str:
        """The same trial, run again, has the same id and another start."""
        content = f"{self.result.id} {self.result.started_at_seconds!r}"
        return hashlib.sha256(content.encode()).hexdigest()[:12]

    @property
    def ok(self) -> bool:
        return self.result.outcome is Outcome.OK

    @property
    def ended_at_seconds(self) -> float:
        """Unix time."""
        return self.result.started_at_seconds + self.result.total_seconds

    @property
    def final(self) -> dict[str, float]:
        """Metric -> value, without the missing."""
        return values_of(self.result)

    @property
    def settings(self) -> dict[str, Any]:
        """What was trained and how, by dotted key as in an experiment file; without the unset."""
        trial = self.result
        resolved = {key: trial.trial.get(key) for key in ("workload", "recipe", "slow_ranks")}
        return {
            "strategy": trial.strategy,
            **dict(_flat({"strategy": trial.strategy_options})),
            "world_size": trial.world_size,
            **dict(_flat(resolved)),
            **{key: value for key, value in _flat(trial.varied) if key != "strategy"},
            "recipe.precision": trial.precision,
            "repeat": trial.repeat,
        }

    @property
    def tags(self) -> dict[str, str]:
        """What it is, where its files are and how it ended, as text."""
        equivalent = self.source.equivalent(self.result)
        failure = self.result.failure
        tags = {
            "experiment": self.source.run.name,
            "run": self.source.label,
            "trial": self.result.id,
            "files": str(self.source.folder(self.result.id).absolute()),
            "outcome": str(self.result.outcome),
            "synthetic": str(self.result.synthetic).lower(),
            "equivalent": None if equivalent is None else str(equivalent).lower(),
            "failure": None if failure is None else failure.reason,
            "remedy": None if failure is None else failure.remedy,
        }
        return {name: value for name, value in tags.items() if value is not None}

    def history(self) -> list[Point]:
        """By step, then by epoch; nothing for what is missing."""
        return [*_by_step(self.source, self.result), *_by_epoch(self.result)]


def tracked(sources: Sequence[Source]) -> list[TrackedTrial]:
    """Every trial of the runs."""
    return [
        TrackedTrial(source=source, result=trial) for source in sources for trial in source.trials
    ]


def _by_step(source: Source, trial: TrialResult) -> Iterator[Point]:
    """Loss: mean over the ranks.  Seconds: the slowest rank, measured steps alone.

    Nothing where one rank has no value: the others' mean would be another number.
    """
    import pandas as pd

    rows = step_rows(source, trial)
    if not rows:
        return
    frame = pd.DataFrame(rows)
    names = [*MEANS, *SPANS, "started_at_seconds"]
    numbers = frame.reindex(columns=names).astype(float).replace([float("inf")], float("nan"))
    numbers["ended_at_seconds"] = numbers.started_at_seconds + numbers.step_seconds.fillna(0.0)
    steps = numbers.groupby(frame["step"])
    complete = steps.count().eq(steps.size(), axis=0)
    measured = frame["measured"].groupby(frame["step"]).all()
    means = steps[[*MEANS]].mean().where(complete[[*MEANS]]).rename(columns=MEANS)
    spans = steps[SPANS].max().where(complete[SPANS]).where(measured)
    ends = steps["ended_at_seconds"].max().fillna(trial.started_at_seconds)
    for step, values in means.join([spans, ends]).to_dict("index").items():
        index, at_seconds = int(str(step)), float(values.pop("ended_at_seconds"))
        for name, value in values.items():
            if not math.isnan(value):
                yield Point(
                    name=f"step/{name}",
                    index=index,
                    step=index,
                    at_seconds=at_seconds,
                    value=value,
                )


def _by_epoch(trial: TrialResult) -> Iterator[Point]:
    for row in epoch_rows(trial):
        for name, value in row.items():
            if value is not None and name not in ("epoch", "end_step", "ended_at_seconds"):
                yield Point(
                    name=f"epoch/{name}",
                    index=row["epoch"],
                    step=row["end_step"] - 1,
                    at_seconds=row["ended_at_seconds"] or trial.started_at_seconds,
                    value=value,
                )


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        elif value is not None:
            yield f"{prefix}{key}", value


@contextmanager
def environment(settings: Mapping[str, str]) -> Iterator[None]:
    """Set those variables that the user has not set; afterwards everything is as it was.

    Trackers' libraries read their settings there, and set some variables of their own.
    """
    before = dict(os.environ)
    os.environ.update({name: value for name, value in settings.items() if name not in before})
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
