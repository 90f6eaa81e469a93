"""Tables as Parquet files: typed columns, each with its unit in the field's metadata."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shardmark.core.version import __version__
from shardmark.report.export._protocol import Exported, Source, require
from shardmark.report.export.files import write_tables
from shardmark.report.export.tables import Table

if TYPE_CHECKING:
    import pyarrow as pa

USUAL_PLACE = "exports/parquet"


def export_parquet(sources: Sequence[Source], out: str | None) -> Exported:
    """`trials.parquet`, `epochs.parquet`, `steps.parquet` and `samples.parquet`."""
    require("parquet", "pyarrow", "parquet")
    path = Path(out or USUAL_PLACE).expanduser()
    return write_tables(sources, path, ".parquet", _encode, 'pandas.read_parquet("{}")')


def _encode(table: Table) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = pa.BufferOutputStream()
    pq.write_table(arrow_table(table), sink, compression="zstd")
    return bytes(sink.getvalue())


def arrow_table(table: Table) -> pa.Table:
    """The table in Arrow's types; what is missing is null."""
    import pyarrow as pa

    types = {
        "text": pa.string(),
        "integer": pa.int64(),
        "number": pa.float64(),
        "boolean": pa.bool_(),
    }
    schema = pa.schema(
        [
            pa.field(
                column.name,
                types[column.kind],
                metadata={"unit": column.unit} if column.unit else None,
            )
            for column in table.columns
        ],
        metadata={"shardmark_version": __version__, "table": table.name},
    )
    arrays = [pa.array(column.values, type=types[column.kind]) for column in table.columns]
    return pa.Table.from_arrays(arrays, schema=schema)
