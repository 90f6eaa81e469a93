"""Sets the rows of one or more runs in relation: speed-up, scaling efficiency, memory ratio."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches

from shardmark.analysis.rows import Row, rows_of
from shardmark.analysis.statistics import Estimate, estimate_ratio
from shardmark.errors import InputError
from shardmark.results.store import Damaged, StoredRun

DEFAULT_BASELINE = "single"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Every cell of the compared runs, set in relation to its baseline."""

    rows: tuple[Row, ...]
    baseline: str
    """Strategy that `speedup` and `memory_ratio` refer to."""
    notes: tuple[str, ...]
    """Relations that could not be computed, and why."""
    damaged: tuple[Damaged, ...]
    """Stored trials that were not believed."""
    missing: tuple[str, ...]
    """Trials that were begun and left no result."""


def compare(runs: Sequence[StoredRun], baseline: str | None = None) -> Comparison:
    """Relate every row to the baseline strategy under the same conditions.

    The default baseline is `single` on one rank; another one is taken at the row's world size where
    that was measured, else at its smallest.  Runs are never related to one another.  Raises
    `InputError` for a baseline that no run measured.
    """
    rows = rows_of(runs)
    if baseline is not None:
        _check_baseline(baseline, rows)
    related = [_relate(row, rows, baseline or DEFAULT_BASELINE) for row in rows]
    return Comparison(
        rows=tuple(row for row, _ in related),
        baseline=baseline or DEFAULT_BASELINE,
        notes=tuple(dict.fromkeys(note for _, note in related if note is not None)),
        damaged=tuple(damaged for run in runs for damaged in run.damaged),
        missing=tuple(trial_id for run in runs for trial_id in run.missing),
    )


def _check_baseline(baseline: str, rows: Sequence[Row]) -> None:
    measured = list(dict.fromkeys(row.strategy for row in rows))
    if baseline not in measured:
        near = get_close_matches(baseline, measured, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        allowed = f"measured were {', '.join(measured) or 'none'}{hint}"
        raise InputError("--baseline", f"no trial used strategy {baseline!r}", allowed)


def _relate(row: Row, rows: Sequence[Row], baseline: str) -> tuple[Row, str | None]:
    """The row with the metrics that only a comparison has, and a note where one cannot be had."""
    comparable = [other for other in rows if row.comparable(other)]
    base = _baseline_of(row, comparable, baseline)
    missing = dict(row.missing)
    metrics = dict(row.metrics)
    note: str | None = None
    if base is None:
        note = _no_baseline(row, baseline)
        missing["speedup"] = missing["memory_ratio"] = note
    else:
        if row.differing(base):
            note = f"{row.place} is compared with {base.place}"
        for name, of in (("speedup", "samples_per_second"), ("memory_ratio", "peak_memory_bytes")):
            metrics[name] = _ratio(row, base, of)
            if metrics[name] is None:
                missing[name] = _no_ratio(row, base, of)
                if name == "speedup" and _value(row, of) is not None:
                    note = f"no speed-up: {missing[name]}"
    reference = _smallest(row, comparable) or _baseline_of(row, comparable, DEFAULT_BASELINE)
    if reference is not None:
        metrics["scaling_efficiency"] = _ratio(row, reference, "samples_per_second", per_rank=True)
    if metrics["scaling_efficiency"] is None:
        missing["scaling_efficiency"] = (
            f"no smaller world size and no `{DEFAULT_BASELINE}` under the same conditions"
            if reference is None
            else _no_ratio(row, reference, "samples_per_second")
        )
    related = replace(
        row,
        metrics=metrics,
        missing=missing,
        baseline=None if base is None else base.place,
        verdict=_verdict(row, base, metrics),
    )
    return related, note


def _baseline_of(row: Row, comparable: Sequence[Row], baseline: str) -> Row | None:
    """The baseline's row: the same conditions first, then the same world size, then the fewest."""
    candidates = (
        other
        for other in comparable
        if other.strategy == baseline and (baseline != DEFAULT_BASELINE or other.world_size == 1)
    )
    return min(
        candidates,
        key=lambda other: (
            len(row.differing(other)),
            other.world_size != row.world_size,
            other.world_size,
            len(other.strategy_options),
            other.place,
        ),
        default=None,
    )


def _smallest(row: Row, comparable: Sequence[Row]) -> Row | None:
    """The same strategy on the fewest ranks that have a throughput; None unless that is fewer."""
    smaller = [
        other
        for other in comparable
        if other.label == row.label
        and not row.differing(other)
        and other.world_size < row.world_size
        and _value(other, "samples_per_second") is not None
    ]
    return min(smaller, key=lambda other: other.world_size, default=None)


def _ratio(row: Row, base: Row, name: str, *, per_rank: bool = False) -> Estimate | None:
    """Ratio of the means; with an interval only where both rows have the same repeats."""
    above, below = row.values[name], base.values[name]
    if not above or not below or sum(below.values()) <= 0:
        return None
    scale = base.world_size / row.world_size if per_rank else 1.0
    if above.keys() == below.keys():
        repeats = sorted(above)
        return estimate_ratio(
            [above[repeat] * scale for repeat in repeats], [below[repeat] for repeat in repeats]
        )
    mean_above = sum(above.values()) / len(above)
    mean_below = sum(below.values()) / len(below)
    count = min(len(above), len(below))
    return Estimate(value=mean_above / mean_below * scale, low=None, high=None, n=count)


def _value(row: Row, name: str) -> float | None:
    estimate = row.metrics[name]
    return None if estimate is None else estimate.value


def _no_baseline(row: Row, baseline: str) -> str:
    conditions = "".join(f", {key}={value}" for key, value in row.varied.items())
    return (
        f"no speed-up: {row.experiment} has no `{baseline}` to compare with at"
        f" {row.precision}{conditions}"
    )


def _no_ratio(row: Row, base: Row, name: str) -> str:
    lacking = row if _value(row, name) is None else base
    return f"{lacking.place} has no {name}: {lacking.missing.get(name, 'it is zero')}"


def _verdict(row: Row, base: Row | None, metrics: Mapping[str, Estimate | None]) -> str | None:
    if base is None:
        return None
    if base is row:
        return "baseline"
    speedup = metrics["speedup"]
    if speedup is None or speedup.low is None or speedup.high is None:
        return None
    if speedup.low > 1:
        return "faster"
    return "slower" if speedup.high < 1 else "within noise"
