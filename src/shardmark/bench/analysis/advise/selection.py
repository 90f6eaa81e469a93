"""Chooses the best of several rows, and says which others may be the best as well."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from shardmark.base.metrics import METRICS
from shardmark.base.statistics.effects import Effect, holm, pairwise_effects
from shardmark.base.statistics.intervals import Estimate, estimate_mean
from shardmark.bench.analysis.compare.comparison import ratio_between
from shardmark.bench.analysis.compare.rows import Row
from shardmark.bench.analysis.compare.verdicts import METRIC, is_different, verdict_between

State = Literal["shown", "tie", "not shown", "alone", "disturbed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The outcome of one competition."""

    best: Row
    """The row with the best mean, which is the winner only if `state` is `shown`."""
    state: State
    """`shown`: better than every row that can be judged.  `tie`: `ties` may be as good.
    `not shown`: repeats are too few for any test.  `alone`: nobody competed.
    `disturbed`: other work disturbed some row's times, and nothing is decided."""
    ties: tuple[Row, ...]
    """Rows that are not shown to be worse by an amount that matters, the better ones first."""
    values: tuple[tuple[Row, float], ...]
    """Every competitor's mean, the best first."""

    @property
    def decided(self) -> bool:
        return self.state in ("shown", "alone")

    @property
    def rival(self) -> Row | None:
        """The best row of another strategy, else the second row."""
        others = [row for row, _ in self.values[1:]]
        foreign = [row for row in others if row.label != self.best.label]
        return next(iter(foreign or others), None)

    def value_of(self, row: Row) -> float:
        return next(value for other, value in self.values if other is row)


def select(rows: Sequence[Row], metric: str) -> Selection | None:
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
    means = [(row, estimate_mean(list(row.values[metric].values())).value) for row in measured]
    means.sort(key=lambda pair: sign * pair[1])
    ordered = [row for row, _ in means]
    effects = pairwise_effects([row.values[metric] for row in ordered])
    left = [at for at in range(1, len(ordered)) if not _is_out(ordered, effects, at, metric, sign)]
    ties = tuple(ordered[at] for at in left if (0, at) in effects)
    state: State = "not shown"
    if metric == METRIC and any(row.disturbed for row in measured):
        state = "disturbed"
    elif len(ordered) == 1:
        state = "alone"
    elif ties:
        state = "tie"
    elif not left:
        state = "shown"
    return Selection(best=ordered[0], state=state, ties=ties, values=tuple(means))


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
