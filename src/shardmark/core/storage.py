"""What a disk says when it takes no more, as an error with a remedy."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shardmark.core.errors import StorageError

FULL = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "make room on that disk"),
    **dict.fromkeys((errno.EIO, errno.EROFS), "see to that disk"),
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "raise the limit of open files (ulimit -n)"),
}
"""What is wrong with a disk or the machine, and what to do."""
DENIED = dict.fromkeys((errno.EACCES, errno.EPERM), "get the right to write there")


@contextmanager
def storing(folder: Path) -> Iterator[None]:
    """Raise `StorageError` where a disk, or a right below the folder, is in the way."""
    try:
        yield
    except OSError as error:
        inside = error.filename is not None and Path(error.filename).is_relative_to(folder)
        if error.errno in FULL or (error.errno in DENIED and inside):
            raise storage_error(Path(error.filename or folder), error, "used") from error
        raise


def storage_error(path: Path, error: OSError, what: str = "written") -> StorageError:
    """What to raise where nothing can be written; a file where a folder is needed is named."""
    blocked = error.errno in (errno.ENOTDIR, errno.EEXIST)
    places = (path, *path.parents) if blocked else ()
    file = next((place for place in places if place.is_file()), None)
    reason = error.strerror or str(error) if file is None else f"{file} is a file"
    remedy = (FULL | DENIED).get(error.errno or 0)
    other = "name another --out"
    allowed = other if remedy is None else f"{remedy}, or {other}"
    return StorageError(str(path), f"cannot be {what}: {reason}", allowed)
