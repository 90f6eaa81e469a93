"""Writes a file whole or not at all, and records what a file held."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from shardmark.results.schema import FileRecord


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
