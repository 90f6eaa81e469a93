"""Why a place that the user named cannot be written."""

from __future__ import annotations

from pathlib import Path

from shardmark.core.errors import InputError


def unwritable(where: str, error: OSError, allowed: str = "name another --out") -> InputError:
    """What to raise for the error; `where` is the folder or file, or a URI.

    A file that stands where a folder is needed is named: the system's own words do not say which.
    """
    found = f"cannot be written: {error.strerror or error}"
    if isinstance(error, FileExistsError | NotADirectoryError):
        path = Path(where).expanduser()
        file = next((one for one in (path, *path.parents) if one.is_file()), None)
        found = f"cannot be written: {file} is a file" if file is not None else found
    return InputError(where, found, allowed)
