"""Which rows differ from their baseline: one family of paired tests over the whole comparison."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shardmark.analysis.effects import Effect, holm, paired_effect
from shardmark.analysis.rows import Row

BASELINE = "baseline"
FASTER = "faster"
SLOWER = "slower"
NO_DIFFERENCE = "no difference shown"

FAMILY_ERROR_RATE = 0.05
"""Highest probability of one or more false `faster` or `slower` in the whole comparison."""
METRIC = "samples_per_second"


def judged(rows: Sequence[Row], baselines: Sequence[Row | None]) -> tuple[Row, ...]:
    """The rows with verdict and effect beside their baselines, None where there is none.

    A row whose baseline has the same place is the baseline itself.
    """
    effects = [
        None if _same(row, base) else effect_between(row, base)
        for row, base in zip(rows, baselines, strict=True)
    ]
    corrected = iter(holm([effect for effect in effects if effect is not None]))
    found = [None if effect is None else next(corrected) for effect in effects]
    return tuple(
        replace(row, effect=effect, verdict=BASELINE if _same(row, base) else _verdict(effect))
        for row, base, effect in zip(rows, baselines, found, strict=True)
    )


def effect_between(row: Row, base: Row | None) -> Effect | None:
    """Of the throughput, over the repeats that both have; None for fewer than two of them."""
    repeats = () if base is None else common_repeats(row, base, METRIC)
    if base is None or len(repeats) < 2:
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


def _verdict(effect: Effect | None) -> str | None:
    if effect is None:
        return None
    if effect.p_corrected > FAMILY_ERROR_RATE:
        return NO_DIFFERENCE
    return FASTER if effect.ratio.value > 1 else SLOWER
