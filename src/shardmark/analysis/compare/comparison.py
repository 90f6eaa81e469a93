"""Sets the rows of one or more runs in relation: speed-up, scaling efficiency, memory ratio."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from itertools import chain, combinations
from statistics import fmean

from shardmark.analysis.compare.rounding import Rounding, rounding_of
from shardmark.analysis.compare.rows import Row, rows_of
from shardmark.analysis.compare.verdicts import METRIC, common_repeats, with_verdicts
from shardmark.analysis.statistics.intervals import Estimate, estimate_difference, estimate_ratio
from shardmark.config.axes import NODES
from shardmark.core.errors import InputError
from shardmark.results.store import Damaged, StoredRun
from shardmark.trials.trial import DEFAULT_BASELINE

MOST_EFFICIENCY = 1.5
"""Of perfect scaling: caches give a little more than 1, and never as much as this."""


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
    rounding: tuple[Rounding, ...] = ()
    """The effect of rounding alone on the quality, for each run that measured it."""


def compare(runs: Sequence[StoredRun], baseline: str | None = None) -> Comparison:
    """Relate every row to the baseline strategy under the same conditions.

    The default baseline is `single` on one rank, or the matrix's first strategy without it; another
    one is taken at the row's world size where that was measured, else at its smallest.  Runs are
    never related to one another.  Raises `InputError` for a baseline that no run measured.
    """
    rows = rows_of(runs)
    if baseline is not None:
        _check_baseline(baseline, rows)
    strategy = baseline or _default_baseline(runs, rows)
    rows = [_doubted(row, scaling_reference(row, rows)) for row in rows]
    bases = [_baseline_of(row, rows, strategy) for row in rows]
    related = [_relate(row, base, rows, strategy) for row, base in zip(rows, bases, strict=True)]
    judged = with_verdicts([row for row, _ in related], bases)
    return Comparison(
        rows=judged,
        baseline=strategy,
        notes=(*_other_contents(runs), *_by_text(chain(*(notes for _, notes in related)))),
        damaged=tuple(damaged for run in runs for damaged in run.damaged),
        missing=tuple(trial_id for run in runs for trial_id in run.missing),
        rounding=rounding_of(runs, judged),
    )


def _default_baseline(runs: Sequence[StoredRun], rows: Sequence[Row]) -> str:
    """`single` where it is a row, or nothing has a rival; else the first measured in a matrix."""
    measured = {row.strategy for row in rows if row.ok_trials}
    rivals = len(measured) > 1 and all(row.strategy != DEFAULT_BASELINE for row in rows)
    ordered = [name for run in runs for name in run.strategies if name in measured]
    return ordered[0] if rivals and ordered else DEFAULT_BASELINE


def _other_contents(runs: Sequence[StoredRun]) -> Iterator[str]:
    """Code and data of the user's that two runs name alike, and that are not the same."""
    known = [(run, run.fingerprint.user_content()) for run in runs if run.fingerprint is not None]
    for (first, before), (second, now) in combinations(known, 2):
        if changes := sorted(before.changes(now)):
            yield f"between {first.path} and {second.path} changed: {', '.join(changes)}"


