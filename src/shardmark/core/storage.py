"""What a disk says when it takes no more, as an error with a remedy."""

from __future__ import annotations

import errno
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shardmark.core.errors import FULL, StorageError

AWAY = {
    **dict.fromkeys((errno.EACCES, errno.EPERM), "get the right to write there"),
    **dict.fromkeys((errno.ENOTCONN, errno.ETIMEDOUT), "see to that disk"),
}
"""What sockets and others say, too: it is the disk where a file of the run is concerned."""
REMEDIES = FULL | AWAY
GONE = {errno.ENOENT: "something removed it meanwhile: run the same command again"}


@contextmanager
def storing(folder: Path) -> Iterator[None]:
    """Raise `StorageError` where a disk, or a right below the folder, is in the way."""
    try:
        yield
    except OSError as error:
        inside = error.filename is not None and _is_below(error.filename, folder)
        if error.errno in FULL or (error.errno in AWAY | GONE and inside):
            raise storage_error(Path(error.filename or folder), error, "used") from error
        raise


def _is_below(name: object, folder: Path) -> bool:
    absolute = Path(str(name)).absolute()
    return absolute.is_relative_to(folder.absolute())


def storage_error(path: Path, error: OSError, what: str = "written") -> StorageError:
    """What to raise where nothing can be written; a file where a folder is needed is named."""
    blocked = error.errno in (errno.ENOTDIR, errno.EEXIST)
    places = (path, *path.parents) if blocked else ()
    file = next((place for place in places if place.is_file()), None)
    reason = error.strerror or str(error) if file is None else f"{file} is a file"
    remedy = (REMEDIES | GONE).get(error.errno or 0)
    other = "name another --out"
    allowed = other if remedy is None else f"{remedy}, or {other}"
    return StorageError(str(path), f"cannot be {what}: {reason}", allowed)


def temporary_folder() -> Path:
    """Where temporary files go.  Raises `StorageError` where they can go nowhere."""
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError as error:
        remedy = "make room there, or set TMPDIR to a folder with room"
        raise StorageError("TMPDIR", error.strerror or str(error), remedy) from None
