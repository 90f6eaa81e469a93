"""Comparison of the rows of runs: speed-up, scaling efficiency, memory ratio and verdicts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from itertools import chain, combinations
from statistics import fmean

from shardmark.base.cells import DEFAULT_BASELINE, NODES
from shardmark.base.errors import InputError
from shardmark.base.results.store import Damaged, StoredRun
from shardmark.base.statistics.intervals import Estimate, estimate_difference, estimate_ratio
from shardmark.bench.analysis.compare.rounding import Rounding, rounding_of
from shardmark.bench.analysis.compare.rows import Row, grouped, rows_of
from shardmark.bench.analysis.compare.verdicts import (
    METRIC,
    common_repeats,
    with_quality_verdicts,
    with_verdicts,
)

MAX_EFFICIENCY = 1.5
"""Scaling efficiency above which a measurement must have been disturbed: caches give less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The rows of the compared runs, with their relation to the baseline."""

    rows: tuple[Row, ...]
    baseline: str
    """Strategy to which `speedup` and `memory_ratio` refer."""
    notes: tuple[str, ...]
    """Relations that could not be computed, with the reasons."""
    damaged: tuple[Damaged, ...]
    """Stored trials whose results cannot be used."""
    missing: tuple[str, ...]
    """Identifiers of trials that started and have no result."""
    rounding: tuple[Rounding, ...] = ()
    """The effect of rounding alone on the quality, for each run that measured it."""


def compare(runs: Sequence[StoredRun], baseline: str | None = None) -> Comparison:
    """Compare every row with the baseline strategy under the same conditions.

    The default baseline is `single` on one rank, or the first strategy of a matrix without it.
    Another baseline is used at the row's world size if it was measured there, otherwise at its
    smallest world size.  Rows of different runs are not compared.  Raises `InputError` for a
    baseline that no run measured.
    """
    rows = rows_of(runs)
    if baseline is not None:
        _check_baseline(baseline, rows)
    strategy = baseline or _default_baseline(runs, rows)
    rows = [_with_disturbance(row, scaling_reference(row, rows)) for row in rows]
    bases = [_baseline_of(row, rows, strategy) for row in rows]
    related = [_relate(row, base, rows, strategy) for row, base in zip(rows, bases, strict=True)]
    judged = with_verdicts([row for row, _ in related], bases)
    judged = with_quality_verdicts(judged, bases)
    return Comparison(
        rows=judged,
        baseline=strategy,
        notes=(*_content_changes(runs), *_by_text(chain(*(notes for _, notes in related)))),
        damaged=tuple(damaged for run in runs for damaged in run.damaged),
        missing=tuple(trial_id for run in runs for trial_id in run.missing),
        rounding=rounding_of(runs, judged),
    )


def _default_baseline(runs: Sequence[StoredRun], rows: Sequence[Row]) -> str:
    """Return `single` if it is a row or there is one strategy, else the matrix's first strategy."""
    measured = {row.strategy for row in rows if row.ok_trials}
    rivals = len(measured) > 1 and all(row.strategy != DEFAULT_BASELINE for row in rows)
    ordered = [name for run in runs for name in run.strategies if name in measured]
    return ordered[0] if rivals and ordered else DEFAULT_BASELINE


def _content_changes(runs: Sequence[StoredRun]) -> Iterator[str]:
    """Describe the user's code and data that differ between runs."""
    contents = [
        (run, run.fingerprint.user_content()) for run in runs if run.fingerprint is not None
    ]
    for (first, before), (second, now) in combinations(contents, 2):
        if changes := sorted(before.changes(now)):
            yield f"between {first.path} and {second.path} changed: {', '.join(changes)}"


