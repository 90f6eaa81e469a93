"""How the shown numbers were measured, in a few sentences, and what each metric means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardmark.analysis.compare.rows import Row
from shardmark.core.errors import ShardmarkError
from shardmark.core.metrics import METRICS
from shardmark.results.store import RunFolder, StoredRun


@dataclass(frozen=True, slots=True, kw_only=True)
class Definition:
    """One metric that some row has."""

    name: str
    unit: str
    over: str
    definition: str
    source: str


_OVER = {
    "maximum": "the largest of the ranks",
    "sum": "the sum over the ranks",
    "mean": "the mean over the ranks",
    "trial": "of the trial",
}


def definitions(rows: Sequence[Row]) -> tuple[Definition, ...]:
    """The catalogue's entries for what is not missing everywhere."""
    return tuple(
        Definition(
            name=metric.name,
            unit=metric.unit,
            over=_OVER[metric.over],
            definition=metric.definition,
            source=metric.source,
        )
        for metric in METRICS.values()
        if any(row.metrics.get(metric.name) is not None for row in rows)
    )


def method(runs: Sequence[StoredRun]) -> tuple[str, ...]:
    """Sentences about trials, windows, repeats and intervals, with the runs' own settings."""
    measures = [_measure(run) for run in runs]
    warmup = _values(measures, "warmup_steps")
    repeats = _values(measures, "repeats")
    steps = f"the first {warmup} steps of a trial" if warmup else "the warm-up steps of a trial"
    times = f"{repeats} times" if repeats not in ("", "1") else "once"
    return (
        "Trials. A trial is one cell of the experiment's matrix in fresh processes with a fresh"
        f" process group. Each cell is run {times}; repeats are interleaved in a random order that"
        " is recorded, so that a machine that slowly warms up favours nobody.",
        f"Windows. Time and rates come from windows of consecutive steps: {steps} belong to none,"
        " evaluation lies between them, and the device is idle at both ends of each. A rate is the"
        " counted samples of all ranks over the time of the slowest rank.",
        "Intervals. A number is the mean over the repeats that ended ok; ± is half of the 95 %"
        " interval of that mean. Ratios to the baseline are taken between trials of the same"
        " repeat. A single repeat has no interval, and no difference is called real by it.",
        "Memory. The peak is held by tensors: on a GPU the allocator's in the windows, on a CPU"
        " counted in an untimed step after the training. State is parameters, gradients and"
        " optimizer state of the fullest rank.",
        "Equivalence. Before the trials, a few steps of every strategy are held against one process"
        " that plays all ranks in turn: same weights, same samples, same losses, gradients and"
        " parameters up to what rounding can make.",
    )


def _measure(run: StoredRun) -> Mapping[str, Any]:
    """The experiment's `measure`; empty where it cannot be read."""
    try:
        measure = RunFolder(run.path).read_experiment().get("measure")
    except ShardmarkError:
        return {}
    return measure if isinstance(measure, Mapping) else {}


def _values(measures: Sequence[Mapping[str, Any]], key: str) -> str:
    """All of them, such as `3` or `3 or 5`; empty where none is known."""
    found = sorted({int(one[key]) for one in measures if isinstance(one.get(key), int)})
    return " or ".join(map(str, found))
