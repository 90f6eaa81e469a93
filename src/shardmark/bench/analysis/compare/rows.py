"""Rows of a comparison, each of which has the repeats of a cell."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

from shardmark.base.cells import NODES, cell_id, ranks_and_nodes, title_of
from shardmark.base.errors import InputError
from shardmark.base.metrics import (
    COMPARISON_METRICS,
    METRICS,
    QUALITIES,
    RATES,
    TRIAL_METRICS,
    Better,
)
from shardmark.base.results.schema import Failure, Outcome, TrialResult
from shardmark.base.results.store import StoredRun
from shardmark.base.results.verification import NOT_TRIED, Verdict
from shardmark.base.statistics.effects import Difference, Effect
from shardmark.base.statistics.intervals import Estimate, estimate_mean
from shardmark.base.text import counted, with_options

Key = TypeVar("Key")
Value = TypeVar("Value")
NO_REASON = "no reason was recorded"
RANK = re.compile(r"^rank \d+: | \(rank \d+ is on [^()]*\)$")
"""Pattern of the rank in the reason of a failure."""
LAUNCHER = re.compile(r"\s*\[launcher\]")
"""Pattern of the beginning of a line by torch's launcher."""
FIXED_COLUMNS = frozenset({"strategy", "world_size", "recipe.precision"})
"""Axes that have a column in every table, and are therefore not among a row's varied keys."""

COUNTED = "counted"
"""Varied key of scripts whose steps are counted, because their samples cannot be."""

EXECUTION_KEYS = frozenset(
    {
        "recipe.activation_checkpointing",
        "recipe.channels_last",
        "recipe.compile",
        "recipe.cpu_offload",
        "recipe.gradient_accumulation",
        "recipe.optimizer.implementation",
        NODES,
    }
)
"""Axes that change the execution of a step and not the training.  A strategy's entry that sets them
(`{name: fsdp, cpu_offload: true}`) is still compared with the others."""


