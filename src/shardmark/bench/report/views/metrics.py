"""Table of all metrics: a line for each metric, a column for each row of the comparison."""

from __future__ import annotations

from shardmark.base.metrics import METRICS
from shardmark.base.table.table import Column, Columns, Table, metric, table_of
from shardmark.bench.analysis.compare.comparison import Comparison


def metrics_tables(comparison: Comparison) -> list[Table]:
    """Return one table of all metrics that a row has, in the order of the catalogue."""
    rows = comparison.rows
    names = dict.fromkeys((*METRICS, *(name for row in rows for name in row.metrics)))
    shown = [name for name in names if any(row.metrics.get(name) is not None for row in rows)]
    absent = [name for name in names if name not in shown]
    # Each metric is a table of one column, which has the unit that fits the metric's values.
    fitted = {name: table_of("", rows, [metric(name, interval="±")]) for name in shown}
    cells = {name: table.cells(name) for name, table in fitted.items()}
    columns: Columns[str] = [
        (Column("metric", numeric=False, names_row=True), str),
        (Column("unit", numeric=False, names_row=True), lambda name: fitted[name].columns[0].unit),
        *(
            (Column(f"row_{at}", row.place), lambda name, at=at: cells[name][at])
            for at, row in enumerate(rows)
        ),
    ]
    notes = ["`shardmark list metrics` has definitions, `compare --format csv` has base units."]
    if absent:
        notes.append(f"Without a value in all rows: {', '.join(absent)}.")
    return [table_of("All metrics", shown, columns, notes)]
