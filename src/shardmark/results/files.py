"""Writes a file whole or not at all, reads one as its model, and records what a file held."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from pathlib import Path
from typing import BinaryIO, TypeVar

from pydantic import BaseModel, ValidationError

from shardmark.results.schema import FileRecord

MOST_BYTES = 2**26
"""No file of a run that is read as one is as large; a result of 1,000 ranks has a sixth of it."""
MOST_VALUES = 2_000_000
"""In one file: small ones take eighty times their room in memory."""
MOST_FAULTS = 10_000
"""Of one file, that are looked at."""
ModelT = TypeVar("ModelT", bound=BaseModel)


def write_whole(path: Path, content: bytes) -> None:
    """Put `content` at `path` so that a reader, or a crash, meets the old file or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    flush_folder(path.parent)


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


def read_model(model: type[ModelT], content: bytes) -> ModelT:
    """The content as the model.  Raises `ValueError` that says what the first fault is."""
    check_values(content)
    try:
        return model.model_validate_json(content)
    except ValidationError as error:
        if error.error_count() > MOST_FAULTS:
            raise ValueError(f"{error.error_count():,} of its values are wrong") from None
        faults = error.errors(include_url=False)
    if faults[0]["type"] == "json_invalid":
        raise ValueError(f"is not whole JSON: {faults[0]['msg']}")
    versions = [fault for fault in faults if fault["loc"] == ("schema_version",)]
    fault = (versions or faults)[0]
    key = ".".join(str(part) for part in fault["loc"])
    value = repr(fault["input"])
    shown = value if len(value) <= 60 else f"{value[:57]}..."
    more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
    advice = "; it is of another version of shardmark" if versions else ""
    raise ValueError(f"{key}: found {shown}; {fault['msg']}{more}{advice}")


def check_values(content: bytes) -> None:
    """Raise `ValueError` for JSON that would fill the memory."""
    if json_values(content) > MOST_VALUES:
        raise ValueError(f"holds more than {MOST_VALUES:,} values")


def json_values(content: bytes) -> int:
    """At most so many values are in the JSON, which is not parsed."""
    return 1 + sum(map(content.count, (b",", b"[", b"{")))


def open_regular(path: Path) -> BinaryIO:
    """The file, opened to be read; `OSError` for a pipe, a device or a folder."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return os.fdopen(descriptor, "rb")


def read_regular(path: Path, most_bytes: int = MOST_BYTES) -> bytes:
    """All that a regular file holds; `OSError` for a larger one, or a pipe, which never ends."""
    with open_regular(path) as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        size = f"it is larger than {most_bytes // 2**20} MiB"
        raise OSError(errno.EFBIG, size, str(path))
    return content


def file_record(path: Path, *, flush: bool = False) -> FileRecord:
    """Size and hash of what the file holds now; `flush` puts it on the disk first."""
    with path.open("rb") as file:
        if flush:
            os.fsync(file.fileno())
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        return FileRecord(size_bytes=file.tell(), sha256=sha256)


def difference(path: Path, record: FileRecord, *, verify: bool) -> str | None:
    """How the file differs from its record, or None; compares hashes only if `verify`."""
    try:
        size_bytes = path.stat().st_size
        if size_bytes != record.size_bytes:
            return f"{path.name} has {size_bytes} bytes, not the recorded {record.size_bytes}"
        if verify and file_record(path).sha256 != record.sha256:
            return f"{path.name} has changed since it was recorded: another SHA-256"
    except FileNotFoundError:
        return f"{path.name} is missing"
    return None
