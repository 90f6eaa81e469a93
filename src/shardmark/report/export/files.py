"""Where the tables of `csv` and `parquet` go: one file, or one a table in a folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from shardmark.core.errors import InputError
from shardmark.report.export._protocol import Exported, Source
from shardmark.report.export.places import unwritable
from shardmark.report.export.tables import TABLES, Table, table_of
from shardmark.results.files import write_whole

FILE_SUFFIXES = (".csv", ".tsv", ".parquet", ".pq")
"""Whoever ends a name so means a file of that kind."""


def write_tables(
    sources: Sequence[Source],
    out: Path,
    suffix: str,
    encode: Callable[[Table], bytes],
    look: str,
) -> Exported:
    """`out` with the suffix is the table of trials alone; otherwise a folder with all tables.

    Files of the same names are replaced whole: they then hold these runs and nothing else.
    """
    single = _is_single(out, suffix)
    folder = out.parent if single else out
    encoded = {
        out if single else out / f"{name}{suffix}": encode(table_of(sources, by))
        for by, name in TABLES.items()
        if by == "trial" or not single
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, content in encoded.items():
            write_whole(path, content)
    except OSError as error:
        raise unwritable(str(out), error) from None
    return Exported(
        where=str(out),
        trials=sum(len(source.trials) for source in sources),
        look=look.format(next(iter(encoded))),
    )


def _is_single(out: Path, suffix: str) -> bool:
    """Whether it names one file.  Raises `InputError` where it cannot be what it is named."""
    ends = out.suffix.lower()
    if ends == suffix:
        if out.is_dir():
            remedy = f"name a new file, or one that ends in {suffix}"
            raise InputError(str(out), "is a folder", remedy)
        return True
    allowed = f"name a folder, or a file that ends in {suffix}"
    if ends in FILE_SUFFIXES:
        raise InputError(str(out), f"ends in {out.suffix}, and the tables are {suffix}", allowed)
    if out.exists() and not out.is_dir():
        raise InputError(str(out), "is a file", allowed)
    return False
