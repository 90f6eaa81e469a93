"""Tables as CSV or Parquet files: the trials in one file, or every table in a folder."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shardmark.core.errors import InputError
from shardmark.core.version import __version__
from shardmark.report.export.source import Exported, Source, require
from shardmark.report.export.tables import TABLES, frame_of
from shardmark.report.table.formats import csv_cell
from shardmark.results.files import write_files

if TYPE_CHECKING:
    import pandas as pd


def export_csv(sources: Sequence[Source], out: str | None) -> Exported:
    """Every table of the runs, in base units; what is missing is an empty cell."""
    return _write(sources, Path(out or "exports/csv").expanduser(), ".csv", _csv)


def export_parquet(sources: Sequence[Source], out: str | None) -> Exported:
    """Typed columns, each with its unit in the field's metadata."""
    require("parquet", "pyarrow", "pyarrow")
    return _write(sources, Path(out or "exports/parquet").expanduser(), ".parquet", _parquet)


def _csv(frame: pd.DataFrame) -> bytes:
    cells = frame.astype(object).where(frame.notna(), None).map(csv_cell)
    return bytes(
        cells.to_csv(
            index=False, lineterminator="\n", header=[csv_cell(str(name)) for name in cells]
        ).encode()
    )


def _parquet(frame: pd.DataFrame) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.Table.from_pandas(frame, preserve_index=False)
    units = frame.attrs["units"]
    fields = [
        field.with_metadata({"unit": units[field.name]} if field.name in units else {})
        for field in table.schema
    ]
    schema = pa.schema(fields, metadata={"shardmark_version": __version__})
    sink = io.BytesIO()
    pq.write_table(table.cast(schema), sink, compression="zstd")
    return sink.getvalue()


def _write(
    sources: Sequence[Source], out: Path, suffix: str, encode: Callable[[pd.DataFrame], bytes]
) -> Exported:
    """`out` with the suffix is the table of trials alone; otherwise a folder with all tables.

    Files of the same names are replaced whole: they then hold these runs and nothing else.
    """
    single = out.suffix.lower() == suffix
    if (single and out.is_dir()) or (not single and out.is_file()):
        kind = "folder" if single else "file"
        allowed = f"name a folder, or a file that ends in {suffix}"
        raise InputError(str(out), f"is a {kind}", allowed)
    encoded = {
        out if single else out / f"{name}{suffix}": encode(frame_of(sources, by))
        for by, name in TABLES.items()
        if by == "trial" or not single
    }
    write_files(encoded)
    return Exported(
        where=str(out),
        trials=sum(len(source.trials) for source in sources),
        look=f'pandas.read_{suffix[1:]}("{next(iter(encoded))}")',
    )
