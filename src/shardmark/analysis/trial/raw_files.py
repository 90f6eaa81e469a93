"""Lines of a trial's raw files, with a bound on what is read of a long one."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from pydantic_core import from_json

MOST_BYTES = 512 * 1024
_PARTS = 16

Line = Mapping[str, object]


def raw_lines(path: Path, starting: str = "", most_bytes: int = MOST_BYTES) -> Iterator[Line]:
    """The objects of a file of JSON lines whose text starts so; of a long file, 16 even parts.

    A file that cannot be read has none, and a line that is no object is passed over.
    """
    prefix = starting.encode()
    for part in _parts(path, most_bytes):
        for text in part.split(b"\n"):
            if text.startswith(prefix):
                try:
                    line = from_json(text)
                except ValueError:
                    continue
                if isinstance(line, dict):
                    yield line


def _parts(path: Path, most_bytes: int) -> list[bytes]:
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size <= most_bytes:
                return [file.read()]
            length = most_bytes // _PARTS
            starts = [(size - length) * index // (_PARTS - 1) for index in range(_PARTS)]
            return [_whole_lines(file, start, length) for start in starts]
    except OSError:
        return []


def _whole_lines(file: BinaryIO, start: int, length: int) -> bytes:
    file.seek(start)
    part = file.read(length)
    first = part.find(b"\n") + 1 if start else 0
    return part[first : part.rfind(b"\n") + 1]
