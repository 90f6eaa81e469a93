"""Tables of the strategy that is best in each range of an axis."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple

from shardmark.base.cells import title_of
from shardmark.base.ranking import Question, Ranking
from shardmark.base.statistics.intervals import Estimate
from shardmark.base.table.table import (
    Column,
    Columns,
    Table,
    abbreviated,
    for_programs,
    number,
    table_of,
)
from shardmark.bench.analysis.advise.groups import groups_of
from shardmark.bench.analysis.advise.selection import QUESTIONS, select, times_better
from shardmark.bench.analysis.compare.comparison import Comparison
from shardmark.bench.analysis.compare.rows import Row
from shardmark.bench.analysis.compare.verdicts import METRIC
from shardmark.predict.plan import MINIMISED, Plan, Prediction, ranking_of
from shardmark.predict.when.crossings import (
    PARAMETERS,
    RANKS,
    BestRange,
    Point,
    RangeLine,
    Rules,
    lines_along,
)


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


def measured_lines(rows: Sequence[Row]) -> list[RangeLine]:
    """Return the lines of rows that may win: of an equivalent training with a finite loss.

    A strategy that ran on one rank only is compared with each number of ranks of the others.
    """
    candidates = [row for group in groups_of(rows) for row in group.candidates]
    distributed = {row.label for row in candidates if row.world_size > 1}
    sizes = sorted({row.world_size for row in candidates if row.label in distributed})
    rules = {
        metric: Rules(
            rank=partial(select, metric=metric),
            times_better=partial(times_better, metric=metric),
            combined=math.hypot,
        )
        for metric in QUESTIONS
    }
    points = [
        _point(row, [row.world_size] if row.label in distributed or not sizes else sizes)
        for row in candidates
    ]
    return lines_along(points, rules)


def _point(row: Row, ranks: Sequence[int]) -> Point[Row]:
    task = [key for key in row.varied if key.startswith("workload.")]
    workload = {} if task else {"workload": row.workload}
    fixed = {"experiment": row.experiment, **workload, "precision": row.precision}
    size = row.metrics.get(PARAMETERS)
    return Point(
        result=row,
        conditions={**fixed, RANKS: row.world_size, **row.varied},
        task=task or list(workload),
        parameters=None if size is None else size.value,
        ranks=ranks,
    )


TITLES = {METRIC: "Throughput", "peak_memory_bytes": "Peak memory"}
_AHEAD = (
    "Ahead by: the difference to the next best strategy, smallest to largest; below zero if the"
    " strategy is nowhere best. Shown: all others are {worse} everywhere."
)
_MEASURED = (
    "From: where the strategy crosses the one before it, interpolated between measured values, with"
    " a 95 % interval. `..` at an end: it reaches beyond the measured value.",
    _AHEAD.format(worse="significantly worse"),
)
_PLANNED = (
    "Planned: predicted for strategies that fit, nothing was measured. From: where the strategy"
    " crosses the one before it, interpolated, with the range in which the error of the prediction"
    " may move it. `..` at an end: it reaches beyond the planned value.",
    _AHEAD.format(worse="worse by more than the error of the prediction"),
)


class _Line(NamedTuple):
    line: RangeLine
    part: BestRange


def axis_title(axis: str) -> str:
    """Return the short name of an axis, such as `ranks`."""
    return "ranks" if axis == "world_size" else title_of(axis).rpartition(".")[2]


def axis_value(axis: str, value: float) -> str:
    """Format a value of an axis; numbers of parameters as 1.3 B."""
    if axis == PARAMETERS:
        return abbreviated(value, gap=" ")
    return f"{value:.0f}" if round(value, 9).is_integer() else number(value)


def when_tables(comparison: Comparison, _: str = "") -> list[Table]:
    """Return a table for each axis and metric, with a row for each range and strategy."""
    return _tables(measured_lines(comparison.rows), "{metric} over {axis}", _MEASURED)


def planned_tables(plan: Plan) -> list[Table]:
    """Return the same tables from the predictions of a plan."""
    planned = f"Planned {{metric}} over {{axis}}, on {plan.on}"
    return _tables(planned_lines(plan.rows), planned, (*_PLANNED, *plan.doubts))


def _tables(lines: Sequence[RangeLine], title: str, notes: Sequence[str]) -> list[Table]:
    tables: dict[tuple[str, str], list[_Line]] = {}
    for line in lines:
        items = tables.setdefault((line.axis, line.metric), [])
        items += [_Line(line, part) for part in line.ranges]
    if not tables:
        note = (
            "No axis has two numbers at which two strategies can be compared. Vary, for example,"
            " world_size, recipe.global_batch or the model."
        )
        return [Table(title="Best strategy along an axis", notes=(note,))]
    titles = (
        title.format(metric=TITLES[metric].lower(), axis=axis_title(axis))
        for axis, metric in tables
    )
    return [
        table_of(text[0].upper() + text[1:], items, _columns(items), notes)
        for text, items in zip(titles, tables.values(), strict=True)
    ]


def _columns(items: Sequence[_Line]) -> Columns[_Line]:
    keys = dict.fromkeys(key for item in items for key in item.line.conditions)
    text = partial(Column, numeric=False)
    return [
        *(
            (
                text(key, title_of(key).rpartition(".")[2], names_row=True),
                lambda item, key=key: item.line.conditions.get(key),
            )
            for key in keys
        ),
        (text("strategy", names_row=True), lambda item: item.part.strategy),
        (text("best_at", "best at"), _best_at),
        (text("begins", "from"), _begins),
        *(
            (
                for_programs(f"begins_{end}"),
                lambda item, end=end: item.part.begins and getattr(item.part.begins, end),
            )
            for end in ("value", "low", "high")
        ),
        (text("ahead", "ahead by"), _ahead),
        (text("rival", "of"), lambda item: item.part.rival),
        (text("shown"), lambda item: item.part.shown if item.part.best_at else None),
        (for_programs("axis"), lambda item: item.line.axis),
        (for_programs("metric"), lambda item: item.line.metric),
    ]


def _best_at(item: _Line) -> str:
    at = [axis_value(item.line.axis, value) for value in item.part.best_at]
    return "nowhere" if not at else at[0] if len(at) == 1 else f"{at[0]} to {at[-1]}"


def _begins(item: _Line) -> str | None:
    """Return the crossing with its interval, or the two values between which there is one."""
    crossing, line = item.part.begins, item.line
    if crossing is not None:
        ends = [crossing.low, crossing.high]
        low, high = (".." if end is None else axis_value(line.axis, end) for end in ends)
        return f"{axis_value(line.axis, crossing.value)} ({low} to {high})"
    place = line.ranges.index(item.part)
    if place == 0 or not item.part.best_at:
        return None
    values = line.ranges[place - 1].best_at[-1], item.part.best_at[0]
    return "between {} and {}".format(*(axis_value(line.axis, value) for value in values))


def _ahead(item: _Line) -> str | None:
    if item.part.ahead is None:
        return "alone" if item.part.best_at else None
    low, high = (f"{100 * (ratio - 1):.0f}" for ratio in item.part.ahead)
    return f"{low} %" if low == high else f"{low} to {high} %"
