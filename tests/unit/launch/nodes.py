"""Nodes without processes: threads that speak to a roster as node processes do."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

from shardmark.launch.nodes.channel import Channel, ChannelEndedError, Message
from shardmark.launch.nodes.roster import Roster

KEY = {"experiment": "e", "torch": "1"}
MACHINE: Message = {"device_type": "cpu", "device_count": 0, "cores": 2, "device_names": []}
ENDED: Message = {"ended": 0, "failures": [], "oom_kills": 0}


class FakeNode:
    """Answers what it is asked with what `answers` holds, by request."""

    def __init__(
        self, roster: Roster, number: int | None, *, ahead_seconds: float = 0.0, **key: str
    ) -> None:
        connection = socket.create_connection(("127.0.0.1", roster.port))
        self.channel = Channel(connection, patience_seconds=30)
        hello = {"number": number, "host": f"host-{number}", "address": "127.0.0.1"}
        self.channel.send({**hello, "key": KEY | key})
        self.greeting, _ = self.channel.receive()
        self.heard: list[Message] = []
        self.answers: dict[str, Message] = {"machine": MACHINE, "load": {}, "run": ENDED}
        self.before_end: Callable[[Channel, Message], None] = lambda channel, message: None  # noqa: ARG005
        self._ahead_seconds = ahead_seconds
        self._thread = threading.Thread(target=self._serve, daemon=True)
        if "welcome" in self.greeting:
            self._thread.start()

    def beat(self) -> None:
        self.channel.send({"beat": time.time() + self._ahead_seconds})

    def close(self) -> None:
        self.channel.close()
        if self._thread.ident is not None:
            self._thread.join()

    def _serve(self) -> None:
        try:
            while True:
                message, _ = self.channel.receive()
                if message["do"] == "beat":
                    self.beat()
                    continue
                self.heard.append(message)
                if message["do"] == "run":
                    self.before_end(self.channel, message)
                if message["do"] in self.answers:
                    self.channel.send(self.answers[message["do"]])
        except ChannelEndedError:
            self.channel.close()

    @property
    def asked(self) -> list[str]:
        return [str(message["do"]) for message in self.heard]


def send_file(channel: Channel, folder: Path, name: str, content: str) -> None:
    path = folder / f"sent-{time.monotonic_ns()}"
    path.write_text(content)
    channel.send_file(path, name)