def _check_baseline(baseline: str, rows: Sequence[Row]) -> None:
    measured = list(dict.fromkeys(row.strategy for row in rows))
    if baseline not in measured:
        near = get_close_matches(baseline, measured, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        allowed = f"measured were {', '.join(measured) or 'none'}{hint}"
        raise InputError("--baseline", f"no trial used strategy {baseline!r}", allowed)


def _doubted(row: Row, reference: Row | None) -> Row:
    """Marked as disturbed where it is faster than its devices can be: one of the two was."""
    if reference is None or row.disturbed or not row.differing(reference) <= {NODES}:
        return row
    efficiency = ratio_between(row, reference, METRIC, per_device=True)
    if efficiency is None or (efficiency.low or efficiency.value) <= MOST_EFFICIENCY:
        return row
    doubt = f"{row.place} has {efficiency.value:.1f} times the rate of perfect scaling"
    return replace(row, disturbed=doubt)


def _by_text(notes: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Yield each text once, behind the places that it is said of; "" is no place."""
    places: dict[str, dict[str, None]] = {}
    for place, text in notes:
        places.setdefault(text, {})[place] = None
    for text, known in places.items():
        named = "; ".join(filter(None, known))
        yield f"{named}: {text}" if named else text


def _relate(
    row: Row, base: Row | None, rows: Sequence[Row], baseline: str
) -> tuple[Row, list[tuple[str, str]]]:
    """The row with the metrics that only a comparison has, and notes where one is partial.

    A note is a place, or "", and a text.
    """
    missing = dict(row.missing)
    metrics = dict(row.metrics)
    if base is None:
        missing["speedup"] = missing["memory_ratio"] = _no_baseline(row, baseline)
        notes = [("", f"no speed-up where `{baseline}` has no trial under the same conditions")]
    else:
        for name, of in (("speedup", METRIC), ("memory_ratio", "peak_memory_bytes")):
            metrics[name] = ratio_between(row, base, of)
            if metrics[name] is None:
                missing[name] = _no_ratio(row, base, of)
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
    """Other conditions than the baseline's, and repeats that only one of the two has."""
    if row.disturbed or base.disturbed:
        return []  # the answers say so, once for all
    if no_speedup is not None:
        return [] if _value(row, METRIC) is None else [("", f"no speed-up: {no_speedup}")]
    notes = [f"compared with {base.place}"] if row.differing(base) else []
    common = len(common_repeats(row, base, METRIC))
    if row.values[METRIC].keys() != base.values[METRIC].keys():
        shared = f"{common} repeats" if common > 1 else "1 repeat" if common else "no repeat"
        effect = "only these are compared" if common > 1 else "no interval and no verdict"
        notes.append(f"{shared} shared with {base.place}, {effect}")
    return [(row.place, text) for text in notes]


def _baseline_of(row: Row, rows: Sequence[Row], baseline: str) -> Row | None:
    """The baseline's row: the same conditions first, then the same world size, then the fewest."""
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
    """What the row's efficiency refers to: its strategy on the fewest ranks, else `single`."""
    fewer = [
        other
        for other in rows
        if other.label == row.label
        and other.world_size < row.world_size
        and row.differing(other) <= {NODES}  # more ranks may be more nodes
        and row.comparable(other)
        and _value(other, METRIC) is not None
    ]
    if not fewer:
        return single_baseline(row, rows)
    return min(fewer, key=lambda other: (len(row.differing(other)), other.world_size))


def single_baseline(row: Row, rows: Sequence[Row]) -> Row | None:
    """`single` on one rank under the row's conditions."""
    return _baseline_of(row, rows, DEFAULT_BASELINE)


def ratio_between(
    row: Row, other: Row, metric: str, *, per_device: bool = False
) -> Estimate | None:
    """The row's metric over the other's, with a 95 % interval from the repeats that both have.

    With fewer than two common repeats the ratio of the means, without interval; None where one of
    the two was not measured, or disturbed (its throughput), or the other is zero.  `per_device`
    divides each by its devices first.
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
    """The row's metric minus the other's, in its unit; intervals and None as `ratio_between`."""
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


def _no_baseline(row: Row, baseline: str) -> str:
    conditions = "".join(f", {key}={value}" for key, value in row.varied.items())
    return (
        f"no speed-up: {row.experiment} has no `{baseline}` to compare with at"
        f" {row.precision}{conditions}"
    )


def _no_ratio(row: Row, base: Row, name: str) -> str:
    if name == METRIC and (disturbed := row.disturbed or base.disturbed):
        return f"not decided: {disturbed}"
    lacking = row if _value(row, name) is None else base
    return f"{lacking.place} has no {name}: {lacking.missing.get(name, 'it is zero')}"
