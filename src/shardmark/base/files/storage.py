"""Conversion of the operating system's storage errors to `StorageError` with a remedy."""

from __future__ import annotations

import errno
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shardmark.base.errors import FULL, StorageError

ACCESS_REMEDIES = {
    **dict.fromkeys((errno.EACCES, errno.EPERM), "get the right to write there"),
    **dict.fromkeys((errno.ENOTCONN, errno.ETIMEDOUT), "see to that disk"),
}
"""Remedies for error numbers that sockets also use: they apply only to files of the run."""
MISSING_REMEDIES = {errno.ENOENT: "something removed it meanwhile: run the same command again"}
REMEDIES = FULL | ACCESS_REMEDIES | MISSING_REMEDIES


@contextmanager
def storing(folder: Path) -> Iterator[None]:
    """Raise `StorageError` if a disk, or a missing permission in the folder, prevents access."""
    try:
        yield
    except OSError as error:
        name = None if error.filename is None else Path(str(error.filename)).absolute()
        inside = name is not None and name.is_relative_to(folder.absolute())
        if error.errno in FULL or (error.errno in REMEDIES and inside):
            raise storage_error(Path(error.filename or folder), error, "used") from error
        raise


def storage_error(path: Path, error: OSError, operation: str = "written") -> StorageError:
    """Return a `StorageError` for the path; it names a file that stands in a folder's place."""
    blocked = error.errno in (errno.ENOTDIR, errno.EEXIST)
    places = (path, *path.parents) if blocked else ()
    file = next((place for place in places if place.is_file()), None)
    reason = error.strerror or str(error) if file is None else f"{file} is a file"
    remedy = REMEDIES.get(error.errno or 0)
    alternative = "name another --out"
    allowed = alternative if remedy is None else f"{remedy}, or {alternative}"
    return StorageError(str(path), f"cannot be {operation}: {reason}", allowed)


def temporary_folder() -> Path:
    """Return the folder for temporary files.  Raises `StorageError` if none is writable."""
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError as error:
        remedy = "make room there, or set TMPDIR to a folder with room"
        raise StorageError("TMPDIR", error.strerror or str(error), remedy) from None
