"""Reads text as documents: Python's own source, or the user's files.  Imports no torch."""

from __future__ import annotations

import gzip
import json
import os
import re
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardmark.base.errors import DataError
from shardmark.ranks.workloads.language.options import EMBEDDED

if TYPE_CHECKING:
    from shardmark.ranks.workloads.language.options import LanguageOptions

VALIDATED = 10
"""Without a split by name each tenth document validates; of fewer, the last tenth of the text."""

_LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"} | {
    *("encodings", "idlelib", "pydoc_data", "turtledemo")  # tables, programs, prose
}
_TRAINING = re.compile(r"train(ing)?([-_.].*)?", re.IGNORECASE)
_VALIDATION = re.compile(r"(val|valid|validation|dev|test)([-_.].*)?", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """Files of documents, in a fixed order."""

    files: Mapping[Path, bool | None]
    """File or folder -> true for validation, false for training, None to split its documents."""
    read: Callable[[Path], Iterator[bytes]]
    """Reads the documents of a file, UTF-8."""

    def documents(self) -> Iterator[tuple[bytes, bool]]:
        """Yield each document, and true if it validates; `DataError` for unreadable files."""
        total_bytes = self._bytes_if_few()
        if total_bytes is not None:
            yield from _split_by_bytes(map(itemgetter(0), self._read()), total_bytes)
            return
        for number, (document, validates) in enumerate(self._read(), start=1):
            yield document, number % VALIDATED == 0 if validates is None else validates

    def _read(self) -> Iterator[tuple[bytes, bool | None]]:
        for file, validates in self.files.items():
            try:
                for document in self.read(file):
                    yield document, validates
            except (OSError, EOFError, zlib.error) as error:
                raise unreadable(file, error) from error

    def _bytes_if_few(self) -> int | None:
        """Size of all documents if there are too few for one of them to validate, else None."""
        sizes: list[int] = []
        for document, validates in self._read():
            sizes.append(len(document))
            if validates is not None or len(sizes) == VALIDATED:
                return None
        return sum(sizes)


def _split_by_bytes(documents: Iterable[bytes], total: int) -> Iterator[tuple[bytes, bool]]:
    """Split documents so that the last tenth of the bytes validates, between two characters."""
    cut = total - total // VALIDATED
    for document in documents:
        inside = min(max(cut, 0), len(document))
        while 0 < inside < len(document) and document[inside] & 0xC0 == 0x80:
            inside -= 1
        for piece, validates in ((document[:inside], False), (document[inside:], True)):
            if piece:
                yield piece, validates
        cut -= len(document)


def corpus_of(options: LanguageOptions) -> Corpus:
    """Find the files of the data set; raises `DataError` if they are missing."""
    if options.dataset in EMBEDDED:
        files = _python_files(_library_folder(options.dataset))
        return Corpus(files=dict.fromkeys(files), read=_file)
    folder = options.folder
    if not folder.is_dir():
        raise options.no_folder("set it to an existing folder")
    endings, read = _READERS[options.dataset]
    files = files_below(folder, *endings) if endings else _arrow_folders(folder)
    by_name = _by_name(folder, files)
    if not by_name:
        remedy = "add files of that format, or change workload.data_dir"
        raise DataError(str(folder), f"has no files of the format {options.dataset}", remedy)
    column = options.column
    return Corpus(files=by_name, read=lambda file: read(file, column))


def _by_name(folder: Path, files: Iterable[Path]) -> dict[Path, bool | None]:
    """Split files by name if some, but not all, are named as validation; else leave it open."""
    splits = {file: is_validation(folder, file) for file in files}
    if True in splits.values() and set(splits.values()) != {True}:
        return {file: validates or False for file, validates in splits.items()}
    return dict.fromkeys(splits)


def is_validation(folder: Path, file: Path) -> bool | None:
    """True if the file is named as validation, False for training, None for neither.

    Considers the name of the file and of the first folder on its path.
    """
    parts = file.relative_to(folder).parts
    names = {*parts[:1], *parts[-1:]}
    if any(map(_VALIDATION.fullmatch, names)):
        return True
    return False if any(map(_TRAINING.fullmatch, names)) else None


def _library_folder(dataset: str) -> Path:
    if dataset == "stdlib":
        return Path(sysconfig.get_path("stdlib"))
    spec = find_spec("torch")
    assert spec is not None, "torch is installed with Shardmark"
    assert spec.origin is not None
    return Path(spec.origin).parent


def _python_files(folder: Path) -> Iterator[Path]:
    """Python files below the folder, without tests and installed packages."""
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(set(folders) - _LEFT_OUT)
        yield from (Path(parent) / name for name in sorted(names) if name.endswith(".py"))


def files_below(folder: Path, *suffixes: str) -> Iterator[Path]:
    """Files with these endings, without hidden ones, ordered by name."""
    for parent, folders, names in os.walk(folder, followlinks=True):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            if not name.startswith(".") and name.endswith(suffixes):
                yield Path(parent) / name


def _file(file: Path, column: str = "") -> Iterator[bytes]:  # noqa: ARG001  (one signature)
    yield file.read_bytes()


def _lines(file: Path, column: str) -> Iterator[bytes]:
    with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                yield _utf8(json.loads(line)[column])
            except (ValueError, KeyError, TypeError) as error:
                raise DataError(
                    f"{file}:{number}",
                    f"has no JSON object with a string under {column!r} ({error})",
                    "correct the line, or set workload.column",
                ) from None


def _parquet(file: Path, column: str) -> Iterator[bytes]:
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(file) as opened:
            for batch in opened.iter_batches(columns=[column]):
                yield from _texts(file, batch, column)
    except ArrowException as error:
        raise unreadable(file, error) from error


def _arrow_folders(folder: Path) -> Iterator[Path]:
    """Folders of the library `datasets`: the folder itself, or its subfolders, one per split."""
    if (folder / "state.json").is_file():
        yield folder
    else:
        yield from (file.parent for file in sorted(folder.glob("*/state.json")))


def _arrow(folder: Path, column: str) -> Iterator[bytes]:
    """Read a folder that `Dataset.save_to_disk` wrote: Arrow streams and an order of their rows."""
    from pyarrow import ArrowException, concat_tables, ipc, memory_map

    def table(names: Sequence[dict[str, str]]) -> Any:
        paths = [folder / entry["filename"] for entry in names]
        return concat_tables([ipc.open_stream(memory_map(str(path))).read_all() for path in paths])

    try:
        state = json.loads((folder / "state.json").read_bytes())
        rows = table(state["_data_files"])
        if state.get("_indices_data_files"):
            order = table(state["_indices_data_files"])["indices"]
            tables = [rows.take(order.slice(at, 1000)) for at in range(0, len(order), 1000)]
        else:
            tables = [rows]
        for chosen in tables:
            for batch in chosen.to_batches(max_chunksize=1000):
                yield from _texts(folder, batch, column)
    except (ArrowException, KeyError, TypeError, ValueError) as error:
        raise unreadable(folder, error) from error


def _texts(file: Path, batch: Any, column: str) -> Iterator[bytes]:
    if column not in batch.schema.names:
        problem = f"has no column {column!r}, but {', '.join(batch.schema.names)}"
        raise DataError(str(file), problem, "set workload.column")
    for value in batch.column(column).to_pylist():
        if not isinstance(value, str):
            problem = f"{column!r} has a {type(value).__name__} in place of text"
            raise DataError(str(file), problem, "set workload.column")
        yield _utf8(value)


def _utf8(text: str) -> bytes:
    if not isinstance(text, str):
        raise TypeError(f"a {type(text).__name__}")
    return text.encode(errors="replace")


def unreadable(place: Path, error: Exception) -> DataError:
    reason = getattr(error, "strerror", None) or error
    return DataError(str(place), f"cannot be read ({reason})", "correct or remove it")


_READERS: dict[str, tuple[tuple[str, ...], Callable[[Path, str], Iterator[bytes]]]] = {
    "text": (("",), _file),
    "jsonl": ((".jsonl", ".jsonl.gz"), _lines),
    "parquet": ((".parquet",), _parquet),
    "arrow": ((), _arrow),
}
"""Endings of the files of each data set, and the function that reads a file."""
