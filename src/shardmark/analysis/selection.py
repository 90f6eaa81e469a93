"""Chooses the best of several rows, and says which others may be the best as well."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from shardmark.analysis.rows import Row
from shardmark.analysis.statistics import (
    CONFIDENCE,
    ROBUST_FROM,
    Estimate,
    degrees_of,
    estimate_mean,
    t_quantile,
)

State = Literal["shown", "tie", "not shown", "alone"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The outcome of one competition."""

    best: Row
    """With the best mean: a winner only where `state` is `shown`."""
    second: Row | None
    margin: Estimate | None
    """How many times better than the second, with the 95 % interval of this one ratio."""
    state: State
    """`shown`: it is the best.  `tie`: `ties` may be as good.  `not shown`: repeats are too few for
    an interval.  `alone`: nobody competed."""
    ties: tuple[Row, ...]
    """Rows whose difference from the best is not shown, the better ones first."""
    values: tuple[tuple[Row, float], ...]
    """Every competitor's mean, the best first."""


def select(
    rows: Sequence[Row],
    values_of: Callable[[Row], Mapping[int, float]],
    advantage: Callable[[Row, Row], Estimate | None],
    *,
    lower_is_better: bool,
) -> Selection | None:
    """The row with the best mean, and those that may be as good; None where none has a value.

    `values_of` gives a row's positive values by repeat, `advantage(a, b)` how many times better `a`
    is than `b`.  A row is out only where the 95 % interval of a better one's advantage over it lies
    above 1, and still does with the error of 5 % shared among the k - 1 comparisons of k rows: by
    `Blocks`, or by wider intervals of the single ratios where those are robust.

    The rows that are not out then hold the truly best one with 95 % confidence, although the best
    was chosen by looking: of all comparisons, only the k - 1 with the truly best can leave it out.
    Source: Gupta, Technometrics 7 (1965), 225-245, here with Bonferroni's inequality.
    """
    known = [(row, list(values_of(row).values())) for row in rows if values_of(row)]
    if not known:
        return None
    sign = 1 if lower_is_better else -1
    means = [(row, estimate_mean(values).value) for row, values in known]
    means.sort(key=lambda one: sign * one[1])
    ordered = [row for row, _ in means]
    contest = _Contest(ordered, advantage, Blocks.of([values_of(row) for row in ordered]))
    ties = tuple(row for place, row in enumerate(ordered) if place and not contest.is_out(place))
    margins = [advantage(ordered[0], row) for row in ties]
    unknown = any(margin is None or margin.low is None for margin in margins)
    second = ordered[1] if len(ordered) > 1 else None
    ended: State = "shown" if not ties else "not shown" if unknown else "tie"
    return Selection(
        best=ordered[0],
        second=second,
        margin=None if second is None else advantage(ordered[0], second),
        state="alone" if second is None else ended,
        ties=ties,
        values=tuple(means),
    )


@dataclass(frozen=True, slots=True)
class _Contest:
    """Rows in the order of their means, the best first."""

    rows: Sequence[Row]
    advantage: Callable[[Row, Row], Estimate | None]
    blocks: Blocks | None

    def is_out(self, place: int) -> bool:
        """Whether some row before it is shown to be better."""
        return any(self._beats(better, place) for better in range(place))

    def _beats(self, one: int, other: int) -> bool:
        margin = self.advantage(self.rows[one], self.rows[other])
        if not is_shown(margin):
            return False
        if self.blocks is None or self.blocks.repeats >= ROBUST_FROM:
            return is_shown(margin, len(self.rows) - 1)
        return self.blocks.differ(one, other)


@dataclass(frozen=True, slots=True)
class Blocks:
    """Rows measured in the same repeats: each repeat is a block, whose mood all rows share.

    The logarithm of a value is the row's, plus the repeat's, plus noise of one spread for all rows;
    with k rows and n repeats the noise has (k - 1)(n - 1) degrees of freedom.
    Source: Montgomery, Design and Analysis of Experiments, 8th ed. (2012), section 4.1.
    """

    logarithms: tuple[tuple[float, ...], ...]
    """One tuple a row, in the order of the repeats."""

    @classmethod
    def of(cls, values: Sequence[Mapping[int, float]]) -> Blocks | None:
        """From values by repeat; None where fewer than two repeats are common to all rows."""
        repeats = sorted(set.intersection(*(set(by_repeat) for by_repeat in values)))
        if len(repeats) < 2 or any(one[repeat] <= 0 for one in values for repeat in repeats):
            return None
        return cls(tuple(tuple(math.log(one[repeat]) for repeat in repeats) for one in values))

    @property
    def repeats(self) -> int:
        return len(self.logarithms[0])

    def differ(self, first: int, second: int) -> bool:
        """Whether the two rows differ, with the error of 5 % shared among k - 1 comparisons."""
        rows, repeats = len(self.logarithms), self.repeats
        one, other = (fmean(self.logarithms[place]) for place in (first, second))
        quantile = _quantile((rows - 1) * (repeats - 1), rows - 1)
        return abs(one - other) > quantile * self._noise * math.sqrt(2 / repeats)

    @property
    def _noise(self) -> float:
        """Standard deviation of what neither the row nor the repeat explains."""
        table = self.logarithms
        rows = [fmean(row) for row in table]
        columns = [fmean(column) for column in zip(*table, strict=True)]
        middle = fmean(rows)
        squares = math.fsum(
            (value - mean - column + middle) ** 2
            for row, mean in zip(table, rows, strict=True)
            for value, column in zip(row, columns, strict=True)
        )
        return math.sqrt(squares / (len(rows) - 1) / (len(columns) - 1))


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
