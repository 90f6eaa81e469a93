"""Finds the range of an axis in which each strategy is best, and where two strategies cross."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Generic, TypeVar

from shardmark.base.ranking import Ranking
from shardmark.base.statistics.intervals import Estimate
from shardmark.bench.analysis.compare.rows import Row, plain
from shardmark.predict.plan import Prediction

PARAMETERS = "parameters"
RANKS = "world_size"

Result = TypeVar("Result", Row, Prediction)


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """The value of an axis at which two strategies are equal, with its interval."""

    value: float
    low: float | None
    """None if the interval extends below the value of the axis before the crossing."""
    high: float | None
    """None if the interval extends above the value of the axis after the crossing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BestRange:
    """Consecutive values of an axis at which a strategy is best, or all if it is nowhere best."""

    strategy: str
    """The strategy with its options."""
    best_at: tuple[float, ...]
    """Values of the axis; empty if another strategy is better at all of them."""
    begins: Crossing | None
    """Crossing with the previous best strategy; None at the first value, or without a value of
    both strategies on both sides."""
    ahead: tuple[float, float] | None
    """Smallest and largest ratio to the next best strategy; below 1 if it is nowhere best.  None
    if no other strategy has a value."""
    rival: str | None
    """The next best strategy where the ratio is smallest; for one that is nowhere best, the best
    strategy where it is closest."""
    shown: bool
    """True if the strategy is significantly better than all others at each of the values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeLine:
    """Results that differ in strategy and in one axis only, and the best ones along the axis."""

    axis: str
    metric: str
    conditions: Mapping[str, str]
    """Values of the other axes that vary."""
    rows: Mapping[str, Mapping[float, Any]]
    """Results by strategy and value of the axis."""
    ranges: tuple[BestRange, ...]
    """Ranges in the order of the axis; then strategies that are nowhere best."""

    @property
    def values(self) -> list[float]:
        return sorted({value for by_value in self.rows.values() for value in by_value})


@dataclass(frozen=True, slots=True, kw_only=True)
class Point(Generic[Result]):
    """A measured or predicted result, and the conditions that must be equal to compare it."""

    result: Result
    conditions: Mapping[str, object]
    """Values by their keys; the number of ranks by `RANKS`."""
    task: Collection[str]
    """Keys of the conditions that choose the model or its data."""
    parameters: float | None
    ranks: Collection[int]
    """Numbers of ranks with whose results it is compared along other axes."""

    def value_on(self, axis: str) -> float | None:
        """Return the value on an axis, or None if it is not a number."""
        value = self.parameters if axis == PARAMETERS else self.conditions.get(axis)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return float(value) if is_number else None  # type: ignore[arg-type]  # a number

    def other_conditions(self, axis: str, ranks: int) -> tuple[tuple[str, str], ...]:
        left_out = (axis, *(self.task if axis == PARAMETERS else ()))
        return tuple(
            ("ranks" if key == RANKS else key, plain(value))
            for key, value in {**self.conditions, RANKS: ranks}.items()
            if key not in left_out
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules(Generic[Result]):
    """The way to compare results by one metric."""

    rank: Callable[[Sequence[Result]], Ranking[Result] | None]
    times_better: Callable[[Result, Result], Estimate | None]
    combined: Callable[[float, float], float]
    """Combines the half widths of two ratios: `math.hypot` if their errors are independent."""


def lines_along(
    points: Sequence[Point[Result]], rules: Mapping[str, Rules[Result]]
) -> list[RangeLine]:
    """Return a line for each axis, each combination of the other conditions, and each metric."""
    lines = []
    for axis in _axes(points):
        contexts: dict[tuple[tuple[str, str], ...], dict[str, dict[float, Result]]] = {}
        for point in points:
            value = point.value_on(axis)
            if value is None:
                continue
            for ranks in point.ranks:
                rows = contexts.setdefault(point.other_conditions(axis, ranks), {})
                rows.setdefault(point.result.label, {}).setdefault(value, point.result)
        shared = set.intersection(*map(set, contexts))
        lines += [
            RangeLine(
                axis=axis,
                metric=metric,
                conditions={key: value for key, value in context if (key, value) not in shared},
                rows=rows,
                ranges=ranges,
            )
            for context, rows in contexts.items()
            for metric, of_metric in rules.items()
            if (ranges := _best_ranges(rows, of_metric))
        ]
    return lines


def _axes(points: Sequence[Point[Any]]) -> list[str]:
    """Return the axes with two or more numbers; the size of the model if the task varies."""
    keys = dict.fromkeys(key for point in points for key in point.conditions)
    tasks = {plain({key: point.conditions[key] for key in point.task}) for point in points}
    axes = [*keys, *([PARAMETERS] if len(tasks) > 1 else [])]
    return [axis for axis in axes if len({point.value_on(axis) for point in points} - {None}) > 1]


def _best_ranges(
    rows: Mapping[str, Mapping[float, Result]], rules: Rules[Result]
) -> tuple[BestRange, ...]:
    """Return the ranges of a line; empty if nothing can be compared."""
    best: dict[float, str] = {}
    shown: dict[float, bool] = {}
    for value in sorted({value for by_value in rows.values() for value in by_value}):
        ranking = rules.rank([by_value[value] for by_value in rows.values() if value in by_value])
        if ranking is not None and ranking.reason != "disturbed":
            shown[value] = ranking.decided
            previous = next(reversed(best.values()), None)
            # A lead ends where another strategy is shown to be better.
            is_close = any(row.label == previous for row in ranking.close)
            best[value] = previous if previous and is_close else ranking.row.label
    if min(len(best), len(rows), max(map(len, rows.values()))) < 2:
        return ()

    def ratios(strategy: str, value: float, others: Collection[str]) -> list[tuple[float, str]]:
        estimates = {
            other: rules.times_better(rows[strategy][value], rows[other][value])
            for other in others
            if other != strategy and value in rows[other]
        }
        return [(ratio.value, other) for other, ratio in estimates.items() if ratio is not None]

    ranges: list[BestRange] = []
    for strategy, group in groupby(best, key=best.__getitem__):
        best_at = tuple(group)
        leads = [min(several) for value in best_at if (several := ratios(strategy, value, rows))]
        begins = None
        if ranges:
            ends = ranges[-1].best_at[-1], best_at[0]
            begins = _crossing(rows[best[ends[0]]], rows[strategy], ends, rules)
        ranges.append(_range(strategy, best_at, leads, begins, all(shown[at] for at in best_at)))
    for strategy in (strategy for strategy in rows if strategy not in best.values()):
        compared = rows[strategy].keys() & best.keys()
        leads = [ratio for value in compared for ratio in ratios(strategy, value, [best[value]])]
        if leads:
            ranges.append(_range(strategy, (), leads))
    return tuple(ranges)


def _range(
    strategy: str,
    best_at: tuple[float, ...],
    leads: Sequence[tuple[float, str]],
    begins: Crossing | None = None,
    shown: bool = False,
) -> BestRange:
    nearest = (min if best_at else max)(leads, default=None)
    return BestRange(
        strategy=strategy,
        best_at=best_at,
        begins=begins,
        ahead=nearest and (min(leads)[0], max(leads)[0]),
        rival=nearest and nearest[1],
        shown=shown,
    )


def _crossing(
    before: Mapping[float, Result],
    after: Mapping[float, Result],
    ends: tuple[float, float],
    rules: Rules[Result],
) -> Crossing | None:
    """Return where the log ratio of two strategies, linear between two values, is zero.

    The axis is logarithmic if its values are positive.  The interval is to first order.
    """
    if any(value not in rows for value in ends for rows in (before, after)):
        return None
    ratios = [rules.times_better(after[value], before[value]) for value in ends]
    logs = [math.log(ratio.value) for ratio in ratios if ratio is not None and ratio.value > 0]
    if len(logs) < 2 or logs[0] * logs[1] > 0 or logs[0] == logs[1]:
        return None
    zero = logs[0] / (logs[0] - logs[1])
    widths = [math.log(r.high / r.value) if r is not None and r.high else math.inf for r in ratios]
    width = rules.combined((1 - zero) * widths[0], zero * widths[1]) / abs(logs[1] - logs[0])

    def at(part: float) -> float:
        start, end = ends
        return start * (end / start) ** part if start > 0 else start + part * (end - start)

    # Without an interval at one end, the width is infinite or not a number, and all are None.
    low, high = zero - width, zero + width
    return Crossing(
        value=at(zero), low=at(low) if low > 0 else None, high=at(high) if high < 1 else None
    )
