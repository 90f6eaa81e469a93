"""Nodes without processes: threads that speak to a registry as node processes do."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from io import BytesIO
from typing import Any

from shardmark.bench.launch.engine import EngineRequest, library_versions
from shardmark.experiment.engines import NodeOptions
from shardmark.extras.engines.nodes.protocol import Channel, ChannelEndedError, Message
from shardmark.extras.engines.nodes.registry import NodeRegistry
from shardmark.ranks.trial import Trial

SECRET = "known to the nodes alone"
KEY = {"recipe": "r", **library_versions()}
MACHINE: Message = {
    "device_type": "cpu",
    "device_count": 0,
    "cores": 2,
    "device_names": [],
    "libraries": [["NCCL", "2.27.3"]],
}
ENDED: Message = {"ended": 0, "failures": [], "oom_kills": 0}
PORT = 4711


def request(
    trials: Iterable[Trial] = (), notify: Callable[[str], None] = lambda _: None, **more: Any
) -> EngineRequest:
    given = {"name": "faked", "device": "cpu", "key": KEY} | more
    return EngineRequest(trials=tuple(trials), notify=notify, **given)


def node_options(**given: Any) -> NodeOptions:
    return NodeOptions.model_validate({"join_seconds": 5, "node_seconds": 2} | given)


@contextmanager
def listening(num_nodes: int, silence_seconds: float = 10) -> Iterator[NodeRegistry]:
    registry = NodeRegistry(
        ("127.0.0.1", 0),
        num_nodes=num_nodes,
        secret=SECRET,
        key=KEY,
        silence_seconds=silence_seconds,
    )
    with closing(registry):
        yield registry


def connected(registry: NodeRegistry) -> Channel:
    """A peer that has proved that it knows the secret, and sent nothing yet."""
    channel = Channel(socket.create_connection(("127.0.0.1", registry.port)))
    try:
        channel.prove(SECRET, controls=False)
    except ChannelEndedError:
        channel.close()
        raise
    return channel


def hello(number: int | None = 1, **changes: Any) -> Message:
    said = {"number": number, "host": f"host-{number}", "address": "127.0.0.1"}
    return {**said, "with_files": False, "key": KEY} | changes


class FakeNode:
    """Answers what it is asked with what `answers` holds, by request."""

    def __init__(
        self,
        registry: NodeRegistry,
        number: int | None,
        *,
        ahead_seconds: float = 0.0,
        with_files: bool = False,
        **key: str,
    ) -> None:
        self.channel = connected(registry)
        self.channel.send(hello(number, with_files=with_files, key=KEY | key))
        self.greeting, _ = self.channel.receive()
        self.heard: list[Message] = []
        self.files: dict[str, bytes] = {}
        self.answers: dict[str, Message] = {
            "machine": MACHINE,
            "environment": {"host": f"host-{number}"},
            "port": {"port": PORT},
            "load": {},
            "run": ENDED,
        }
        self.before_end: Callable[[Channel], None] = lambda _: None
        self._thread = threading.Thread(target=self._serve, daemon=True)
        if "welcome" in self.greeting:
            self.channel.send({"beat": time.time() + ahead_seconds})
            self.channel.keep_alive(30)
            self._thread.start()

    def close(self) -> None:
        self.channel.close()
        if self._thread.ident is not None:
            self._thread.join()

    def send_file(self, content: bytes, name: str) -> None:
        self.channel.send_file(BytesIO(content), name)

    @property
    def asked(self) -> list[str]:
        return [str(message["do"]) for message in self.heard]

    def _serve(self) -> None:
        try:
            while True:
                message, piece = self.channel.receive()
                if "file" in message:
                    self.files[message["file"]] = piece
                    continue
                self.heard.append(message)
                if message["do"] == "run":
                    self.before_end(self.channel)
                if message["do"] in self.answers:
                    self.channel.send(self.answers[message["do"]])
        except ChannelEndedError:
            self.channel.close()
