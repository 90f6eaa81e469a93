"""A table as a pandas frame."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardmark.report.export.tables import Column, Table

if TYPE_CHECKING:
    import pandas as pd


def frame_of(table: Table) -> pd.DataFrame:
    """Columns in base units; `attrs["units"]` has each column's unit.

    A number that is missing is NaN; a missing integer, truth value or text is pandas' NA, so that
    whole numbers stay whole.
    """
    import pandas as pd

    columns = {
        column.name: pd.Series(list(column.values), dtype=_dtype(column))
        for column in table.columns
    }
    frame = pd.DataFrame(columns)
    frame.attrs["units"] = {column.name: column.unit for column in table.columns if column.unit}
    return frame


def _dtype(column: Column) -> str:
    missing = any(value is None for value in column.values)
    if column.kind == "integer":
        return "Int64" if missing else "int64"
    if column.kind == "boolean":
        return "boolean" if missing else "bool"
    return "float64" if column.kind == "number" else "string"
