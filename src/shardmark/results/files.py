"""Writes a file whole or not at all, reads one as its model, and records what a file held."""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import stat
from collections.abc import Mapping
from contextlib import suppress
from io import BufferedReader
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from shardmark.core.errors import InputError
from shardmark.core.storage import storage_error
from shardmark.results.schema import SCHEMA_VERSION, FileRecord

MOST_BYTES = 2**26
"""No file of a run that is read as one is as large; a result of 1,000 ranks has a sixth of it."""
MAX_VALUES = 2_000_000
"""In one file: small ones take eighty times their room in memory."""
MOST_FAULTS = 10_000
"""Of one file, that are looked at."""
LASTING = {errno.EINVAL, errno.EFBIG, errno.ELOOP, errno.EISDIR, errno.ENOTDIR, errno.ENOENT}
"""What a file is, rather than why it cannot be read now."""
ModelT = TypeVar("ModelT", bound=BaseModel)


def write_whole(path: Path, content: bytes) -> None:
    """Put `content` at `path` so that a reader, or a crash, meets the old file or the new one.

    Replaces a link instead of following it.  Raises `StorageError`.
    """
    # Processes of two machines may have one number.
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        temporary.unlink(missing_ok=True)  # planted
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        flush_folder(path.parent)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise storage_error(path, error) from error
        raise


def write_files(contents: Mapping[Path, bytes]) -> None:
    """Write each whole, into folders that are made.  Raises `StorageError`."""
    for path, content in contents.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise storage_error(path.parent, error) from error
        write_whole(path, content)


def flush_folder(folder: Path) -> None:
    """Make the folder's entries survive a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_model(path: Path, model: BaseModel) -> None:
    """Store the model as JSON."""
    write_whole(path, model.model_dump_json(indent=1).encode() + b"\n")


def read_model(model: type[ModelT], path: Path) -> ModelT:
    """The file as the model.

    Raises `FileNotFoundError` where there is none, `ValueError` with the first fault of a damaged
    one, and `InputError` for one that must stay: of a newer version, or not to be read now.
    """
    try:
        content = read_regular(path)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise unreadable(path, error) from error
    check_values(content)
    try:
        return model.model_validate_json(content)
    except ValidationError as error:
        if (version := _version(content)) > SCHEMA_VERSION:
            found = f"schema_version is {version}, of a newer shardmark"
            remedy = "use that one, or measure into a new folder (--out DIR)"
            raise InputError(str(path), found, remedy) from None
        if error.error_count() > MOST_FAULTS:
            raise ValueError(f"{error.error_count():,} of its values are wrong") from None
        faults = error.errors(include_url=False)
    fault = faults[0]
    if fault["type"] == "json_invalid":
        raise ValueError(f"is not whole JSON: {fault['msg']}")
    key = ".".join(str(part) for part in fault["loc"])
    value = repr(fault["input"])
    shown = value if len(value) <= 60 else f"{value[:57]}..."
    more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
    raise ValueError(f"{key}: found {shown}; {fault['msg']}{more}")


def read_if_there(model: type[ModelT], path: Path) -> ModelT | None:
    """As `read_model`; None where there is no file."""
    try:
        return read_model(model, path)
    except FileNotFoundError:
        return None


class _Versioned(BaseModel):
    schema_version: int = 0


def _version(content: bytes) -> int:
    """Of whatever JSON it is; 0 where it tells none."""
    try:
        return _Versioned.model_validate_json(content).schema_version
    except ValidationError:
        return 0


def unreadable(path: Path, error: OSError) -> ValueError | InputError:
    """What to raise where a file is damaged, or else cannot be read now."""
    told = not_now(path, error)
    return ValueError(told.args[1]) if error.errno in LASTING else told


def not_now(path: Path, error: OSError) -> InputError:
    """What to raise where something is to be read again later."""
    reason = f"cannot be read: {error.strerror or error}"
    return InputError(str(path), reason, "run again when it can be read")


def open_regular(path: Path) -> BufferedReader:
    """A regular file, to be read; `OSError` for a link, or a pipe, which never ends."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        descriptor = os.open(path, flags)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "it is a link", str(path)) from None
        if error.errno == errno.ENXIO:  # a socket
            raise OSError(errno.EINVAL, "it is no regular file", str(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return os.fdopen(descriptor, "rb")


def check_values(content: bytes) -> None:
    """Raise `ValueError` for JSON that would fill the memory."""
    if json_values(content) > MAX_VALUES:
        raise ValueError(f"holds more than {MAX_VALUES:,} values")


def json_values(content: bytes) -> int:
    """At most so many values are in the JSON, which is not parsed."""
    return 1 + sum(map(content.count, (b",", b"[", b"{")))


def read_regular(path: Path, most_bytes: int = MOST_BYTES) -> bytes:
    """All that a regular file holds; `OSError` for a larger one."""
    with open_regular(path) as file:
        large = os.fstat(file.fileno()).st_size > most_bytes
        content = b"" if large else file.read(most_bytes + 1)  # it may grow meanwhile
    if large or len(content) > most_bytes:
        size = f"it is larger than {most_bytes // 2**20} MiB"
        raise OSError(errno.EFBIG, size, str(path))
    return content


def file_record(path: Path, *, flush: bool = False) -> FileRecord:
    """Size and hash of what the file holds now; `flush` puts it on the disk first."""
    with open_regular(path) as file:
        if flush:
            os.fsync(file.fileno())
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        return FileRecord(size_bytes=file.tell(), sha256=sha256)


def check_record(path: Path, record: FileRecord, *, verify: bool) -> None:
    """Raise `ValueError` where the file differs from its record; of hashes only if `verify`.

    Raises `InputError` where it cannot be read now.
    """
    try:
        with open_regular(path) as file:
            size_bytes = os.fstat(file.fileno()).st_size
        changed = verify and file_record(path).sha256 != record.sha256
    except FileNotFoundError:
        raise ValueError(f"{path.name} is missing") from None
    except OSError as error:
        raise unreadable(path, error) from error
    if size_bytes != record.size_bytes:
        raise ValueError(
            f"{path.name} has {size_bytes} bytes, not the recorded {record.size_bytes}"
        )
    if changed:
        raise ValueError(f"{path.name} has changed since it was recorded: another SHA-256")
