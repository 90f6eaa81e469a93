"""Explains surprises among comparable rows from what was recorded, with amounts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Literal

from shardmark.base.cells import DEFAULT_BASELINE
from shardmark.base.statistics.effects import holm, pairwise_effects
from shardmark.base.statistics.intervals import trimmed_mean
from shardmark.bench.analysis.advise.groups import ComparableGroup
from shardmark.bench.analysis.advise.selection import times_better
from shardmark.bench.analysis.compare.rows import Row, rate_of
from shardmark.bench.analysis.compare.step_time import StepTime, samples_per_step, step_time
from shardmark.bench.analysis.compare.verdicts import (
    FAMILY_ERROR_RATE,
    is_different,
    verdict_between,
)

Kind = Literal["slower", "little memory saved", "waits for a rank"]

RATE, PEAK = "samples_per_second", "peak_memory_bytes"
STATE = ("parameter_bytes", "gradient_bytes", "optimizer_state_bytes")
ACTIVATIONS = "activation_peak_bytes"

NOTEWORTHY = 0.05
"""A smaller relative difference needs no explanation."""
EXPECTED_SAVING = 0.5
"""Expected relative saving of peak memory, as a fraction of the state that sharding removes."""
LEAST_SHARE = 0.25
"""Smallest fraction of a difference that explains it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """A surprising difference between rows, with its explanation from the records."""

    kind: Kind
    row: Row
    other: Row | None
    """The row with which it is compared."""
    size: float
    """Relative difference, by which explanations are ordered."""
    difference: float = 0.0
    """Difference in seconds per step or bytes."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Disjoint parts of the difference in its unit, the largest first."""
    facts: Mapping[str, float] = field(default_factory=dict)
    """Further numbers for the text, in base units."""


def explain(group: ComparableGroup) -> list[Explanation]:
    """Return every surprise of the group: a difference that matters, and that the repeats show."""
    return [*_slower(group), *_memory(group), *_waits(group)]


def _slower(group: ComparableGroup) -> Iterator[Explanation]:
    """Yield rows that are slower than fewer ranks, or than the fastest row of the same size.

    All pairs of the group are one family, since the fastest was chosen by looking.
    """
    rows = _timed(group)
    effects = pairwise_effects([row.values[RATE] for row in rows])
    corrected = dict(zip(effects, holm(list(effects.values())), strict=True))
    places = {id(row): place for place, row in enumerate(rows)}
    for row in rows:
        for other in _faster_rivals(row, rows, group.candidates):
            ratio = times_better(other, row, RATE)
            pair = sorted((places[id(row)], places[id(other)]))
            effect = corrected.get((pair[0], pair[1]))
            verdict = verdict_between(row, other) or verdict_between(other, row) or effect
            if ratio is None or ratio.value <= 1 + NOTEWORTHY:
                continue
            if verdict is not None and is_different(verdict):
                yield from _explain_time(row, other, ratio.value)


def _faster_rivals(row: Row, rows: Sequence[Row], candidates: Sequence[Row]) -> Iterator[Row]:
    """Yield the fastest candidate on as many ranks, and the strategy or the baseline on fewer."""
    measured = [other for other in rows if any(other is candidate for candidate in candidates)]
    same_size = [other for other in measured if other.world_size == row.world_size]
    fastest = max(same_size, key=rate_of, default=row)
    if fastest is not row:
        yield fastest
    fewer = [other for other in rows if other.world_size < row.world_size]
    same = [other for other in fewer if other.label == row.label and not row.differing(other)]
    alone = [
        other for other in fewer if other.strategy == DEFAULT_BASELINE and other.world_size == 1
    ]
    if same:
        yield max(same, key=lambda other: other.world_size)
    elif alone:
        yield min(alone, key=lambda other: len(row.differing(other)))


def _timed(group: ComparableGroup) -> list[Row]:
    """Return the measured rows that were not disturbed."""
    rows = (*group.candidates, *group.by_design)
    return [row for row in rows if row.values.get(RATE) and not row.disturbed]


