"""The controller's connections to the nodes: who has come, who was lost, what they say."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import BaseModel, ConfigDict, NonNegativeInt

from shardmark.core.errors import ShardmarkError
from shardmark.launch.nodes.protocol import (
    Channel,
    ChannelEndedError,
    Message,
    StrangerError,
    is_result,
    keep_piece,
    key_difference,
)
from shardmark.launch.outcome import LostNode

POLL_SECONDS = 0.2
GREETINGS = 32
"""Connections that may be greeted at once; further ones are closed, and nodes try again."""
REFUSALS = 20
"""Told at most: strangers may come in any number."""
ANSWER_SECONDS = 900.0
"""For a node that is heard to do what it is asked; loading libraries may take minutes."""


class NodeLostError(ShardmarkError):
    """A node that was asked something is gone."""


class Hello(BaseModel):
    """How a node introduces itself."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    number: NonNegativeInt | None
    """None takes any that is free."""
    host: str
    address: str
    """Its own end of the connection."""
    with_files: bool
    """Whether it works in the controller's own folders."""
    key: dict[str, str]


@dataclass(slots=True, kw_only=True)
class ConnectedNode:
    """One node that has come."""

    number: int
    host: str
    with_files: bool
    address: str
    controller_address: str
    """The controller's end, by which that node reaches this machine."""
    channel: Channel
    lost: LostNode | None = None
    answers: queue.SimpleQueue[Message] = field(default_factory=queue.SimpleQueue)

    @property
    def title(self) -> str:
        return f"node {self.number} ({self.host})"


