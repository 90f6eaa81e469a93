"""Which rows differ from their baseline: one family of moderated tests over the comparison."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter

from shardmark.analysis.compare.rows import Row
from shardmark.analysis.statistics.effects import Effect, holm, paired_effect, with_one_row

BASELINE = "baseline"
FASTER = "faster"
SLOWER = "slower"
TIE = "tie"
"""A difference that is shown, and too small to matter."""
NO_DIFFERENCE = "no difference shown"
NOT_DECIDED = "not decided"
"""Other work disturbed one of the two."""

FAMILY_ERROR_RATE = 0.05
"""Highest probability of one or more false `faster` or `slower` in the whole comparison."""
LEAST_GAIN = 0.02
"""A smaller relative difference of speed or memory is a tie, however well it is shown."""
METRIC = "samples_per_second"


def with_verdicts(rows: Sequence[Row], baselines: Sequence[Row | None]) -> tuple[Row, ...]:
    """The rows with verdict and effect beside their baselines, None where there is none.

    All are one family; the noise is shared by those with the same baseline.  A row whose baseline
    has the same place is the baseline itself.
    """
    effects: dict[int, Effect] = {}
    by_baseline: dict[int, list[int]] = {}
    for place, (row, base) in enumerate(zip(rows, baselines, strict=True)):
        effect = None if base is None or _same(row, base) else _effect_between(row, base)
        if effect is not None:
            effects[place] = effect
            by_baseline.setdefault(id(base), []).append(place)
    for places in by_baseline.values():
        shared = with_one_row([effects[place] for place in places])
        effects |= zip(places, shared, strict=True)
    effects = dict(zip(effects, holm(list(effects.values())), strict=True))
    return tuple(
        replace(row, effect=effects.get(place), verdict=_verdict(row, base, effects.get(place)))
        for place, (row, base) in enumerate(zip(rows, baselines, strict=True))
    )


def _effect_between(row: Row, base: Row) -> Effect | None:
    """Of the throughput, over the repeats that both have.

    None for fewer than two of them, and where other work disturbed one of the two.
    """
    if row.disturbed or base.disturbed:
        return None
    repeats = common_repeats(row, base, METRIC)
    return paired_effect(
        [row.values[METRIC][repeat] for repeat in repeats],
        [base.values[METRIC][repeat] for repeat in repeats],
    )


def common_repeats(row: Row, other: Row, metric: str) -> tuple[int, ...]:
    """Repeats in which both have a value."""
    above, below = row.values.get(metric, {}), other.values.get(metric, {})
    return tuple(sorted(above.keys() & below.keys()))


def _same(row: Row, base: Row) -> bool:
    """Two runs of one experiment have rows of equal place."""
    key = attrgetter("experiment", "workload", "precision", "place")
    return bool(key(row) == key(base))


def verdict_between(row: Row, other: Row) -> Effect | None:
    """The effect on which the row's verdict rests, where the other is its baseline."""
    is_baseline = other.verdict == BASELINE and row.baseline == other.place
    return row.effect if is_baseline and row is not other else None


def is_shown(effect: Effect) -> bool:
    """Whether there is any difference, however small."""
    return effect.p_corrected <= FAMILY_ERROR_RATE


def is_different(effect: Effect) -> bool:
    """Whether a difference that matters is shown: the one rule for verdicts and selections."""
    return is_shown(effect) and abs(math.log(effect.ratio.value)) >= math.log1p(LEAST_GAIN)


def _verdict(row: Row, base: Row | None, effect: Effect | None) -> str | None:
    if base is not None and _same(row, base):
        return BASELINE
    if base is not None and (row.disturbed or base.disturbed):
        return NOT_DECIDED
    if effect is None:
        return None
    if not is_different(effect):
        return TIE if is_shown(effect) else NO_DIFFERENCE
    return FASTER if effect.ratio.value > 1 else SLOWER