def _explain_time(row: Row, other: Row, ratio: float) -> Iterator[Explanation]:
    """Split the additional time of a row's step into parts; nothing if none of them explains it.

    Exposed communication is part of forward, backward and optimizer, so it is subtracted from them.
    It is not recorded which of the three contains it: the optimizer counts only with the growth
    that exceeds the growth of the communication.
    """
    samples = samples_per_step(other)
    row_repeats, others = ({t.repeat for t in either.ok_trials} for either in (row, other))
    # Common repeats, so that common disturbances cancel; all repeats if there are none.
    repeats = row_repeats & others or row_repeats | others
    slow, base = (step_time(r, samples, repeats) if samples else None for r in (row, other))
    if not slow or not base or _unknown(slow) != _unknown(base):
        return
    if slow.at_rate is None or base.at_rate is None or slow.at_rate <= base.at_rate:
        return
    grown = {name: (slow.spans[name] or 0.0) - (base.spans[name] or 0.0) for name in slow.spans}
    extra = slow.at_rate - base.at_rate
    exposed = 0.0
    # One process has nobody to wait for, whether that was recorded or not.
    slow_exposed, base_exposed = (
        0.0 if either.world_size == 1 else time.exposed
        for either, time in ((row, slow), (other, base))
    )
    if slow_exposed is not None and base_exposed is not None:
        exposed = slow_exposed - base_exposed
    optimizer = max(0.0, grown["optimizer"] - max(0.0, exposed))
    computation = "computation" + (" and the script's own code" if _unknown(slow) else "")
    parts = {
        "waiting for data": grown["data"],
        "exposed communication": exposed,
        "the optimizer": optimizer,
        computation: _work_seconds(slow) - _work_seconds(base) - exposed - optimizer,
        "slow steps": extra - (slow.median - base.median),
    }
    largest_first = dict(sorted(parts.items(), key=lambda item: -item[1]))
    facts = {
        name: estimate.value
        for name, either in (("calls", row), ("other_calls", other))
        if (estimate := either.metrics.get("collective_calls")) is not None
    }
    if next(iter(largest_first.values())) >= LEAST_SHARE * extra:
        yield Explanation(
            kind="slower", row=row, other=other, size=ratio,
            difference=extra, parts=largest_first, facts=facts,
        )  # fmt: skip


def _unknown(time: StepTime) -> set[str]:
    return {name for name, seconds in time.spans.items() if seconds is None}


def _work_seconds(time: StepTime) -> float:
    """Return the time of the passes and the update, or all but loading if one is not marked."""
    return time.median - (time.spans["data"] or 0.0) if _unknown(time) else time.work


def _memory(group: ComparableGroup) -> Iterator[Explanation]:
    """Yield rows that shard model state and save little memory compared with a replicated row."""
    measured = [
        row
        for row in group.candidates
        if row.world_size > 1 and all(row.metrics.get(n) for n in (*STATE, ACTIVATIONS, PEAK))
    ]
    for row in measured:
        fraction = _least_state_fraction(row)
        replicated = [
            other
            for other in measured
            if other.world_size == row.world_size
            and not other.differing(row)
            and _least_state_fraction(other) == 1
        ]
        if fraction == 1 or not replicated:
            continue
        full = min(replicated, key=lambda other: (len(other.strategy_options), _value(other, PEAK)))
        ratio = times_better(row, full, PEAK)
        most = 1 / (1 - EXPECTED_SAVING * (1 - fraction))
        if ratio is None or (ratio.high or ratio.value) >= most:
            continue
        saved = _value(full, PEAK) - _value(row, PEAK)
        state = _state(full) - _state(row)
        activations = _value(full, ACTIVATIONS) - _value(row, ACTIVATIONS)
        yield Explanation(
            kind="little memory saved",
            row=row,
            other=full,
            size=1 / ratio.value,
            difference=saved,
            parts={
                "model state": state,
                "activations and buffers": activations,
                "other memory": saved - state - activations,
            },
            facts={
                "peak_bytes": _value(full, PEAK),
                "activation_share": _value(full, ACTIVATIONS) / _value(full, PEAK),
            },
        )


def _least_state_fraction(row: Row) -> float:
    """Return the least fraction of parameters, gradients or optimizer state that a rank holds."""
    layout = row.trials[0].layout
    holds = layout.ranks[layout.training_ranks[0]].holds
    return min(holds.parameters, holds.gradients, holds.optimizer_state)


def _value(row: Row, name: str) -> float:
    estimate = row.metrics[name]
    assert estimate is not None, "checked by the caller"
    return estimate.value


def _state(row: Row) -> float:
    return sum(_value(row, name) for name in STATE)


def _waits(group: ComparableGroup) -> Iterator[Explanation]:
    """Yield rows in which one rank has significantly less exposed communication than the others.

    The others wait for that rank.  The error rate is divided by the number of ranks, because each
    of them could have been selected.  A single repeat is not enough for the test.
    """
    for row in _timed(group):
        exposed = [
            {
                rank.rank: seconds
                for rank in trial.ranks
                if rank.role == "worker"
                and rank.probe is not None
                and (seconds := rank.probe.exposed_communication_seconds) is not None
            }
            for trial in row.ok_trials
        ]
        step = row.metrics.get("step_seconds")
        if step is None or len(exposed) < 2 or len(exposed[0]) < 2:
            continue
        if any(seconds.keys() != exposed[0].keys() for seconds in exposed):
            continue
        late = min(exposed[0], key=lambda rank: fmean(by_rank[rank] for by_rank in exposed))
        waits = [fmean(by[r] for r in by if r != late) - by[late] for by in exposed]
        wait = trimmed_mean(waits)
        if wait.value < NOTEWORTHY * step.value:
            continue
        if wait.p_value * len(exposed[0]) <= FAMILY_ERROR_RATE:
            yield Explanation(
                kind="waits for a rank",
                row=row,
                other=None,
                size=wait.value / step.value,
                difference=wait.value,
                facts={"rank": float(late)},
            )
