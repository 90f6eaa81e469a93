"""Table of all metrics: a line for each metric, a column for each row of the comparison."""

from __future__ import annotations

from typing import NamedTuple

from shardmark.base.metrics import METRICS
from shardmark.base.table.table import Column, Table, metric, table_of
from shardmark.bench.analysis.compare.comparison import Comparison
from shardmark.bench.analysis.compare.rows import Row


class _Line(NamedTuple):
    name: str
    cells: tuple[str, ...]
    """Cells in the order of the rows."""


def metrics_tables(comparison: Comparison) -> list[Table]:
    """Return one table of all metrics that a row has, in the order of the catalogue."""
    rows = comparison.rows
    names = dict.fromkeys((*METRICS, *(name for row in rows for name in row.metrics)))
    shown = [name for name in names if any(row.metrics.get(name) is not None for row in rows)]
    absent = [name for name in names if name not in shown]
    # Each metric is a table of one column, which has the unit that fits the metric's values.
    fitted = {name: table_of("", rows, [metric(name, interval="±")]) for name in shown}
    lines = [_Line(name, fitted[name].cells(name)) for name in shown]

    def unit(line: _Line) -> str:
        return fitted[line.name].columns[0].unit

    def row_column(number: int, row: Row) -> Column:
        return Column(f"row_{number}", row.place, numeric=True)

    columns = [
        (Column("metric", "metric", numeric=False, names_row=True), lambda line: line.name),
        (Column("unit", "unit", numeric=False, names_row=True), unit),
        *(
            (row_column(number, row), lambda line, at=number: line.cells[at])
            for number, row in enumerate(rows)
        ),
    ]
    notes = ["`shardmark list metrics` has definitions, `compare --format csv` has base units."]
    if absent:
        notes.append(f"Without a value in all rows: {', '.join(absent)}.")
    return [table_of("All metrics", lines, columns, notes)]
