"""Lines of a trial's raw files and their values, with a bound on what is read of a long one."""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from pydantic_core import from_json

from shardmark.core.run_files import SAMPLES_FILE
from shardmark.results.files import json_values, open_regular

MAX_BYTES = 64 * 2**20
"""Of a file that is read as a whole."""
_PARTS = 16
_MOST_VALUES = 6_000_000
"""As many as real lines of so many bytes hold, and no more than the memory does."""
_OF_A_LINE = 4
"""What a line costs beside its values, in values."""

Line = Mapping[str, object]


def raw_lines(path: Path, max_bytes: int = MAX_BYTES) -> Iterator[Line]:
    """The objects of a file of JSON lines; of a long file, 16 even parts.

    A file that cannot be read has none, and a line that is no object is passed over.
    """
    room = _MOST_VALUES
    for part in _parts(path, max_bytes):
        for text in io.BytesIO(part):
            room -= json_values(text) + _OF_A_LINE
            if room < 0:
                return
            try:
                line = from_json(text)
            except ValueError:
                continue
            if isinstance(line, dict):
                yield line


def number(value: object) -> float | None:
    """A JSON number as a float; None for anything else, and where a float has no room for it."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def mapping(value: object) -> Line:
    """A JSON object; empty for anything else."""
    return value if isinstance(value, Mapping) else {}


def objects(line: Line, key: str) -> list[Line]:
    """The JSON objects of a list under this key; none where there is no list."""
    values = line.get(key)
    return [v for v in values if isinstance(v, Mapping)] if isinstance(values, list) else []


def samples_by_node(trial_folder: Path) -> dict[int, list[Line]]:
    """A trial's stored samples, each node's in order of time; without those that tell no time."""
    lines = raw_lines(trial_folder / SAMPLES_FILE)
    nodes = by_node(line for line in lines if number(line.get("at_seconds")) is not None)
    return {node: sorted(own, key=at_seconds) for node, own in nodes.items()}


def at_seconds(sample: Line) -> float:
    """Unix time of a sample that has one."""
    time = number(sample.get("at_seconds"))
    assert time is not None, "a sample without its time"
    return time


def by_node(samples: Iterable[Line]) -> dict[int, list[Line]]:
    """Samples by node; a sample of a trial on one node does not name it."""
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
            return [_whole_lines(file, start, length) for start in starts]
    except OSError:
        return []


def _whole_lines(file: BinaryIO, start: int, length: int) -> bytes:
    file.seek(start)
    part = file.read(length)
    first = part.find(b"\n") + 1 if start else 0
    return part[first : part.rfind(b"\n") + 1]
