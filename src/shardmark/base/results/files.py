"""Atomic writing of files, validated reading of models, and hashes of files."""

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

from shardmark.base.errors import InputError
from shardmark.base.files.storage import storage_error
from shardmark.base.results.schema import SCHEMA_VERSION, FileRecord

MAX_BYTES = 2**26
"""Maximum size of a file that is read at once; a result of 1,000 ranks has a sixth of it."""
MAX_VALUES = 2_000_000
"""Maximum number of values in a file; small values take eighty times their size in memory."""
MAX_FAULTS = 10_000
"""Maximum number of faults of a file that are examined."""
PERMANENT_ERRORS = frozenset(
    {errno.EINVAL, errno.EFBIG, errno.ELOOP, errno.EISDIR, errno.ENOTDIR, errno.ENOENT}
)
"""Error numbers that describe the file, not a temporary condition."""
ModelT = TypeVar("ModelT", bound=BaseModel)


def write_atomically(path: Path, content: bytes) -> None:
    """Replace a file atomically: readers, and a crash, see either the old or the new content.

    Replaces a link instead of following it.  Raises `StorageError`.
    """
    # Processes on two machines can have the same number.
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        temporary.unlink(missing_ok=True)
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


def changed_files(contents: Mapping[Path, bytes]) -> list[Path]:
    """Return the files that exist with other content, which `write_files` would replace."""

    def differs(path: Path, content: bytes) -> bool:
        try:
            return path.is_file() and path.read_bytes() != content
        except OSError:
            return os.access(path, os.F_OK)  # a file that exists but cannot be read

    return [path for path, content in contents.items() if differs(path, content)]


def write_files(contents: Mapping[Path, bytes]) -> None:
    """Write files atomically, and create their folders.  Raises `StorageError`."""
    for path, content in contents.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise storage_error(path.parent, error) from error
        write_atomically(path, content)


def flush_folder(folder: Path) -> None:
    """Flush a folder's entries to the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_model(path: Path, model: BaseModel) -> None:
    """Store the model as JSON."""
    write_atomically(path, model.model_dump_json(indent=1).encode() + b"\n")


def read_model(model: type[ModelT], path: Path) -> ModelT:
    """Read and validate a JSON file.

    Raises `FileNotFoundError`; `ValueError` with the first fault of a damaged file; `InputError`
    for a file that must not be replaced: it has a newer version, or cannot be read at present.
    """
    try:
        content = read_regular(path)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise read_error(path, error) from error
    check_values(content)
    try:
        return model.model_validate_json(content)
    except ValidationError as error:
        if (version := _version(content)) > SCHEMA_VERSION:
            problem = f"schema_version is {version}, of a newer shardmark"
            remedy = "use that one, or measure into a new folder (--out DIR)"
            raise InputError(str(path), problem, remedy) from None
        if error.error_count() > MAX_FAULTS:
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


def read_if_exists(model: type[ModelT], path: Path) -> ModelT | None:
    """Read a model as `read_model` does; return None if the file does not exist."""
    try:
        return read_model(model, path)
    except FileNotFoundError:
        return None


class _Versioned(BaseModel):
    schema_version: int = 0


def _version(content: bytes) -> int:
    """Return the schema version of any JSON text, or 0 if it has none."""
    try:
        return _Versioned.model_validate_json(content).schema_version
    except ValidationError:
        return 0


def read_error(path: Path, error: OSError) -> ValueError | InputError:
    """Return a `ValueError` for a damaged file, or an `InputError` for a temporary failure."""
    temporary = temporary_read_error(path, error)
    return ValueError(temporary.args[1]) if error.errno in PERMANENT_ERRORS else temporary


def temporary_read_error(path: Path, error: OSError) -> InputError:
    """Return the error for a file or folder that cannot be read at present."""
    reason = f"cannot be read: {error.strerror or error}"
    return InputError(str(path), reason, "run again when it can be read")


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file for reading.  Raises `OSError` for links, pipes and sockets."""
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
    """Raise `ValueError` for JSON with so many values that they could exhaust the memory."""
    if json_values(content) > MAX_VALUES:
        raise ValueError(f"holds more than {MAX_VALUES:,} values")


def json_values(content: bytes) -> int:
    """Return an upper bound of the number of values in a JSON text, without parsing it."""
    return 1 + sum(map(content.count, (b",", b"[", b"{")))


def read_regular(path: Path, max_bytes: int = MAX_BYTES) -> bytes:
    """Read a regular file.  Raises `OSError` if it is larger than `max_bytes`."""
    with open_regular(path) as file:
        large = os.fstat(file.fileno()).st_size > max_bytes
        content = b"" if large else file.read(max_bytes + 1)  # the file can grow
    if large or len(content) > max_bytes:
        size = f"it is larger than {max_bytes // 2**20} MiB"
        raise OSError(errno.EFBIG, size, str(path))
    return content


def file_record(path: Path, *, flush: bool = False) -> FileRecord:
    """Return the size and hash of a file; `flush` first writes it to the disk."""
    with open_regular(path) as file:
        if flush:
            os.fsync(file.fileno())
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        return FileRecord(size_bytes=file.tell(), sha256=sha256)


def check_record(path: Path, record: FileRecord, *, verify: bool) -> None:
    """Raise `ValueError` if the size, or with `verify` the hash, differs from the record.

    Raises `InputError` if the file cannot be read at present.
    """
    try:
        with open_regular(path) as file:
            size_bytes = os.fstat(file.fileno()).st_size
        changed = verify and file_record(path).sha256 != record.sha256
    except FileNotFoundError:
        raise ValueError(f"{path.name} is missing") from None
    except OSError as error:
        raise read_error(path, error) from error
    if size_bytes != record.size_bytes:
        raise ValueError(
            f"{path.name} has {size_bytes} bytes, not the recorded {record.size_bytes}"
        )
    if changed:
        raise ValueError(f"{path.name} has changed since it was recorded: another SHA-256")
