"""Reading of a trial's raw files, of which at most a bounded part is read."""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from pydantic_core import from_json

from shardmark.base.files.run_files import SAMPLES_FILE
from shardmark.base.results.files import json_values, open_regular

MAX_BYTES = 64 * 2**20
"""Maximum size of a file that is read completely."""
_PARTS = 16
_MAX_VALUES = 6_000_000
"""Maximum number of values that are parsed, which files of `MAX_BYTES` do not exceed."""
_VALUES_PER_LINE = 4
"""Memory of a line in addition to its values, in values."""

Line = Mapping[str, object]


def raw_lines(path: Path, max_bytes: int = MAX_BYTES) -> Iterator[Line]:
    """Yield the objects of a file of JSON lines; of a long file, 16 evenly spaced parts.

    Nothing is yielded for a file that cannot be read; lines that are not objects are skipped.
    """
    remaining = _MAX_VALUES
    for part in _parts(path, max_bytes):
        for text in io.BytesIO(part):
            remaining -= json_values(text) + _VALUES_PER_LINE
            if remaining < 0:
                return
            try:
                line = from_json(text)
            except ValueError:
                continue
            if isinstance(line, dict):
                yield line


def number(value: object) -> float | None:
    """Return a JSON number as a float; None for other values and for numbers that overflow."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def mapping(value: object) -> Line:
    """Return a JSON object, or an empty one for any other value."""
    return value if isinstance(value, Mapping) else {}


def objects(line: Line, key: str) -> list[Line]:
    """Return the JSON objects of the list under the key; empty if there is no list."""
    values = line.get(key)
    return [v for v in values if isinstance(v, Mapping)] if isinstance(values, list) else []


def samples_by_node(trial_folder: Path) -> dict[int, list[Line]]:
    """Return a trial's samples that have a time, by node and in order of time."""
    lines = raw_lines(trial_folder / SAMPLES_FILE)
    nodes = by_node(line for line in lines if number(line.get("at_seconds")) is not None)
    return {node: sorted(lines, key=at_seconds) for node, lines in nodes.items()}


def at_seconds(sample: Line) -> float:
    """Return the Unix time of a sample that has one."""
    time = number(sample.get("at_seconds"))
    assert time is not None, "a sample without its time"
    return time


def by_node(samples: Iterable[Line]) -> dict[int, list[Line]]:
    """Group samples by node; samples of a trial on one node do not name it."""
    nodes: dict[int, list[Line]] = {}
    for sample in samples:
        node = sample.get("node", 0)
        nodes.setdefault(node if isinstance(node, int) else 0, []).append(sample)
    return dict(sorted(nodes.items()))


def _parts(path: Path, max_bytes: int) -> list[bytes]:
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size <= max_bytes:
                return [file.read()]
            length = max_bytes // _PARTS
            starts = [(size - length) * index // (_PARTS - 1) for index in range(_PARTS)]
            return [_complete_lines(file, start, length) for start in starts]
    except OSError:
        return []


def _complete_lines(file: BinaryIO, start: int, length: int) -> bytes:
    file.seek(start)
    part = file.read(length)
    first = part.find(b"\n") + 1 if start else 0
    return part[first : part.rfind(b"\n") + 1]
