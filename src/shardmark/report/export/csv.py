"""Tables as CSV files: the columns of the Parquet files, units left out."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path

from shardmark.report.export._protocol import Exported, Source
from shardmark.report.export.files import write_tables
from shardmark.report.export.tables import Table

USUAL_PLACE = "exports/csv"


def export_csv(sources: Sequence[Source], out: str | None) -> Exported:
    """Every table of the runs, in base units; what is missing is an empty cell."""
    path = Path(out or USUAL_PLACE).expanduser()
    return write_tables(sources, path, ".csv", _encode, 'pandas.read_csv("{}")')


def _encode(table: Table) -> bytes:
    output = io.StringIO()
    writer = csv.writer(output, lineterminator="\n")
    writer.writerow([column.name for column in table.columns])
    cells = ([_cell(value) for value in column.values] for column in table.columns)
    writer.writerows(zip(*cells, strict=True))
    return output.getvalue().encode()


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    return repr(value) if isinstance(value, float) else str(value)
