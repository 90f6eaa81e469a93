"""Sends the controller what it looks at while a trial runs on another node.  Imports no torch."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

from shardmark.launch.nodes.channel import Channel

MIRROR_SECONDS = 1.0
MIRRORED = ("rank-*.json", "rank-*.progress")


class Mirror:
    """Sends the small files of a trial's folder as they change."""

    def __init__(self, channel: Channel, directory: Path) -> None:
        self._channel = channel
        self._directory = directory
        self._sent: dict[str, bytes] = {}
        self._due = 0.0

    def look(self) -> None:
        if time.monotonic() < self._due:
            return
        self._due = time.monotonic() + MIRROR_SECONDS
        for path in (found for pattern in MIRRORED for found in self._directory.glob(pattern)):
            with suppress(FileNotFoundError):
                content = path.read_bytes()
                if self._sent.get(path.name) != content:
                    self._channel.send({"file": path.name, "last": True}, content)
                    self._sent[path.name] = content
