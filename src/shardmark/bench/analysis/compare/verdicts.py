"""Verdicts on rows relative to their baseline, from one family of moderated tests."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import attrgetter
from statistics import fmean

from shardmark.base.metrics import METRICS
from shardmark.base.statistics.effects import (
    Difference,
    Effect,
    PairedTest,
    Tested,
    holm,
    paired_difference,
    paired_effect,
    with_shared_noise,
)
from shardmark.bench.analysis.compare.rows import Row, main_quality

BASELINE = "baseline"
FASTER = "faster"
SLOWER = "slower"
TIE = "tie"
"""A significant difference that is too small to matter."""
NO_DIFFERENCE = "no difference shown"
BETTER = "better"
WORSE = "worse"
NOT_DECIDED = "not decided"
"""Other work disturbed the row or its baseline."""

FAMILY_ERROR_RATE = 0.05
"""Maximum probability of one or more false `faster` or `slower` in a comparison."""
MIN_GAIN = 0.02
"""Smaller relative differences of speed or memory are ties, even if they are significant."""
MIN_QUALITY_GAIN = 0.001
"""Smaller relative differences of a quality are ties, such as those that rounding makes."""
METRIC = "samples_per_second"


def with_verdicts(rows: Sequence[Row], baselines: Sequence[Row | None]) -> tuple[Row, ...]:
    """Return the rows with verdicts and effects relative to their baselines."""
    effects = _tested(rows, baselines, _effect_between)
    return tuple(
        replace(row, effect=effects.get(place), verdict=_verdict(row, base, effects.get(place)))
        for place, (row, base) in enumerate(zip(rows, baselines, strict=True))
    )


def with_quality_verdicts(rows: Sequence[Row], baselines: Sequence[Row | None]) -> tuple[Row, ...]:
    """Return the rows with verdicts on their main quality, over seeds that both rows have.

    The test is that of the throughput on differences in place of log ratios.  Rows of a single
    seed have no verdict.
    """
    differences = _tested(rows, baselines, _difference_between)
    return tuple(
        replace(
            row, quality_difference=difference, quality_verdict=_quality_verdict(row, difference)
        )
        if (difference := differences.get(place)) is not None
        else row
        for place, row in enumerate(rows)
    )


def _tested(
    rows: Sequence[Row], baselines: Sequence[Row | None], test: Callable[[Row, Row], Tested | None]
) -> dict[int, Tested]:
    """Return the tests of the rows against their baselines, by the number of the row.

    All tests are one family; the noise is moderated over rows with the same baseline.  A row of
    the same place as its baseline is the baseline itself.
    """
    tests: dict[int, Tested] = {}
    by_baseline: dict[int, list[int]] = {}
    for place, (row, base) in enumerate(zip(rows, baselines, strict=True)):
        tested = None if base is None or _same(row, base) else test(row, base)
        if tested is not None:
            tests[place] = tested
            by_baseline.setdefault(id(base), []).append(place)
    for places in by_baseline.values():
        shared = with_shared_noise([tests[place] for place in places])
        tests |= zip(places, shared, strict=True)
    return dict(zip(tests, holm(list(tests.values())), strict=True))


def quality_of(row: Row) -> str | None:
    """Return the row's main quality: the first of the user's task, else the common one."""
    if row.synthetic:
        return None
    user_defined = [name for name in row.values if name not in METRICS and row.better(name)]
    return next(iter(user_defined), main_quality([row]))


def _quality_verdict(row: Row, difference: Difference) -> str:
    metric = quality_of(row)
    if not is_shown(difference) or metric is None:
        return NO_DIFFERENCE
    if abs(difference.estimate.value) < MIN_QUALITY_GAIN * abs(fmean(row.values[metric].values())):
        return TIE
    gains = (difference.estimate.value > 0) == (row.better(metric) == "higher")
    return BETTER if gains else WORSE


def _effect_between(row: Row, base: Row) -> Effect | None:
    """Return the effect on the throughput over common repeats.

    None for fewer than two common repeats, and if one of the rows was disturbed.
    """
    if row.disturbed or base.disturbed:
        return None
    return paired_effect(*_paired(row, base, METRIC))


def _difference_between(row: Row, base: Row) -> Difference | None:
    """Return the difference of the main quality over common repeats; None for a single seed."""
    metric = quality_of(row)
    if metric is None or min(row.seeds, base.seeds) < 2:
        return None
    return paired_difference(*_paired(row, base, metric))


def _paired(row: Row, base: Row, metric: str) -> tuple[list[float], list[float]]:
    """Return the values of both rows in their common repeats."""
    repeats = common_repeats(row, base, metric)
    above, below = row.values.get(metric, {}), base.values.get(metric, {})
    return [above[repeat] for repeat in repeats], [below[repeat] for repeat in repeats]


def common_repeats(row: Row, other: Row, metric: str) -> tuple[int, ...]:
    """Return the repeats in which both rows have a value."""
    above, below = row.values.get(metric, {}), other.values.get(metric, {})
    return tuple(sorted(above.keys() & below.keys()))


def _same(row: Row, base: Row) -> bool:
    """Return whether two rows are the same row of the same experiment."""
    key = attrgetter("experiment", "workload", "precision", "place")
    return bool(key(row) == key(base))


def verdict_between(row: Row, other: Row) -> Effect | None:
    """Return the effect on which the row's verdict is based, if the other is its baseline."""
    is_baseline = other.verdict == BASELINE and row.baseline == other.place
    return row.effect if is_baseline and row is not other else None


def is_shown(effect: PairedTest) -> bool:
    """Return whether the difference is significant."""
    return effect.p_corrected <= FAMILY_ERROR_RATE


def is_different(effect: Effect) -> bool:
    """Return whether the difference is significant and large enough to matter."""
    return is_shown(effect) and abs(math.log(effect.ratio.value)) >= math.log1p(MIN_GAIN)


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
