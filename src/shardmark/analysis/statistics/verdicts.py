"""Which rows differ from their baseline: one family of moderated tests over the comparison."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

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


def judged(rows: Sequence[Row], baselines: Sequence[Row | None]) -> tuple[Row, ...]:
    """The rows with verdict and effect beside their baselines, None where there is none.

    A row whose baseline has the same place is the baseline itself.
    """
    effects = [
        None if _same(row, base) else effect_between(row, base)
        for row, base in zip(rows, baselines, strict=True)
    ]
    corrected = _corrected(effects, baselines)
    return tuple(
        replace(row, effect=effect, verdict=_verdict(row, base, effect))
        for row, base, effect in zip(rows, baselines, corrected, strict=True)
    )


def _corrected(
    effects: Sequence[Effect | None], baselines: Sequence[Row | None]
) -> list[Effect | None]:
    """All of them are one family; the noise is shared by those with the same baseline."""
    by_baseline: dict[int, dict[int, Effect]] = {}
    for index, (effect, base) in enumerate(zip(effects, baselines, strict=True)):
        if effect is not None:
            by_baseline.setdefault(id(base), {})[index] = effect
    places = [index for group in by_baseline.values() for index in group]
    moderated = [
        effect for group in by_baseline.values() for effect in with_one_row(list(group.values()))
    ]
    corrected = dict(zip(places, holm(moderated), strict=True))
    return [corrected.get(index) for index in range(len(effects))]


def effect_between(row: Row, base: Row | None) -> Effect | None:
    """Of the throughput, over the repeats that both have.

    None for fewer than two of them, and where other work disturbed one of the two.
    """
    if base is None or row.disturbed or base.disturbed:
        return None
    repeats = common_repeats(row, base, METRIC)
    if len(repeats) < 2:
        return None
    return paired_effect(
        [row.values[METRIC][repeat] for repeat in repeats],
        [base.values[METRIC][repeat] for repeat in repeats],
    )


def common_repeats(row: Row, other: Row, metric: str) -> tuple[int, ...]:
    """Repeats in which both have a value."""
    above, below = row.values.get(metric, {}), other.values.get(metric, {})
    return tuple(sorted(above.keys() & below.keys()))


def _same(row: Row, base: Row | None) -> bool:
    """Two runs of one experiment have rows of equal place."""
    return base is not None and (row.experiment, row.workload, row.precision, row.place) == (
        base.experiment,
        base.workload,
        base.precision,
        base.place,
    )


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
    if _same(row, base):
        return BASELINE
    if base is not None and (row.disturbed or base.disturbed):
        return NOT_DECIDED
    if effect is None:
        return None
    if not is_different(effect):
        return TIE if is_shown(effect) else NO_DIFFERENCE
    return FASTER if effect.ratio.value > 1 else SLOWER
