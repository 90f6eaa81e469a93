"""Chooses the best of several rows, and says which others may be the best as well."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from shardmark.base.metrics import METRICS
from shardmark.base.ranking import Question, Ranking, Reason
from shardmark.base.statistics.effects import Effect, holm, pairwise_effects
from shardmark.base.statistics.intervals import Estimate, estimate_mean
from shardmark.bench.analysis.compare.comparison import ratio_between
from shardmark.bench.analysis.compare.rows import Row
from shardmark.bench.analysis.compare.verdicts import (
    METRIC,
    MIN_GAIN,
    is_different,
    verdict_between,
)

QUESTIONS: Mapping[str, Question] = {METRIC: "fastest", "peak_memory_bytes": "memory"}
"""The question that a metric answers."""


def select(rows: Sequence[Row], metric: str) -> Ranking[Row] | None:
    """Select the row with the best mean and those that may be as good; None if none has a value.

    A row is excluded if another row is significantly better, by the test of the verdicts with the
    row as the baseline of all others.  Existing verdicts are used as they are.

    The remaining rows contain the truly best one with 95 % confidence, although the best was
    selected from the data: only the k - 1 comparisons with the truly best row can exclude it.
    Source: Gupta, Technometrics 7 (1965), 225-245, here with Holm's procedure.
    """
    measured = [row for row in rows if row.values.get(metric)]
    if not measured:
        return None
    sign = -1 if METRICS[metric].better == "higher" else 1
    means = {id(row): mean_of(row, metric) for row in measured}
    ordered = sorted(measured, key=lambda row: sign * means[id(row)])
    best, *rivals = ordered
    effects = pairwise_effects([row.values[metric] for row in ordered])
    left = [at for at in range(1, len(ordered)) if not _is_out(ordered, effects, at, metric, sign)]
    close = tuple(ordered[at] for at in left if (0, at) in effects)
    reason: Reason = "not shown"
    if metric == METRIC and any(row.disturbed for row in measured):
        reason = "disturbed"
    elif not rivals:
        reason = "alone"
    elif close:
        ratios = (means[id(row)] / means[id(best)] for row in close)
        is_tie = all(abs(ratio - 1) <= MIN_GAIN for ratio in ratios)
        reason = "tie" if is_tie else "not distinguishable"
    elif not left:
        reason = "shown"
    return Ranking(
        question=QUESTIONS[metric], row=best, rivals=tuple(rivals), close=close, reason=reason
    )


def mean_of(row: Row, metric: str) -> float:
    """Return the mean of a metric over the row's repeats."""
    return estimate_mean(list(row.values[metric].values())).value


def rival_of(ranking: Ranking[Row]) -> Row | None:
    """Return the best row that is not too close to tell, of another strategy if there is one."""
    rest = [row for row in ranking.rivals if row not in ranking.close]
    return next((row for row in rest if row.label != ranking.row.label), next(iter(rest), None))


def times_better(row: Row, other: Row, metric: str) -> Estimate | None:
    """Return how many times better the first row is: 2 is twice the throughput, half the memory."""
    higher = METRICS[metric].better == "higher"
    return ratio_between(row, other, metric) if higher else ratio_between(other, row, metric)


def _is_out(
    rows: Sequence[Row],
    effects: Mapping[tuple[int, int], Effect],
    place: int,
    metric: str,
    sign: int,
) -> bool:
    """Return whether a row with a better mean is significantly better."""
    pairs = [pair for pair in effects if place in pair]
    corrected = holm([effects[pair] for pair in pairs])
    return any(
        sign * math.log(effect.ratio.value) < 0
        and is_different(_verdict(rows, pair, metric) or effect)
        for pair, effect in zip(pairs, corrected, strict=True)
        if pair[1] == place
    )


def _verdict(rows: Sequence[Row], pair: tuple[int, int], metric: str) -> Effect | None:
    """Return the effect on which a verdict is based, if one row is the other's baseline."""
    if metric != METRIC:
        return None
    better, worse = (rows[place] for place in pair)
    return verdict_between(better, worse) or verdict_between(worse, better)
