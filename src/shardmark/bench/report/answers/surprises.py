"""Explains surprises among comparable rows from what was recorded, with amounts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shardmark.base.cells import DEFAULT_BASELINE
from shardmark.base.statistics.effects import holm, pairwise_effects
from shardmark.base.text import counted, listed
from shardmark.bench.analysis.advise.groups import ComparableGroup, groups_of
from shardmark.bench.analysis.advise.selection import times_better
from shardmark.bench.analysis.compare.comparison import Comparison
from shardmark.bench.analysis.compare.rows import STATE_METRICS, Row, rate_of
from shardmark.bench.analysis.compare.step_time import MAY_LACK, mean_seconds, samples_per_step
from shardmark.bench.analysis.compare.verdicts import METRIC, is_different, verdict_between
from shardmark.bench.analysis.parts import NAMES
from shardmark.bench.report.answers.wording import name, percent, short, size

PEAK, ACTIVATIONS = "peak_memory_bytes", "activation_peak_bytes"
NOTEWORTHY = 0.05
"""A smaller relative difference needs no explanation."""
EXPECTED_SAVING = 0.5
"""Expected relative saving of peak memory, as a fraction of the state that sharding removes."""
LEAST_SHARE = 0.25
"""Smallest fraction of a difference that explains it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Surprise:
    """A difference between rows that matters and that the repeats show, and its explanation."""

    row: Row
    size: float
    """Relative difference."""
    text: str

    @property
    def order(self) -> tuple[bool, float]:
        """Order by size, strategies first that train the same: they are recommended."""
        return self.row.equivalent is None and self.row.guarantee is not None, -self.size


def why_lines(comparison: Comparison) -> list[str]:
    """Return the largest surprise of each kind, as question and answer."""
    groups = groups_of(comparison.rows)
    kinds = ([s for group in groups for s in of_kind(group)] for of_kind in (_slower, _memory))
    return [min(of_kind, key=lambda surprise: surprise.order).text for of_kind in kinds if of_kind]


def _slower(group: ComparableGroup) -> Iterator[Surprise]:
    """Yield rows that are slower than fewer ranks, or than the fastest row of the same size.

    All pairs of the group are one family, since the fastest was chosen by looking.
    """
    every = (*group.candidates, *group.by_design)
    rows = [row for row in every if row.values.get(METRIC) and not row.disturbed]
    effects = pairwise_effects([row.values[METRIC] for row in rows])
    corrected = dict(zip(effects, holm(list(effects.values())), strict=True))
    places = {id(row): place for place, row in enumerate(rows)}
    for row in rows:
        for other in _faster_rivals(row, rows, group.candidates):
            ratio = times_better(other, row, METRIC)
            pair = sorted((places[id(row)], places[id(other)]))
            effect = corrected.get((pair[0], pair[1]))
            verdict = verdict_between(row, other) or verdict_between(other, row) or effect
            if ratio is None or ratio.value <= 1 + NOTEWORTHY:
                continue
            if verdict is not None and is_different(verdict) and (answer := _time(row, other)):
                text = f"{_question(row, other)}  {answer}"
                yield Surprise(row=row, size=ratio.value, text=text)


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


def _question(row: Row, other: Row) -> str:
    if row.label == other.label:
        ranks = counted(row.world_size, "rank")
        return f"Why is {row.label} slower on {ranks} than on {other.world_size}?"
    same_size = row.world_size == other.world_size
    names = (name(either, with_ranks=not same_size) for either in (row, other))
    return f"Why is {' slower than '.join(names)}?"


def _time(row: Row, other: Row) -> str:
    """Name the parts in which a row's step is longer; empty if none explains it."""
    row_repeats, others = ({t.repeat for t in either.ok_trials} for either in (row, other))
    # Common repeats, so that common disturbances cancel; all repeats if there are none.
    repeats = row_repeats & others or row_repeats | others
    samples = samples_per_step(other)
    slow, base = (mean_seconds(either, samples, repeats) for either in (row, other))
    if not slow or not base:
        return ""
    unknown = [kind for kind in MAY_LACK if kind not in slow]
    grown = {kind: slow[kind] - base[kind] for kind in slow.keys() & base.keys()}
    extra = grown.pop("step")
    if extra <= 0 or unknown != [kind for kind in MAY_LACK if kind not in base]:
        return ""
    parts = {NAMES[kind]: seconds for kind, seconds in grown.items()}
    rest = listed([NAMES[kind] for kind in ("computing", *unknown)])
    parts[rest] = extra - sum(grown.values())
    most = max(parts.values())
    if most < LEAST_SHARE * extra:
        return ""
    # Which of two parts of like size is the largest, chance decides.
    main = sorted((part for part in parts if parts[part] >= most / 2), key=lambda p: -parts[p])
    more = {part: f"{short(1000 * parts[part])} ms more of {part}" for part in main}
    unhidden, metrics = NAMES["communication"], (row.metrics, other.metrics)
    calls, fewer = (values.get("collective_calls") for values in metrics)
    if unhidden in more and calls and fewer and calls.value > fewer.value > 0:
        more[unhidden] += f" ({short(calls.value)} collectives, not {short(fewer.value)})"
    return f"each step has {listed([*more.values()], most=4)}"


def _memory(group: ComparableGroup) -> Iterator[Surprise]:
    """Yield rows that shard model state and save little memory compared with a replicated row."""
    metrics = (*STATE_METRICS, ACTIVATIONS, PEAK)
    measured = [
        row
        for row in group.candidates
        if row.world_size > 1 and all(row.metrics.get(metric) for metric in metrics)
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
        if ratio is not None and (ratio.high or ratio.value) < most:
            yield Surprise(row=row, size=1 / ratio.value, text=_memory_text(row, full))


def _memory_text(row: Row, full: Row) -> str:
    """Say what fills the memory that is not saved."""
    saved = {metric: _value(full, metric) - _value(row, metric) for metric in (PEAK, ACTIVATIONS)}
    state = sum(_value(full, metric) - _value(row, metric) for metric in STATE_METRICS)
    label, other = (name(either, with_ranks=False) for either in (row, full))
    question = f"Why does {label} save no memory?"
    if saved[PEAK] > 0:
        share = percent(saved[PEAK] / _value(full, PEAK))
        question = f"Why does {label} save only {share} of memory?"
    grown = {
        "activations and buffers": -saved[ACTIVATIONS],
        "other memory": state + saved[ACTIVATIONS] - saved[PEAK],
    }
    part = max(grown, key=grown.__getitem__)
    if grown[part] <= LEAST_SHARE * state:
        activations = percent(_value(full, ACTIVATIONS) / _value(full, PEAK))
        return f"{question}  {activations} of {other}'s peak is activations"
    change = f"{size(abs(state))} {'less' if state > 0 else 'more'}" if state else "as much"
    more = f", {size(grown[part])} more {part}" if grown[part] > 0 else ""
    return f"{question}  {change} model state{more}"


def _least_state_fraction(row: Row) -> float:
    """Return the least fraction of parameters, gradients or optimizer state that a rank holds."""
    layout = row.trials[0].layout
    holds = layout.ranks[layout.training_ranks[0]].holds
    return min(holds.parameters, holds.gradients, holds.optimizer_state)


def _value(row: Row, metric: str) -> float:
    estimate = row.metrics[metric]
    assert estimate is not None, "checked by the caller"
    return estimate.value