STATE_METRICS = ("parameter_bytes", "gradient_bytes", "optimizer_state_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """Trials of a row that failed with the same outcome and reason."""

    outcome: Outcome
    failure: Failure
    trials: tuple[TrialResult, ...]

    @property
    def count(self) -> int:
        return len(self.trials)

    @property
    def reason(self) -> str:
        """Reason, with the remedy if there is one."""
        return "; ".join(filter(None, (self.failure.reason, self.failure.remedy)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row of a comparison: all repeats of a cell."""

    experiment: str
    """Name of the experiment, with the folder if several runs have the same name."""
    workload: str
    strategy: str
    strategy_options: Mapping[str, Any]
    world_size: int
    precision: str
    varied: Mapping[str, Any]
    """Values of the other axes, by dotted key; of the task also those that only other runs vary."""
    synthetic: bool
    """True for generated data, whose quality metrics have no meaning."""
    weak_scaling: bool
    """True with `per_rank_batch`: the training then depends on the number of ranks."""
    outcomes: Mapping[str, int]
    metrics: Mapping[str, Estimate | None]
    """Estimates of every metric over the trials that ended `ok`."""
    missing: Mapping[str, str]
    """Reasons for metrics that are None, by metric."""
    values: Mapping[str, Mapping[int, float]] = field(repr=False)
    """Values of the trials that ended `ok`, by metric and repeat."""
    trials: tuple[TrialResult, ...] = field(default=(), repr=False)
    """Trials of the cell, in order of repeat."""
    folder: Path | None = field(default=None, repr=False)
    """Folder of the run."""
    baseline: str | None = None
    """Title of the row to which `speedup` and `memory_ratio` refer."""
    equivalent: bool | None = None
    """True if the training is equivalent to the reference; None if that was not verified."""
    inherits: str | None = None
    """Description of the cell that was verified in place of this one, if any."""
    against: str = ""
    """Command of the first variant of a script, which this one was compared with."""
    accepted: tuple[str, ...] = ()
    """Deviations of a script that the user accepts."""
    deviation: str | None = None
    """Cause of a deviation from the reference, or why it is not known."""
    guarantee: str | None = None
    """Verified guarantee of a strategy that is not intended to be equivalent."""
    disturbed: str | None = None
    """Description of a disturbance that makes the times of the row unusable."""
    verdict: str | None = None
    """A verdict of `analysis.compare.verdicts`; None without two common repeats."""
    effect: Effect | None = None
    """Effect on the throughput relative to the baseline, on which the verdict is based."""
    quality_verdict: str | None = None
    """A verdict on the main quality over the seeds; None without two common seeds."""
    quality_difference: Difference | None = None
    """Difference of the main quality to the baseline, on which its verdict is based."""
    shown_varied: Mapping[str, Any] = field(default_factory=dict)
    """Varied values that differ among the rows of the comparison."""

    @property
    def label(self) -> str:
        """The strategy with its options."""
        return with_options(self.strategy, self.strategy_options)

    @property
    def is_script(self) -> bool:
        """True for an unchanged script, which is audited against itself in one process."""
        return self.workload == "script"

    @property
    def nodes(self) -> int:
        """Number of machines of each trial; 1 in results of earlier versions."""
        return int(self.trials[0].trial.get("nodes") or 1) if self.trials else 1

    def stored(self, key: str) -> Any:
        """Return the trial's value of a dotted key; None if it has none."""
        value: Any = self.trials[0].trial
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value

    @property
    def mathematics(self) -> tuple[str, ...]:
        """Descriptions of intended or accepted differences from a single device's numerics."""
        return tuple(map(str, self.setting("mathematics") or self.accepted))

    def setting(self, name: str) -> Any:
        """Return the first non-empty value of a setting that a rank stored, or None."""
        stored = (rank.settings.get(name) for trial in self.ok_trials for rank in trial.ranks)
        return next(filter(None, stored), None)

    @property
    def devices(self) -> int:
        """Number of devices that train."""
        return self.trials[0].layout.devices

    @property
    def servers(self) -> int:
        """Number of parameter servers."""
        return len(self.trials[0].layout.server_ranks)

    def better(self, metric: str) -> Better | None:
        """Return the direction of improvement; for the user's metrics, the task defines it."""
        if metric in METRICS:
            return METRICS[metric].better
        ranks = (rank for trial in self.ok_trials for rank in trial.ranks)
        return next((rank.better[metric] for rank in ranks if metric in rank.better), None)

    @property
    def place(self) -> str:
        """Description of the row for notes."""
        bare = ("workload.model", "workload.dataset")  # their values are clear without the key
        varied = "".join(
            f", {'' if key in bare else title_of(key) + '='}{plain(value)}"
            for key, value in self.shown_varied.items()
        )
        precision = f", {self.precision}" if self.varies_precision else ""
        return f"{self.label} on {counted(self.world_size, 'rank')}{precision}{varied}"

    @property
    def varies_precision(self) -> bool:
        """True if the precision is an axis of the experiment."""
        return any("recipe.precision" in trial.varied for trial in self.trials)

    @property
    def ok_trials(self) -> tuple[TrialResult, ...]:
        """Trials that ended ok; disturbed trials only if all of them were disturbed."""
        return _counted(self.trials)

    @property
    def failed(self) -> tuple[Failed, ...]:
        return _failed(self.trials)

    @property
    def disturbed_trials(self) -> int:
        return sum(result.disturbed is not None for result in self.trials)

    @property
    def diverged(self) -> str | None:
        """Description of a trial's non-finite loss; such a row is never the best."""
        return next((text for result in self.ok_trials if (text := result.diverged)), None)

    @property
    def seeds(self) -> int:
        """Number of different seeds of the trials that ended ok, disturbed ones included."""
        return len(set(map(seed_of, trained(self.trials))))

    def comparable(self, other: Row) -> bool:
        """Return whether both rows have the same training in the same experiment."""
        return (self.experiment, self.workload, self.precision) == (
            other.experiment,
            other.workload,
            other.precision,
        ) and self.differing(other) <= EXECUTION_KEYS

    def differing(self, other: Row) -> frozenset[str]:
        """Return the varied keys in which the rows differ."""
        keys = self.varied.keys() | other.varied.keys()
        return frozenset(key for key in keys if self.varied.get(key) != other.varied.get(key))


def rows_of(runs: Sequence[StoredRun]) -> list[Row]:
    """Return the rows of the runs in a fixed order.  Raises the error of `check_corpora`."""
    check_corpora(runs)
    names = Counter(run.name for run in runs)
    rows = []
    for run in runs:
        # Rows of two runs of the same experiment are not merged: the machines can differ.
        label = run.name if names[run.name] == 1 else f"{run.name} ({run.path})"
        cells = gathered((_cell(result), result) for result in run.trials).values()
        ordered = sorted(cells, key=lambda trials: _order(trials[0]))
        rows += [_row(label, run, trials) for trials in ordered]
    return _with_common_axes(rows)


def _with_common_axes(rows: Sequence[Row]) -> list[Row]:
    """Give each row the axes of the task that other runs vary, and mark axes of one value."""
    keys = dict.fromkeys(key for row in rows for key in row.varied)
    of_task = [key for key in keys if key.startswith("workload.")]
    filled = []
    for row in rows:
        stored = {key: row.stored(key) for key in of_task if key not in row.varied}
        present = {key: value for key, value in stored.items() if value is not None}
        filled.append(replace(row, varied={**row.varied, **present}))
    values = {key: {plain(row.varied.get(key)) for row in filled} for key in keys}
    return [
        replace(row, shown_varied={k: v for k, v in row.varied.items() if len(values[k]) > 1})
        for row in filled
    ]


def check_corpora(runs: Iterable[StoredRun]) -> None:
    """Raise `InputError` if two runs used different versions of an installed text corpus."""
    first_use: dict[str, tuple[str, StoredRun]] = {}
    for run in runs:
        records = (rank for result in run.trials for rank in result.ranks)
        for name, digest in (item for record in records for item in record.corpora.items()):
            before, first = first_use.setdefault(name, (digest, run))
            if before != digest:
                raise InputError(
                    str(run.path),
                    f"trained on another text of {name} than {first.path}",
                    "look at the two by themselves, or measure both with the same versions of"
                    " Python and packages",
                )


def task_of(row: Row) -> tuple[str, str, str]:
    """Return what identifies the row's task: experiment, workload, and varied workload keys."""
    varied = {key: value for key, value in row.varied.items() if key.startswith("workload")}
    return row.experiment, row.workload, plain(varied)


def rate_of(row: Row) -> float:
    """Return the mean throughput of the repeats; 0 if it was not measured."""
    values = row.values.get("samples_per_second", {}).values()
    return fmean(values) if values else 0.0


def main_rate(rows: Sequence[Row]) -> str:
    """Return the first of `RATES` that every measured row has.

    Rows of the same workload have the same order by any of these metrics.
    """
    measured = [row for row in rows if row.values.get(RATES[-1])]
    return next(
        (name for name in RATES if all(row.values.get(name) for row in measured)), RATES[-1]
    )


def main_quality(rows: Sequence[Row]) -> str | None:
    """Return the quality metric that most rows have: first the user's, then as in `QUALITIES`."""
    if any(row.synthetic for row in rows):
        return None
    user_defined = (
        name for row in rows for name in row.values.keys() - METRICS.keys() if row.better(name)
    )
    names = tuple(dict.fromkeys((*sorted(user_defined), *QUALITIES)))
    counts = {name: sum(bool(row.values.get(name)) for row in rows) for name in names}
    best = max(names, key=lambda name: counts[name])
    return best if counts[best] else None


def batch_norms_differ(rows: Iterable[Row]) -> bool:
    """Return whether batch norms of the rows saw unlike parts of a batch, and qualities show it."""
    measured = [row for row in rows if not row.weak_scaling]
    shares = {
        trial.layout.shares
        for row in measured
        for trial in row.ok_trials
        for rank in trial.ranks
        if rank.probe and rank.probe.batch_norms
    }
    return len(shares) > 1 and main_quality(measured) is not None


def seed_of(result: TrialResult) -> int | None:
    """Return the seed with which the trial trained."""
    seed = result.trial.get("recipe", {}).get("seed")
    return None if seed is None else int(seed)


def trained(trials: Iterable[TrialResult]) -> tuple[TrialResult, ...]:
    """Return the trials that ended ok, disturbed ones included: `can_be_disturbed`."""
    return tuple(result for result in trials if result.outcome is Outcome.OK)


def can_be_disturbed(name: str) -> bool:
    """Return whether a disturbed trial's value of the metric does not count: a time or a rate."""
    return name in METRICS and METRICS[name].is_timed


def is_quality(name: str) -> bool:
    """Return whether a metric is a loss or a quality, among them those of the user's task."""
    return name not in METRICS or METRICS[name].group == "quality"


def over_seeds(name: str, estimate: Estimate, seeds: int) -> Estimate:
    """Return the estimate; that of a quality has no interval if all repeats have one seed.

    Repeats of one seed train the same up to rounding: their spread says nothing of the quality.
    """
    alone = is_quality(name) and seeds == 1
    return replace(estimate, low=None, high=None) if alone else estimate


def plain(value: object) -> str:
    """Format a value of the experiment file as text, with sorted keys."""
    if isinstance(value, str):
        return value
    return json.dumps(value, sort_keys=True, default=str)


def gathered(pairs: Iterable[tuple[Key, Value]]) -> dict[Key, list[Value]]:
    """Return each first element with the second ones that it has, in order."""
    groups: dict[Key, list[Value]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def grouped(pairs: Iterable[tuple[Key, Value]]) -> dict[Key, list[Value]]:
    """Return the same with each second element once."""
    return gathered(dict.fromkeys(pairs))


def other_varied(result: TrialResult) -> dict[str, Any]:
    """Return the trial's varied keys that have no fixed column, and what it counts if no samples.

    Rows that count steps are thus not compared with others.
    """
    varied = {key: value for key, value in result.varied.items() if key not in FIXED_COLUMNS}
    steps = any(rank.settings.get("steps_as_samples") for rank in result.ranks)
    return varied | ({COUNTED: "steps"} if steps else {})


def _cell(result: TrialResult) -> tuple[object, ...]:
    return (
        _workload_label(result),
        result.strategy,
        plain(result.strategy_options),
        result.world_size,
        result.precision,
        plain(other_varied(result)),
    )


def _order(result: TrialResult) -> tuple[object, ...]:
    """Return the sort key: comparable rows together, the baseline first, then by ranks."""
    return (
        _workload_label(result),
        tuple(_sortable(value) for value in other_varied(result).values()),
        result.precision,
        result.strategy != "single",
        result.strategy,
        plain(result.strategy_options),
        result.world_size,
    )


def _sortable(value: object) -> tuple[bool, float, str]:
    """Return a sort key: numbers by value, then everything else by its text."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return (False, value, "")  # an integer can be too large for a float
    return (True, 0.0, plain(value))


def _workload_label(result: TrialResult) -> str:
    workload = result.trial.get("workload", {})
    task = "/".join(Path(str(workload.get("task", ""))).parts[-2:])
    parts = (*(workload.get(key) for key in ("name", "model", "dataset")), task or None)
    return " ".join(str(part) for part in parts if part is not None)


def _row(experiment: str, run: StoredRun, trials: Sequence[TrialResult]) -> Row:
    first, ok = trials[0], _counted(trials)
    recorded = sorted({name for result in ok for name in result.metrics} - METRICS.keys())
    values = {
        name: _values(ok if can_be_disturbed(name) else trained(trials), name)
        for name in (*TRIAL_METRICS, *recorded)
    }
    metrics: dict[str, Estimate | None] = dict.fromkeys((*METRICS, *recorded))
    seeds = {seed_of(result) for result in trained(trials)}
    for name, by_repeat in values.items():
        if by_repeat:
            estimate = _estimate(name, list(by_repeat.values()))
            metrics[name] = over_seeds(name, estimate, len(seeds))
    counts = [rank.probe.parameters for result in ok for rank in result.ranks if rank.probe]
    if (size := next(filter(None, counts), None)) is not None:
        metrics["parameters"] = Estimate(value=size, low=None, high=None, n=len(ok))
    verdict = None
    verified: dict[str, Any] = {}
    if run.verification is not None and "strategy" in first.trial:
        verdict = run.verification.verdict_of(cell_id(first.trial))
    if run.verification is not None and verdict is not None:
        verified = {
            "equivalent": verdict.equivalent,
            "against": verdict.against,
            "guarantee": verdict.guarantee,
            "accepted": verdict.mathematics if verdict.accept else (),
        }
        if verdict.tried_as:
            source = run.verification.verdict_of(verdict.tried_as)
            other = [part for part in _sizes(source or verdict) if part not in _sizes(verdict)]
            verified["inherits"] = ", ".join(other) or "another cell"
        if not verdict.equivalent and (cause := verdict.cause):
            verified["deviation"] = cause.evidence if cause.text == NOT_TRIED else cause.text
    return Row(
        experiment=experiment,
        workload=_workload_label(first),
        strategy=first.strategy,
        strategy_options=first.strategy_options,
        world_size=first.world_size,
        precision=first.precision,
        varied=other_varied(first),
        synthetic=any(result.synthetic for result in trials),
        weak_scaling=_scales_weakly(first, run.trials),
        outcomes=dict(sorted(Counter(str(result.outcome) for result in trials).items())),
        disturbed=next((result.disturbed for result in ok), None),
        metrics=metrics,
        missing={
            name: _reason(ok, name)
            for name, estimate in metrics.items()
            if estimate is None and name not in COMPARISON_METRICS
        }
        | ({} if size else {"parameters": _reason(ok, "parameter_bytes")}),  # one probe counts both
        values=values,
        trials=tuple(sorted(trials, key=lambda result: result.repeat)),
        folder=run.path,
        **verified,
    )


def _scales_weakly(result: TrialResult, trials: Sequence[TrialResult]) -> bool:
    """Return whether the global batch grows with the ranks; a script's is read off its trials."""
    if result.trial.get("workload", {}).get("name") != "script":
        return result.trial.get("recipe", {}).get("per_rank_batch") is not None
    variant = [trial for trial in trials if trial.strategy == result.strategy and trial.ranks]
    batches = {
        (trial.world_size, round(sum(rank.samples for rank in trial.ranks) / steps.value))
        for trial in variant
        if (steps := trial.metrics.get("measured_steps")) is not None
    }
    return len({batch for _, batch in batches}) > 1 and len({size for size, _ in batches}) > 1


def _sizes(verdict: Verdict) -> list[str]:
    varied = (f"{title_of(key)}={plain(value)}" for key, value in verdict.varied.items())
    return [ranks_and_nodes(verdict.world_size, 1), *varied]


def _counted(trials: Sequence[TrialResult]) -> tuple[TrialResult, ...]:
    ok = trained(trials)
    return tuple(result for result in ok if result.disturbed is None) or ok


def _estimate(name: str, values: Sequence[float]) -> Estimate:
    """Estimate the mean of a metric; the interval of a fraction is cut at 1."""
    estimate = estimate_mean(values)
    is_fraction = name in METRICS and METRICS[name].unit == "fraction" and max(values) <= 1
    if not is_fraction or estimate.high is None:
        return estimate
    return replace(estimate, high=min(estimate.high, 1.0))


def _values(ok: Sequence[TrialResult], name: str) -> dict[int, float]:
    by_repeat: dict[int, float] = {}
    for result in sorted(ok, key=lambda result: result.repeat):
        summary = result.metrics.get(name)
        if summary is not None and math.isfinite(summary.value):
            by_repeat[result.repeat] = summary.value
    return by_repeat


def _reason(ok: Sequence[TrialResult], name: str) -> str:
    if not ok:
        return "no trial ended ok"
    reasons = Counter(result.missing.get(name, "not recorded") for result in ok)
    return reasons.most_common(1)[0][0]


def _failed(trials: Sequence[TrialResult]) -> tuple[Failed, ...]:
    """Group the trials that did not end ok by outcome and reason.

    Reasons that differ only in their rank are merged, without the rank.
    """
    groups: dict[object, list[tuple[Failure, TrialResult]]] = {}
    for result in trials:
        if result.outcome is not Outcome.OK:
            failure = result.failure or Failure(reason=NO_REASON)
            lines = [line for line in failure.reason.splitlines() if not LAUNCHER.match(line)]
            failure = failure.model_copy(update={"reason": " ".join(lines) or NO_REASON})
            key = result.outcome, RANK.sub("", failure.reason), failure.remedy
            groups.setdefault(key, []).append((failure, result))
    merged = []
    for group in groups.values():
        failure, first = group[0]
        if any(other != failure for other, _ in group):
            update = {"reason": RANK.sub("", failure.reason), "rank": None, "node": None}
            failure = failure.model_copy(update=update)
        results = tuple(result for _, result in group)
        merged.append(Failed(outcome=first.outcome, failure=failure, trials=results))
    return tuple(merged)