def _check_baseline(baseline: str, rows: Sequence[Row]) -> None:
    measured = list(dict.fromkeys(row.strategy for row in rows))
    if baseline not in measured:
        near = get_close_matches(baseline, measured, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        allowed = f"measured were {', '.join(measured) or 'none'}{hint}"
        raise InputError("--baseline", f"no trial used strategy {baseline!r}", allowed)


def _with_disturbance(row: Row, reference: Row | None) -> Row:
    """Mark a row as disturbed if it scales better than possible: it or its reference was."""
    if reference is None or row.disturbed or not row.differing(reference) <= {NODES}:
        return row
    efficiency = ratio_between(row, reference, METRIC, per_device=True)
    if efficiency is None or (efficiency.low or efficiency.value) <= MAX_EFFICIENCY:
        return row
    reason = f"{row.place} has {efficiency.value:.1f} times the rate of perfect scaling"
    return replace(row, disturbed=reason)


def _by_text(notes: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Yield each text once, after the places to which it applies; an empty place is omitted."""
    for text, places in grouped((text, place) for place, text in notes).items():
        named = "; ".join(filter(None, places))
        yield f"{named}: {text}" if named else text


def _relate(
    row: Row, base: Row | None, rows: Sequence[Row], baseline: str
) -> tuple[Row, list[tuple[str, str]]]:
    """Return the row with the metrics of a comparison, and notes on missing or partial ones.

    A note consists of a place, which can be empty, and a text.
    """
    missing = dict(row.missing)
    metrics = dict(row.metrics)
    if base is None:
        conditions = "".join(f", {key}={value}" for key, value in row.varied.items())
        missing["speedup"] = missing["memory_ratio"] = (
            f"no speed-up: {row.experiment} has no `{baseline}` to compare with at"
            f" {row.precision}{conditions}"
        )
        notes = [] if row.is_script else [("", f"no speed-up where `{baseline}` did not run")]
    else:
        for name, metric in (("speedup", METRIC), ("memory_ratio", "peak_memory_bytes")):
            metrics[name] = ratio_between(row, base, metric)
            if metrics[name] is None:
                missing[name] = _no_ratio(row, base, metric)
        notes = _about_baseline(row, base, missing.get("speedup"))
    reference = scaling_reference(row, rows)
    if reference is not None:
        metrics["scaling_efficiency"] = ratio_between(row, reference, METRIC, per_device=True)
    if metrics["scaling_efficiency"] is None:
        missing["scaling_efficiency"] = (
            f"no smaller world size and no `{DEFAULT_BASELINE}` under the same conditions"
            if reference is None
            else _no_ratio(row, reference, METRIC)
        )
    baseline_place = None if base is None else base.place
    return replace(row, metrics=metrics, missing=missing, baseline=baseline_place), notes


def _about_baseline(row: Row, base: Row, no_speedup: str | None) -> list[tuple[str, str]]:
    """Return notes on conditions that differ from the baseline's, and on repeats not shared."""
    if row.disturbed or base.disturbed:
        return []  # the answers have a note for all rows
    if no_speedup is not None:
        return [] if _value(row, METRIC) is None else [("", f"no speed-up: {no_speedup}")]
    notes = [f"compared with {base.place}"] if row.differing(base) else []
    common = len(common_repeats(row, base, METRIC))
    if row.values[METRIC].keys() != base.values[METRIC].keys():
        shared = f"the {common} repeats" if common > 1 else "1 repeat" if common else "no repeat"
        effect = "" if common > 1 else ": no interval and no verdict"
        notes.append(f"compared by {shared} that {base.place} has too{effect}")
    return [(row.place, text) for text in notes]


def _baseline_of(row: Row, rows: Sequence[Row], baseline: str) -> Row | None:
    """Return the row's baseline: by equal conditions, equal world size, fewest ranks."""
    candidates = (
        other
        for other in rows
        if other.strategy == baseline
        and (baseline != DEFAULT_BASELINE or other.world_size == 1)
        and row.comparable(other)
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


def scaling_reference(row: Row, rows: Sequence[Row]) -> Row | None:
    """Return the reference of the scaling efficiency: the strategy on fewest ranks or `single`."""
    fewer = [
        other
        for other in rows
        if other.label == row.label
        and other.world_size < row.world_size
        and row.differing(other) <= {NODES}  # more ranks can need more nodes
        and row.comparable(other)
        and _value(other, METRIC) is not None
    ]
    if not fewer:
        return single_baseline(row, rows)
    return min(fewer, key=lambda other: (len(row.differing(other)), other.world_size))


def single_baseline(row: Row, rows: Sequence[Row]) -> Row | None:
    """Return the row of `single` on one rank under the row's conditions."""
    return _baseline_of(row, rows, DEFAULT_BASELINE)


def ratio_between(
    row: Row, other: Row, metric: str, *, per_device: bool = False
) -> Estimate | None:
    """Return the ratio of a metric to the other row's, with a 95 % interval from common repeats.

    With fewer than two common repeats it is the ratio of the means, without an interval.  None if
    a value is missing, the throughput was disturbed, or the other value is zero.  `per_device`
    first divides each value by the number of devices.
    """
    if metric == METRIC and row is not other and (row.disturbed or other.disturbed):
        return None
    above, below = row.values.get(metric), other.values.get(metric)
    if not above or not below or sum(below.values()) <= 0:
        return None
    scale = other.devices / row.devices if per_device else 1.0
    common = common_repeats(row, other, metric)
    if len(common) >= 2 and all(below[repeat] > 0 for repeat in common):
        return estimate_ratio(
            [above[repeat] * scale for repeat in common], [below[repeat] for repeat in common]
        )
    value = fmean(above.values()) / fmean(below.values()) * scale
    return Estimate(value=value, low=None, high=None, n=min(len(above), len(below)))


def difference_between(row: Row, other: Row, metric: str) -> Estimate | None:
    """Return the difference of a metric to the other row's, in the same way as `ratio_between`."""
    above, below = row.values.get(metric), other.values.get(metric)
    if not above or not below:
        return None
    common = common_repeats(row, other, metric)
    if len(common) >= 2:
        return estimate_difference([above[repeat] - below[repeat] for repeat in common])
    value = fmean(above.values()) - fmean(below.values())
    return Estimate(value=value, low=None, high=None, n=min(len(above), len(below)))


def _value(row: Row, name: str) -> float | None:
    estimate = row.metrics[name]
    return None if estimate is None else estimate.value


def _no_ratio(row: Row, base: Row, name: str) -> str:
    if name == METRIC and (disturbed := row.disturbed or base.disturbed):
        return f"not decided: {disturbed}"
    lacking = row if _value(row, name) is None else base
    return f"{lacking.place} has no {name}: {lacking.missing.get(name, 'it is zero')}"
