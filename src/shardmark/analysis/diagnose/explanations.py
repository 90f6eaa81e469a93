"""Explains surprises among comparable rows from what was recorded, with amounts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Literal

from shardmark.analysis.advise.groups import ComparableGroup
from shardmark.analysis.advise.selection import times_better
from shardmark.analysis.compare.rows import Row, rate_of
from shardmark.analysis.compare.step_time import samples_per_step, step_time
from shardmark.analysis.compare.verdicts import FAMILY_ERROR_RATE, is_different, verdict_between
from shardmark.analysis.statistics.effects import holm, pairwise_effects
from shardmark.analysis.statistics.intervals import trimmed_mean
from shardmark.trials.trial import DEFAULT_BASELINE

Kind = Literal["slower", "little memory saved", "waits for a rank"]

RATE, PEAK = "samples_per_second", "peak_memory_bytes"
STATE = ("parameter_bytes", "gradient_bytes", "optimizer_state_bytes")
ACTIVATIONS = "activation_peak_bytes"

NOTEWORTHY = 0.05
"""A smaller relative difference needs no explanation."""
HOPED_SHARE = 0.5
"""Saving less of the peak than this part of what a rank gives away of its state is little."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """One surprise and what the records say of it."""

    kind: Kind
    row: Row
    other: Row | None
    """What it was held against."""
    size: float
    """How far they differ, relative: the more, the more striking."""
    difference: float = 0.0
    """Seconds a step, bytes, or the quality's own unit."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """What the difference consists of, none counted twice, in its unit; the largest first."""
    facts: Mapping[str, float] = field(default_factory=dict)
    """Further numbers for the sentence, in base units."""


def explain(group: ComparableGroup) -> list[Explanation]:
    """Return every surprise of the group: a difference that matters, and that the repeats show."""
    return [*_slower(group), *_memory(group), *_waits(group)]


def _slower(group: ComparableGroup) -> Iterator[Explanation]:
    """More ranks that are slower than fewer, and strategies slower than the fastest of a size.

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
                yield _where_the_time_went(row, other, ratio.value)


def _faster_rivals(row: Row, rows: Sequence[Row], candidates: Sequence[Row]) -> Iterator[Row]:
    """The fastest candidate on as many ranks, and the same strategy (or the baseline) on fewer."""
    measured = [other for other in rows if any(other is each for each in candidates)]
    same_size = [other for other in measured if other.world_size == row.world_size]
    fastest = max(same_size, key=rate_of, default=row)
    if fastest is not row:
        yield fastest
    fewer = [other for other in rows if other.world_size < row.world_size]
    same = [other for other in fewer if other.label == row.label and not row.differing(other)]
    alone = [each for each in fewer if each.strategy == DEFAULT_BASELINE and each.world_size == 1]
    if same:
        yield max(same, key=lambda other: other.world_size)
    elif alone:
        yield min(alone, key=lambda other: len(row.differing(other)))


def _timed(group: ComparableGroup) -> list[Row]:
    """The rows whose times count."""
    rows = (*group.candidates, *group.by_design)
    return [row for row in rows if row.values.get(RATE) and not row.disturbed]


def _where_the_time_went(row: Row, other: Row, ratio: float) -> Explanation:
    """The parts add up to the extra time but for what no span holds.

    Exposed communication lies within forward, backward and optimizer, so it is taken out of them.
    Which of the three held it is not recorded: the optimizer counts only with that growth which the
    growth of the communication cannot be.
    """
    unexplained = Explanation(kind="slower", row=row, other=other, size=ratio)
    samples = samples_per_step(other)
    own_repeats, others = ({trial.repeat for trial in each.ok_trials} for each in (row, other))
    # Those of both, so that what disturbed both cancels; all where there is no common one.
    repeats = own_repeats & others or own_repeats | others
    times = [None if samples is None else step_time(r, samples, repeats) for r in (row, other)]
    known = [time for time in times if time is not None and None not in time.spans.values()]
    if len(known) < 2:
        return unexplained
    own, base = known
    if own.at_rate is None or base.at_rate is None or own.at_rate <= base.at_rate:
        return unexplained
    grown = {name: (own.spans[name] or 0.0) - (base.spans[name] or 0.0) for name in own.spans}
    extra = own.at_rate - base.at_rate
    exposed = 0.0
    if own.exposed is not None and base.exposed is not None:
        exposed = own.exposed - base.exposed
    optimizer = max(0.0, grown["optimizer"] - max(0.0, exposed))
    parts = {
        "waiting for data": grown["data"],
        "exposed communication": exposed,
        "the optimizer": optimizer,
        "computation": own.work - base.work - exposed - optimizer,
        "slow steps": extra - (own.median - base.median),
    }
    largest_first = dict(sorted(parts.items(), key=lambda item: -item[1]))
    return replace(unexplained, difference=extra, parts=largest_first)


def _memory(group: ComparableGroup) -> Iterator[Explanation]:
    """Rows that shard model state, and yet save little against one that holds all of it."""
    known = [
        row
        for row in group.candidates
        if row.world_size > 1 and all(row.metrics.get(n) for n in (*STATE, ACTIVATIONS, PEAK))
    ]
    for row in known:
        held = _least_held_share(row)
        wholes = [
            other
            for other in known
            if other.world_size == row.world_size
            and not other.differing(row)
            and _least_held_share(other) == 1
        ]
        if held == 1 or not wholes:
            continue
        whole = min(wholes, key=lambda other: (len(other.strategy_options), _value(other, PEAK)))
        ratio = times_better(row, whole, PEAK)
        most = 1 / (1 - HOPED_SHARE * (1 - held))
        if ratio is None or (ratio.high or ratio.value) >= most:
            continue
        saved = _value(whole, PEAK) - _value(row, PEAK)
        state = _state(whole) - _state(row)
        activations = _value(whole, ACTIVATIONS) - _value(row, ACTIVATIONS)
        yield Explanation(
            kind="little memory saved",
            row=row,
            other=whole,
            size=1 / ratio.value,
            difference=saved,
            parts={
                "model state": state,
                "activations and buffers": activations,
                "other memory": saved - state - activations,
            },
            facts={
                "peak_bytes": _value(whole, PEAK),
                "activation_share": _value(whole, ACTIVATIONS) / _value(whole, PEAK),
            },
        )


def _least_held_share(row: Row) -> float:
    """Of parameters, gradients or optimizer state, by the layout of the first rank that trains."""
    layout = row.trials[0].layout
    holds = layout.ranks[layout.training_ranks[0]].holds
    return min(holds.parameters, holds.gradients, holds.optimizer_state)


def _value(row: Row, name: str) -> float:
    estimate = row.metrics[name]
    assert estimate is not None, "the caller looked"
    return estimate.value


def _state(row: Row) -> float:
    return sum(_value(row, name) for name in STATE)


def _waits(group: ComparableGroup) -> Iterator[Explanation]:
    """Rows in which one rank communicates shown less than the rest: the rest waits for it.

    The rank that has the least exposed communication comes last.  All ranks could have been the
    one, so the error is shared among them.  Some rank is always last: one repeat shows nothing.
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
        if any(each.keys() != exposed[0].keys() for each in exposed):
            continue
        late = min(exposed[0], key=lambda rank: fmean(each[rank] for each in exposed))
        waits = [fmean(each[r] for r in each if r != late) - each[late] for each in exposed]
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
