"""Reads what Weights & Biases writes offline: a LevelDB log of its own protocol buffers.

Version 0.31 of the library has no reader in Python; the records' classes are the library's own.
Format: github.com/google/leveldb, doc/log_format.md, after a header of 7 bytes.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

BLOCK_BYTES = 32 * 1024
HEADER_BYTES = 7
FULL, LAST = 1, 4


def read_records(path: Path) -> Iterator[Any]:
    """The records of one `run-ID.wandb`."""
    # The module makes its classes as it is imported, where mypy cannot see them.
    record_class = import_module("wandb.proto.wandb_internal_pb2").Record
    content = path.read_bytes()
    assert content[:4] == b":W&B"
    position, record = HEADER_BYTES, b""
    while position < len(content):
        left = BLOCK_BYTES - position % BLOCK_BYTES
        if left < HEADER_BYTES:
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, position)
        position += HEADER_BYTES
        record += content[position : position + length]
        position += length
        if kind in (FULL, LAST):
            parsed = record_class()
            parsed.ParseFromString(record)
            yield parsed
            record = b""


class WandbRun:
    """The content of an offline run."""

    def __init__(self, folder: Path) -> None:
        (path,) = folder.glob("run-*.wandb")
        self.history: list[dict[str, Any]] = []
        self.summary: dict[str, Any] = {}
        self.config: dict[str, Any] = {}
        self.metrics: list[Any] = []
        self.run: Any = None
        self.exit_code: int | None = None
        for record in read_records(path):
            self._take(record)

    def _take(self, record: Any) -> None:
        kind = record.WhichOneof("record_type")
        if kind == "history":
            self.history.append(_items(record.history.item))
        elif kind == "summary":
            self.summary |= _items(record.summary.update)
        elif kind == "run":
            self.run = record.run
            self.config |= _items(record.run.config.update)
        elif kind == "metric":
            self.metrics.append(record.metric)
        elif kind == "exit":
            self.exit_code = record.exit.exit_code


def _items(items: Any) -> dict[str, Any]:
    return {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}
