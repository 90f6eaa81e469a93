"""Finds the range of an axis in which each strategy is predicted to be the best."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from functools import partial

from shardmark.base.ranking import Question, Ranking
from shardmark.base.statistics.intervals import Estimate
from shardmark.bench.analysis.advise.selection import QUESTIONS
from shardmark.predict.plan import MINIMISED, Prediction, ranking_of
from shardmark.predict.when.crossings import RANKS, Point, RangeLine, Rules, lines_along


def planned_lines(rows: Iterable[Prediction]) -> list[RangeLine]:
    """Return the lines of the strategies that fit."""
    rules = {
        metric: Rules(
            rank=partial(_ranking, question=question),
            times_better=partial(_times_better, question=question),
            combined=operator.add,  # an error of the prediction may be that of both
        )
        for metric, question in QUESTIONS.items()
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


def _ranking(rows: Sequence[Prediction], question: Question) -> Ranking[Prediction]:
    best, *rivals = sorted(rows, key=MINIMISED[question])
    return ranking_of(question, best, rivals)


def _times_better(row: Prediction, other: Prediction, question: Question) -> Estimate:
    value = MINIMISED[question](other) / MINIMISED[question](row)
    factor = 1 + row.error_fraction(question)
    return Estimate(value=value, low=value / factor, high=value * factor, n=1)
