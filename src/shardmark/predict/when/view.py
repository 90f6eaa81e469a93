"""Tables of the strategy that is best in each range of an axis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from shardmark.base.table.table import (
    Column,
    Table,
    Value,
    abbreviated,
    for_programs,
    number,
    table_of,
)
from shardmark.bench.analysis.compare.comparison import Comparison
from shardmark.bench.analysis.compare.verdicts import METRIC
from shardmark.experiment.axes import title_of
from shardmark.predict.plan import Plan
from shardmark.predict.when.crossings import (
    PARAMETERS,
    BestRange,
    Crossing,
    RangeLine,
    axis_lines,
)
from shardmark.predict.when.planned import planned_lines

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
    return f"{value:.0f}" if value.is_integer() else number(value)


def when_tables(comparison: Comparison, _: str = "") -> list[Table]:
    """Return a table for each axis and metric, with a row for each range and strategy."""
    return _tables(axis_lines(comparison.rows), "{metric} over {axis}", _MEASURED)


def planned_tables(plan: Plan) -> list[Table]:
    """Return the same tables from the predictions of a plan."""
    planned = f"Planned {{metric}} over {{axis}}, on {plan.on}"
    return _tables(planned_lines(plan.rows), planned, (*_PLANNED, *plan.doubts))


def _tables(lines: Sequence[RangeLine], title: str, notes: Sequence[str]) -> list[Table]:
    tables: dict[tuple[str, str], list[RangeLine]] = {}
    for line in lines:
        tables.setdefault((line.axis, line.metric), []).append(line)
    if not tables:
        note = (
            "No axis has two numbers at which two strategies can be compared. Vary, for example,"
            " world_size, recipe.global_batch or the model."
        )
        return [Table(title="Best strategy along an axis", notes=(note,))]
    return [
        _table(_title(title, metric, axis), same, notes) for (axis, metric), same in tables.items()
    ]


def _title(pattern: str, metric: str, axis: str) -> str:
    title = pattern.format(metric=TITLES[metric].lower(), axis=axis_title(axis))
    return title[0].upper() + title[1:]


def _table(title: str, lines: Sequence[RangeLine], notes: Sequence[str]) -> Table:
    keys = dict.fromkeys(key for line in lines for key in line.conditions)

    def condition(key: str) -> tuple[Column, Callable[[_Line], Value]]:
        column = Column(key, title_of(key).rpartition(".")[2], numeric=False, names_row=True)
        return column, lambda item: item.line.conditions.get(key)

    def text(key: str, title: str, *, names_row: bool = False) -> Column:
        return Column(key, title, numeric=False, names_row=names_row)

    def of_crossing(key: str) -> tuple[Column, Callable[[_Line], Value]]:
        column = for_programs(f"begins_{key}")
        return column, lambda item: item.part.begins and getattr(item.part.begins, key)

    return table_of(
        title,
        [_Line(line, part) for line in lines for part in line.ranges],
        [
            *map(condition, keys),
            (text("strategy", "strategy", names_row=True), lambda item: item.part.strategy),
            (text("best_at", "best at"), _best_at),
            (text("begins", "from"), _begins),
            *map(of_crossing, ("value", "low", "high")),
            (text("ahead", "ahead by"), _ahead),
            (text("rival", "of"), lambda item: item.part.rival),
            (text("shown", "shown"), lambda item: item.part.shown if item.part.best_at else None),
            (for_programs("axis"), lambda item: item.line.axis),
            (for_programs("metric"), lambda item: item.line.metric),
        ],
        notes,
    )


def _best_at(item: _Line) -> str:
    at = [axis_value(item.line.axis, value) for value in item.part.best_at]
    return "nowhere" if not at else at[0] if len(at) == 1 else f"{at[0]} to {at[-1]}"


def _begins(item: _Line) -> str | None:
    crossing, line = item.part.begins, item.line
    if crossing is not None:
        return crossing_text(line.axis, crossing)
    measured = [part for part in line.ranges if part.best_at]
    if item.part not in measured[1:]:
        return None
    before = measured[measured.index(item.part) - 1].best_at[-1]
    ends = (axis_value(line.axis, end) for end in (before, item.part.best_at[0]))
    return "between {} and {}".format(*ends)


def crossing_text(axis: str, crossing: Crossing) -> str:
    """Format a crossing with its interval, such as `1.3 B (1.1 B to 1.6 B)`."""
    low, high = (
        ".." if end is None else axis_value(axis, end) for end in (crossing.low, crossing.high)
    )
    return f"{axis_value(axis, crossing.value)} ({low} to {high})"


def _ahead(item: _Line) -> str | None:
    if item.part.ahead is None:
        return "alone" if item.part.best_at else None
    low, high = (f"{100 * (ratio - 1):.0f}" for ratio in item.part.ahead)
    return f"{low} %" if low == high else f"{low} to {high} %"