class NodeRegistry:
    """Listens for nodes, each heard by a thread of its own.

    Who does not know the secret is not listened to; a node whose `key` says that it belongs to
    another run is refused.
    """

    def __init__(
        self,
        address: tuple[str, int],
        *,
        wanted: int,
        secret: str,
        key: Mapping[str, str],
        patience_seconds: float,
    ) -> None:
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._listener = socket.create_server(address, family=family)
        self.port = int(self._listener.getsockname()[1])
        self.wanted = wanted
        self._secret = secret
        self._key = dict(key)
        self._patience_seconds = patience_seconds
        self.nodes: dict[int, ConnectedNode] = {}
        self._joining = threading.Lock()
        self._refusals: dict[str, None] = {}
        """In order, each once; only ever grows."""
        self._greetings = threading.Semaphore(GREETINGS)
        self._channels: set[Channel] = set()
        self._directory: Path | None = None
        self._ranks_by_node: tuple[Collection[int], ...] = ()
        self._closing = threading.Event()
        self._threads: list[threading.Thread] = []
        self._accepting = threading.Thread(target=self._accept, name="node-registry", daemon=True)
        self._accepting.start()

    def wait(self, seconds: float, check: Callable[[], None], tell: Callable[[str], None]) -> None:
        """Until all nodes have come, telling which one was refused.

        Raises `ShardmarkError`; `check` may raise earlier.
        """
        deadline = time.monotonic() + seconds
        told = 0
        while True:
            refusals = list(self._refusals)
            for refusal in refusals[told:]:
                tell(refusal)
            told = len(refusals)
            missing = sorted(set(range(self.wanted)) - set(self.nodes))
            if not missing:
                return
            check()
            if time.monotonic() > deadline:
                who = f"node {', '.join(map(str, missing))} has not come within {seconds:g} s"
                hint = "is the same command running there, and can it reach this machine?"
                raise ShardmarkError("; ".join((who, *(refusals or (hint,)))))
            time.sleep(POLL_SECONDS / 4)

    def in_order(self) -> list[ConnectedNode]:
        return [self.nodes[number] for number in sorted(self.nodes)]

    def lost(self, numbers: Iterable[int]) -> LostNode | None:
        """One of those nodes that is lost, if any is."""
        nodes = (self.nodes.get(number) for number in numbers)
        return next((node.lost for node in nodes if node is not None and node.lost), None)

    def keep_files_in(
        self, directory: Path | None, ranks_by_node: tuple[Collection[int], ...] = ()
    ) -> None:
        """Where the files go that nodes send of their own ranks from now on; None drops them."""
        self._directory, self._ranks_by_node = directory, ranks_by_node

    def tell(self, number: int, message: Message) -> None:
        """Send; where that cannot be done, the node is lost, which `lost` says."""
        node = self.nodes[number]
        try:
            node.channel.send(message)
        except ChannelEndedError as ended:
            self.lose(number, str(ended))

    def send_file(self, number: int, path: Path, name: str) -> None:
        """As `tell`, for a file."""
        try:
            with path.open("rb") as file:
                self.nodes[number].channel.send_file(file, name)
        except ChannelEndedError as ended:
            self.lose(number, str(ended))

    def ask(self, numbers: Iterable[int], message: Message) -> dict[int, Message]:
        """Each node's answer, all at work at once.  Raises `NodeLostError`."""
        waiting = set(numbers)
        for number in waiting:
            self.tell(number, message)
        answers: dict[int, Message] = {}
        deadline = time.monotonic() + ANSWER_SECONDS
        while waiting:
            for number in sorted(waiting):
                with suppress(queue.Empty):
                    answers[number] = self.nodes[number].answers.get(timeout=POLL_SECONDS / 4)
            waiting -= answers.keys()
            if time.monotonic() > deadline:
                for number in waiting:
                    self.lose(number, f"it did not answer within {ANSWER_SECONDS:g} s")
            gone = self.lost(waiting)
            if gone is not None:
                raise NodeLostError(str(gone))
        return dict(sorted(answers.items()))

    def lose(self, number: int, reason: str) -> None:
        """Have no more to do with that node, which ends when it sees its connection closed."""
        node = self.nodes[number]
        if node.lost is None and not self._closing.is_set():
            node.lost = LostNode(node=node.number, host=node.host, reason=reason)
        node.channel.close()

    def close(self) -> None:
        """Tell all nodes that the run is over, and end the threads."""
        for node in list(self.nodes.values()):
            if node.lost is None:
                self.tell(node.number, {"do": "bye"})
        self._closing.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes who waits for somebody to come
        self._accepting.join()
        for channel in list(self._channels):
            channel.close()
        self._listener.close()
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                connection, address = self._listener.accept()
                channel = Channel(connection)
            except OSError:  # it is over, or no more files can be opened: later ones may
                self._closing.wait(POLL_SECONDS)
                continue
            if not self._greetings.acquire(blocking=False):
                channel.close()
                continue
            self._channels.add(channel)
            thread = threading.Thread(
                target=self._serve, args=(channel, str(address[0])), name="node", daemon=True
            )
            self._threads = [*(t for t in self._threads if t.is_alive()), thread]
            thread.start()

    def _serve(self, channel: Channel, address: str) -> None:
        """One connection from its greeting to its end; its errors end it alone."""
        node: ConnectedNode | None = None
        reason = ""
        try:
            try:
                node = self._greet(channel, address)
            finally:
                self._greetings.release()
            self._hear(node)
        except (ChannelEndedError, OSError, KeyError, TypeError, ValueError) as error:
            reason = str(error)
        finally:
            if node is not None and self.nodes[node.number] is node:
                self.lose(node.number, reason)
            channel.close()
            self._channels.discard(channel)

    def _greet(self, channel: Channel, address: str) -> ConnectedNode:
        """Hear who has come, and take it or send it away.  The one place where that is decided."""
        try:
            channel.prove(self._secret, controls=True)
        except StrangerError:
            self._refuse(f"somebody came from {address} and was refused: the secret is another one")
            raise
        hello = Hello.model_validate(channel.receive()[0])
        with self._joining:  # others come at the same time
            number, problem = self._number(hello)
            if problem is not None:
                who = "a node" if hello.number is None else f"node {hello.number}"
                self._refuse(f"{who} ({hello.host}) came and was refused: {problem}")
                channel.send({"refused": problem})
                raise ChannelEndedError(problem)
            channel.send({"welcome": number, "patience_seconds": self._patience_seconds})
            channel.keep_alive(self._patience_seconds)
            self.nodes[number] = ConnectedNode(
                number=number,
                host=hello.host,
                with_files=hello.with_files,
                address=hello.address,
                controller_address=channel.own_address,
                channel=channel,
            )
        return self.nodes[number]

    def _refuse(self, refusal: str) -> None:
        if len(self._refusals) < REFUSALS:
            self._refusals[refusal] = None

    def _number(self, hello: Hello) -> tuple[int, str | None]:
        """The number that the node gets, or why it gets none."""
        problem = key_difference(hello.key, self._key)
        if problem is not None:
            return -1, problem
        taken = {number for number, node in self.nodes.items() if node.lost is None}
        wish = hello.number
        if wish is None:
            free = sorted(set(range(1, self.wanted)) - taken)
            return (free[0], None) if free else (-1, "all nodes are here already")
        if wish >= self.wanted:
            return -1, f"there is no node {wish}: the experiment takes {self.wanted}"
        return wish, f"node {wish} is here already" if wish in taken else None

    def _hear(self, node: ConnectedNode) -> None:
        while True:
            message, piece = node.channel.receive()
            if "file" not in message:
                node.answers.put(message)
                continue
            name, directory = str(message["file"]), self._directory
            if directory is None:
                continue
            by_node = dict(enumerate(self._ranks_by_node))
            if not is_result(name, node=node.number, ranks=by_node.get(node.number, ())):
                raise ChannelEndedError("it sent a file that is none of its own")
            keep_piece(directory, message, piece)
