"""Chooses the best of several rows, and says which others may be the best as well."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from shardmark.analysis.compare.rows import Row
from shardmark.analysis.statistics.effects import Effect, between_all, holm
from shardmark.analysis.statistics.intervals import (
    CONFIDENCE,
    Estimate,
    degrees_of,
    estimate_mean,
    t_quantile,
)
from shardmark.analysis.statistics.verdicts import METRIC, is_different, verdict_between

State = Literal["shown", "tie", "not shown", "alone"]
PairState = Literal["best", "worse", "tie", "no interval"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The outcome of one competition."""

    best: Row
    """With the best mean: a winner only where `state` is `shown`."""
    second: Row | None
    margin: Estimate | None
    """How many times better than the second, with the 95 % interval of this one ratio."""
    state: State
    """`shown`: it is better than every row that can be judged.  `tie`: `ties` may be as good.
    `not shown`: repeats are too few for any interval.  `alone`: nobody competed."""
    ties: tuple[Row, ...]
    """Rows whose difference from the best is not shown, the better ones first."""
    without_interval: tuple[Row, ...]
    """Rows that cannot be judged, since fewer than two repeats are common to them and the best."""
    values: tuple[tuple[Row, float], ...]
    """Every competitor's mean, the best first."""

    def state_of(self, row: Row) -> PairState:
        """How a competitor stands to the best."""
        if row is self.best:
            return "best"
        if any(row is other for other in self.without_interval):
            return "no interval"
        return "tie" if any(row is other for other in self.ties) else "worse"


def select(
    rows: Sequence[Row],
    values_of: Callable[[Row], Mapping[int, float]],
    advantage: Callable[[Row, Row], Estimate | None],
    *,
    lower_is_better: bool,
) -> Selection | None:
    """The row with the best mean, and those that may be as good; None where none has a value.

    `values_of` gives a row's positive values by repeat, `advantage(a, b)` how many times better `a`
    is than `b`, for the margin.  A row is out where a better one is shown to be better than it, by
    the test of the verdicts: as if the row were the baseline of all others.  What is a verdict
    already is not judged again.

    The rows that are not out then hold the truly best one with 95 % confidence, although the best
    was chosen by looking: of all comparisons, only the k - 1 with the truly best can leave it out.
    Source: Gupta, Technometrics 7 (1965), 225-245, here with Holm's procedure.
    """
    known = [(row, list(values_of(row).values())) for row in rows if values_of(row)]
    if not known:
        return None
    sign = 1 if lower_is_better else -1
    means = [(row, estimate_mean(values).value) for row, values in known]
    means.sort(key=lambda one: sign * one[1])
    ordered = [row for row, _ in means]
    contest = _Contest.of(ordered, [values_of(row) for row in ordered], sign=sign)
    left = [place for place in range(1, len(ordered)) if not contest.is_out(place)]
    ties = tuple(ordered[place] for place in left if (0, place) in contest.effects)
    unknown = tuple(ordered[place] for place in left if (0, place) not in contest.effects)
    second = ordered[1] if len(ordered) > 1 else None
    judged = any((0, place) in contest.effects for place in range(1, len(ordered)))
    ended: State = "tie" if ties else "shown" if judged else "not shown"
    return Selection(
        best=ordered[0],
        second=second,
        margin=None if second is None else advantage(ordered[0], second),
        state="alone" if second is None else ended,
        ties=ties,
        without_interval=unknown,
        values=tuple(means),
    )


@dataclass(frozen=True, slots=True)
class _Contest:
    """Rows in the order of their means, the best first."""

    rows: Sequence[Row]
    values: Sequence[Mapping[int, float]]
    effects: Mapping[tuple[int, int], Effect]
    """Of the better over the worse, by places; without the pairs that have no interval."""
    sign: int
    """1 where less is better, else -1."""

    @classmethod
    def of(
        cls, rows: Sequence[Row], values: Sequence[Mapping[int, float]], *, sign: int
    ) -> _Contest:
        return cls(rows, values, between_all(values), sign)

    def is_out(self, place: int) -> bool:
        """Whether some row before it is shown to be better."""
        pairs = [pair for pair in self.effects if place in pair]
        corrected = holm([self.effects[pair] for pair in pairs])
        return any(
            self.sign * math.log(effect.ratio.value) < 0
            and is_different(self._by_verdict(pair) or effect)
            for pair, effect in zip(pairs, corrected, strict=True)
            if pair[1] == place
        )

    def _by_verdict(self, pair: tuple[int, int]) -> Effect | None:
        """The effect on which a verdict rests, where one of the two is the other's baseline."""
        rows = [self.rows[place] for place in pair]
        if any(self.values[place] != self.rows[place].values.get(METRIC) for place in pair):
            return None
        return verdict_between(rows[0], rows[1]) or verdict_between(rows[1], rows[0])


def is_shown(ratio: Estimate | None, comparisons: int = 1) -> bool:
    """Whether the ratio is above 1, with the error of 5 % shared among so many comparisons."""
    if ratio is None or ratio.low is None or ratio.low <= 0:
        return False
    return _wider(comparisons, ratio.n) * math.log(ratio.value / ratio.low) < math.log(ratio.value)


def is_positive(mean: Estimate, comparisons: int = 1) -> bool:
    """Whether the mean is above 0, with the error of 5 % shared among so many comparisons."""
    if mean.low is None:
        return False
    return _wider(comparisons, mean.n) * (mean.value - mean.low) < mean.value


def _wider(comparisons: int, count: int) -> float:
    """How much longer the side of a 95 % interval grows where it stands for so many of them."""
    degrees = degrees_of(count)
    return _quantile(degrees, comparisons) / t_quantile(degrees)


def _quantile(degrees: int, comparisons: int) -> float:
    return t_quantile(degrees, 1 - (1 - CONFIDENCE) / 2 / comparisons)
