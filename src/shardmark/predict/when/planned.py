"""Finds the range of an axis in which each strategy is predicted to be the best."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from shardmark.bench.analysis.compare.rows import plain
from shardmark.bench.analysis.compare.verdicts import METRIC
from shardmark.predict.plan import COSTS, Prediction, Question
from shardmark.predict.when.crossings import (
    COMPARED,
    PARAMETERS,
    RANKS,
    Crossing,
    RangeLine,
    best_ranges,
    interpolated,
)


def planned_lines(rows: Iterable[Prediction]) -> list[RangeLine]:
    """Return a line for each axis, each combination of the other axes, and each metric.

    Only strategies that fit are in a line.
    """
    fitting = [row for row in rows if row.fits and row.time is not None]
    lines = []
    for axis in _axes(fitting):
        contexts: dict[tuple[tuple[str, str], ...], dict[str, dict[float, Prediction]]] = {}
        for row in fitting:
            if (value := _value_on(axis, row)) is not None:
                context = tuple(_context(row, axis).items())
                contexts.setdefault(context, {}).setdefault(row.label, {})[value] = row
        shared = set.intersection(*map(set, contexts)) if len(contexts) > 1 else set(*contexts)
        lines += [
            RangeLine(
                axis=axis,
                metric=metric,
                conditions={key: value for key, value in context if (key, value) not in shared},
                ranges=ranges,
            )
            for context, by_strategy in contexts.items()
            for metric in COMPARED
            if (ranges := best_ranges(by_strategy, _Planned(_QUESTIONS[metric])))
        ]
    return lines


_QUESTIONS: Mapping[str, Question] = {METRIC: "fastest", "peak_memory_bytes": "memory"}


def _value_on(axis: str, row: Prediction) -> float | None:
    value = {RANKS: row.ranks, PARAMETERS: row.parameters}.get(axis, row.varied.get(axis))
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number else None  # type: ignore[arg-type]  # a number


def _axes(rows: Sequence[Prediction]) -> list[str]:
    keys = dict.fromkeys((RANKS, *(key for row in rows for key in row.varied)))
    several_tasks = len({plain(row.task) for row in rows}) > 1
    axes = [*keys, *([PARAMETERS] if several_tasks else [])]
    return [axis for axis in axes if len({_value_on(axis, row) for row in rows} - {None}) > 1]


def _context(row: Prediction, axis: str) -> dict[str, str]:
    """Return the row's conditions on all other axes."""
    same_task = () if axis == PARAMETERS else row.task
    conditions = {
        "machines": row.on,
        "ranks": None if axis == RANKS else row.ranks,
        **{
            k: v
            for k, v in row.varied.items()
            if k != axis and (k in same_task or k not in row.task)
        },
    }
    return {key: plain(value) for key, value in conditions.items() if value is not None}


@dataclass(frozen=True, slots=True)
class _Planned:
    """Judges predictions by their cost; differences within the error decide nothing."""

    question: Question

    def select(
        self, rows: Sequence[Prediction], previous: str | None
    ) -> tuple[Prediction, bool] | None:
        first, *rivals = sorted(rows, key=COSTS[self.question])
        close = [row for row in rivals if self._log_ratio(first, row) <= self._error(first)]
        stays = [row for row in close if row.label == previous]
        return (stays[0] if stays else first), not close

    def times_better(self, row: Prediction, other: Prediction) -> float | None:
        return math.exp(self._log_ratio(row, other))

    def crossing(
        self,
        before: Mapping[float, Prediction],
        after: Mapping[float, Prediction],
        between: tuple[float, float],
    ) -> Crossing | None:
        """Return where the interpolated log ratio is zero, and where it is within the error."""
        left, right = (self._log_ratio(after[value], before[value]) for value in between)
        if left * right > 0 or left == right:
            return None
        zero = left / (left - right)
        width = max(self._error(after[value]) for value in between) / abs(right - left)
        low, high = zero - width, zero + width
        return Crossing(
            value=interpolated(between, zero),
            low=interpolated(between, low) if low > 0 else None,
            high=interpolated(between, high) if high < 1 else None,
        )

    def _log_ratio(self, row: Prediction, other: Prediction) -> float:
        cost = COSTS[self.question]
        return math.log(cost(other) / cost(row))

    def _error(self, row: Prediction) -> float:
        return math.log1p(row.error_fraction(self.question))
