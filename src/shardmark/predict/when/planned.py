"""Finds the range of an axis in which each strategy is predicted to be the best."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from functools import partial

from shardmark.base.statistics.intervals import Estimate
from shardmark.bench.analysis.compare.verdicts import METRIC
from shardmark.predict.plan import COSTS, Prediction, Question
from shardmark.predict.when.crossings import RANKS, Point, RangeLine, Rules, lines_along


def planned_lines(rows: Iterable[Prediction]) -> list[RangeLine]:
    """Return the lines of the strategies that fit."""
    questions: dict[str, Question] = {METRIC: "fastest", "peak_memory_bytes": "memory"}
    rules = {
        metric: Rules(
            best=partial(_best, question=question),
            times_better=partial(_times_better, question=question),
            combined=operator.add,  # an error of the prediction may be that of both
        )
        for metric, question in questions.items()
    }
    points = [
        Point(
            result=row,
            conditions={"machines": row.on, RANKS: row.ranks, **row.varied},
            task=row.task.keys(),
            parameters=row.parameters,
            ranks=[row.ranks],
        )
        for row in rows
        if row.fits and row.time is not None
    ]
    return lines_along(points, rules)


def _best(
    rows: Sequence[Prediction], question: Question
) -> tuple[Prediction, Sequence[Prediction], bool]:
    """Return the best row; rows within the error of its prediction may be as good."""
    first, *rivals = sorted(rows, key=COSTS[question])
    error = first.error_fraction(question)
    close = [row for row in rivals if _times_better(first, row, question).value <= 1 + error]
    return first, close, not close


def _times_better(row: Prediction, other: Prediction, question: Question) -> Estimate:
    value = COSTS[question](other) / COSTS[question](row)
    factor = 1 + row.error_fraction(question)
    return Estimate(value=value, low=value / factor, high=value * factor, n=1)
