"""The controller's connections to the nodes: who has come, who was lost, what they say."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from shardmark.core.errors import ShardmarkError
from shardmark.launch.nodes.protocol import (
    Channel,
    ChannelEndedError,
    Message,
    keep_piece,
    key_difference,
)
from shardmark.launch.outcome import LostNode

GREETING_SECONDS = 10.0
POLL_SECONDS = 0.2


class NodeLostError(ShardmarkError):
    """A node that was asked something is gone."""


@dataclass(slots=True, kw_only=True)
class ConnectedNode:
    """One node that has come."""

    number: int
    host: str
    with_files: bool
    """Whether it works in the controller's own folders."""
    address: str
    """Its own end of the connection."""
    controller_address: str
    """The controller's end, by which that node reaches this machine."""
    channel: Channel
    lost: LostNode | None = None
    loaded: bool = False
    """Whether it has loaded what ranks need."""
    answers: queue.SimpleQueue[Message] = field(default_factory=queue.SimpleQueue)

    @property
    def title(self) -> str:
        return f"node {self.number} ({self.host})"


class NodeRegistry:
    """Listens for nodes, hears them and has them hear it; from threads of its own.

    `key` says what run this is: a node of another one is refused.
    """

    def __init__(
        self,
        address: tuple[str, int],
        *,
        wanted: int,
        key: Mapping[str, str],
        patience_seconds: float,
    ) -> None:
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._listener = socket.create_server(address, family=family)
        self._listener.settimeout(POLL_SECONDS)
        self.port = int(self._listener.getsockname()[1])
        self.wanted = wanted
        self._key = dict(key)
        self._patience_seconds = patience_seconds
        self.nodes: dict[int, ConnectedNode] = {}
        self._refusals: list[str] = []
        """Only ever grows: its thread appends, others read."""
        self._directory: Path | None = None
        self._closing = threading.Event()
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def wait(self, seconds: float, check: Callable[[], None], tell: Callable[[str], None]) -> None:
        """Until all nodes have come, telling which one was refused.

        Raises `ShardmarkError`; `check` may raise earlier.
        """
        deadline = time.monotonic() + seconds
        told = 0
        while True:
            for refusal in self._refusals[told:]:
                tell(refusal)
                told += 1
            missing = sorted(set(range(self.wanted)) - set(self.nodes))
            if not missing:
                return
            check()
            if time.monotonic() > deadline:
                who = f"node {', '.join(map(str, missing))} has not come within {seconds:g} s"
                hint = "is the same command running there, and can it reach this machine?"
                raise ShardmarkError("; ".join((who, *(dict.fromkeys(self._refusals) or (hint,)))))
            time.sleep(POLL_SECONDS / 4)

    def in_order(self) -> list[ConnectedNode]:
        return [self.nodes[number] for number in sorted(self.nodes)]

    def lost(self, numbers: Iterable[int]) -> LostNode | None:
        """One of those nodes that is lost, if any is."""
        for number in numbers:
            node = self.nodes.get(number)
            if node is not None and node.lost is not None:
                return node.lost
        return None

    def keep_files_in(self, directory: Path | None) -> None:
        """Where files go that nodes send from now on; None drops them."""
        self._directory = directory

    def tell(self, number: int, message: Message) -> None:
        """Send; where that cannot be done, the node is lost, which `lost` says."""
        node = self.nodes[number]
        try:
            node.channel.send(message)
        except ChannelEndedError as ended:
            self._lose(node, str(ended))

    def send_file(self, number: int, path: Path, name: str) -> None:
        """As `tell`, for a file."""
        node = self.nodes[number]
        try:
            node.channel.send_file(path, name)
        except ChannelEndedError as ended:
            self._lose(node, str(ended))

    def ask(self, numbers: Iterable[int], message: Message) -> dict[int, Message]:
        """Each node's answer, all at work at once.  Raises `NodeLostError`."""
        waiting = set(numbers)
        for number in waiting:
            self.tell(number, message)
        answers: dict[int, Message] = {}
        while waiting:
            for number in sorted(waiting):
                with suppress(queue.Empty):
                    answers[number] = self.nodes[number].answers.get(timeout=POLL_SECONDS / 4)
            waiting -= answers.keys()
            gone = self.lost(waiting)
            if gone is not None:
                raise NodeLostError(str(gone))
        return dict(sorted(answers.items()))

    def close(self) -> None:
        """Tell all nodes that the run is over, and end the threads."""
        for node in list(self.nodes.values()):
            if node.lost is None:
                self.tell(node.number, {"do": "bye"})
        self._closing.set()
        for node in list(self.nodes.values()):
            node.channel.close()
        self._listener.close()
        for thread in self._threads:
            thread.join()

    def _start(self, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, name="node-registry", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:
                continue  # nobody came meanwhile, or it is over
            channel = Channel(connection, patience_seconds=GREETING_SECONDS)
            try:
                node = self._greet(channel)
            except (ChannelEndedError, KeyError, TypeError, ValueError):
                channel.close()
                continue
            self.nodes[node.number] = node
            self._start(lambda node=node: self._hear(node))  # type: ignore[misc]

    def _greet(self, channel: Channel) -> ConnectedNode:
        """Hear who has come, and take it or send it away.  The one place where that is decided."""
        hello, _ = channel.receive()
        number, problem = self._number(hello)
        if problem is not None:
            who = "a node" if hello["number"] is None else f"node {hello['number']}"
            self._refusals.append(f"{who} ({hello['host']}) came and was refused: {problem}")
            channel.send({"refused": problem})
            raise ChannelEndedError(problem)
        node = ConnectedNode(
            number=number,
            host=str(hello["host"]),
            with_files=bool(hello["with_files"]),
            address=str(hello["address"]),
            controller_address=channel.own_address,
            channel=channel,
        )
        channel.send({"welcome": number, "patience_seconds": self._patience_seconds})
        channel.keep_alive(self._patience_seconds)
        return node

    def _number(self, hello: Message) -> tuple[int, str | None]:
        """The number that the node gets, or why it gets none."""
        problem = key_difference(hello["key"], self._key)
        if problem is not None:
            return -1, problem
        taken = {number for number, node in self.nodes.items() if node.lost is None}
        wish = hello["number"]
        if wish is None:
            free = sorted(set(range(1, self.wanted)) - taken)
            return (free[0], None) if free else (-1, "all nodes are here already")
        if not 0 <= int(wish) < self.wanted:
            return -1, f"there is no node {wish}: the experiment takes {self.wanted}"
        return int(wish), f"node {wish} is here already" if int(wish) in taken else None

    def _hear(self, node: ConnectedNode) -> None:
        try:
            while True:
                message, piece = node.channel.receive()
                if "file" not in message:
                    node.answers.put(message)
                elif self._directory is not None:
                    keep_piece(self._directory, message, piece)
        except (ChannelEndedError, OSError, KeyError) as error:
            self._lose(node, str(error))

    def _lose(self, node: ConnectedNode, reason: str) -> None:
        if node.lost is None and not self._closing.is_set():
            node.lost = LostNode(node=node.number, host=node.host, reason=reason)
        node.channel.close()
