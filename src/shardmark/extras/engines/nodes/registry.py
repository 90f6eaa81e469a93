"""The controller's connections to the nodes: nodes that joined or were lost, their messages."""

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

from shardmark.base.errors import ShardmarkError
from shardmark.bench.launch.outcome import LostNode
from shardmark.extras.engines.nodes.protocol import (
    AuthenticationError,
    Channel,
    ChannelEndedError,
    Message,
    is_result,
    key_difference,
    store_piece,
)

POLL_SECONDS = 0.2
GREETINGS = 32
"""Most connections that join at once; further ones are closed, and their nodes try again."""
MAX_REFUSALS = 20
"""Most refusals that are reported: anyone may connect any number of times."""
ANSWER_SECONDS = 900.0
"""Time limit for the answer of a live node; loading libraries may take minutes."""


class NodeLostError(ShardmarkError):
    """A node was lost before it answered."""


class Hello(BaseModel):
    """First message of a node."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    number: NonNegativeInt | None
    """Requested number; None takes any that is free."""
    host: str
    address: str
    """Address of the node's end of the connection."""
    with_files: bool
    """True if the node works in the controller's folders."""
    key: dict[str, str]


UNANSWERED = ("end", "bye")
"""Messages that nodes do not answer."""


@dataclass(slots=True, kw_only=True)
class ConnectedNode:
    """A node that has joined."""

    number: int
    host: str
    with_files: bool
    address: str
    controller_address: str
    """Address of the controller's end of the connection, by which the node reaches it."""
    channel: Channel
    lost: LostNode | None = None
    answers: queue.SimpleQueue[Message] = field(default_factory=queue.SimpleQueue)
    requests: int = 0
    """Number of the last message that was sent; a node names it in its answer."""

    @property
    def title(self) -> str:
        return f"node {self.number} ({self.host})"


class NodeRegistry:
    """Listens for nodes, with a thread for each connection.

    A connection without the secret is closed; a node whose `key` belongs to another run is refused.
    """

    def __init__(
        self,
        address: tuple[str, int],
        *,
        num_nodes: int,
        secret: str,
        key: Mapping[str, str],
        silence_seconds: float,
    ) -> None:
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._listener = socket.create_server(address, family=family)
        self.port = int(self._listener.getsockname()[1])
        self.num_nodes = num_nodes
        self._secret = secret
        self._key = dict(key)
        self._silence_seconds = silence_seconds
        self.nodes: dict[int, ConnectedNode] = {}
        self._joining = threading.Lock()
        self._refusals: dict[str, None] = {}
        """Messages about refused nodes, in order, each once."""
        self._greetings = threading.Semaphore(GREETINGS)
        self._channels: set[Channel] = set()
        self._directory: Path | None = None
        self._ranks_by_node: tuple[Collection[int], ...] = ()
        self._closing = threading.Event()
        self._threads: list[threading.Thread] = []
        self._accepting = threading.Thread(target=self._accept, name="node-registry", daemon=True)
        self._accepting.start()

    def wait(
        self, seconds: float, check: Callable[[], None], notify: Callable[[str], None]
    ) -> None:
        """Wait until all nodes have joined, and report those that are refused.

        Raises `ShardmarkError` after the given time, or earlier what `check` raises.
        """
        deadline = time.monotonic() + seconds
        reported = 0
        while True:
            refusals = list(self._refusals)
            for refusal in refusals[reported:]:
                notify(refusal)
            reported = len(refusals)
            missing = sorted(set(range(self.num_nodes)) - set(self.nodes))
            if not missing:
                return
            check()
            if time.monotonic() > deadline:
                problem = f"node {', '.join(map(str, missing))} has not joined within {seconds:g} s"
                hint = "is the same command running there, and can it reach this machine?"
                raise ShardmarkError("; ".join((problem, *(refusals or (hint,)))))
            time.sleep(POLL_SECONDS / 4)

    def in_order(self) -> list[ConnectedNode]:
        return [self.nodes[number] for number in sorted(self.nodes)]

    def lost(self, numbers: Iterable[int]) -> LostNode | None:
        """Return one of the given nodes that is lost, if any is."""
        nodes = (self.nodes.get(number) for number in numbers)
        return next((node.lost for node in nodes if node is not None and node.lost), None)

    def store_files_in(
        self, directory: Path | None, ranks_by_node: tuple[Collection[int], ...] = ()
    ) -> None:
        """Store files that nodes send of their ranks in the folder from now on; None drops them."""
        self._directory, self._ranks_by_node = directory, ranks_by_node

    def send(self, number: int, message: Message) -> None:
        """Send the message; a node that cannot receive it is lost."""
        node = self.nodes[number]
        if message["do"] not in UNANSWERED:
            node.requests += 1
            message = {**message, "request": node.requests}
        try:
            node.channel.send(message)
        except ChannelEndedError as ended:
            self.lose(number, str(ended))

    def send_file(self, number: int, path: Path, name: str) -> None:
        """Send a file; a node that cannot receive it is lost."""
        try:
            with path.open("rb") as file:
                self.nodes[number].channel.send_file(file, name)
        except ChannelEndedError as ended:
            self.lose(number, str(ended))

    def ask(self, numbers: Iterable[int], message: Message) -> dict[int, Message]:
        """Send a request to the nodes and return their answers.  Raises `NodeLostError`.

        If a node is lost, the answers of the others are awaited all the same: a late one would look
        like that to the next request.
        """
        asked = set(numbers)
        waiting = set(asked)
        for number in asked:
            self.send(number, message)
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
            waiting -= {number for number in waiting if self.lost([number])}
        if missing := asked - answers.keys():
            raise NodeLostError(str(self.lost(missing)))
        return dict(sorted(answers.items()))

    def lose(self, number: int, reason: str) -> None:
        """Close the connection to the node, which then ends itself."""
        node = self.nodes[number]
        if node.lost is None and not self._closing.is_set():
            node.lost = LostNode(node=node.number, host=node.host, reason=reason)
        node.channel.close()

    def close(self) -> None:
        """End all nodes and the threads."""
        for node in list(self.nodes.values()):
            if node.lost is None:
                self.send(node.number, {"do": "bye"})
        self._closing.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread in `accept`
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
            except OSError:  # the socket is closed, or too many files are open at the moment
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
        """Serve one connection from its start to its end; its errors end only this connection."""
        node: ConnectedNode | None = None
        reason = ""
        try:
            try:
                node = self._accept_node(channel, address)
            finally:
                self._greetings.release()
            self._receive_from(node)
        except (ChannelEndedError, OSError, KeyError, TypeError, ValueError) as error:
            reason = str(error)
        finally:
            if node is not None and self.nodes[node.number] is node:
                self.lose(node.number, reason)
            channel.close()
            self._channels.discard(channel)

    def _accept_node(self, channel: Channel, address: str) -> ConnectedNode:
        """Authenticate a node, and accept or refuse it."""
        try:
            channel.prove(self._secret, controls=True)
        except AuthenticationError:
            self._refuse(f"a connection from {address} was refused: its secret differs")
            raise
        hello = Hello.model_validate(channel.receive()[0])
        with self._joining:  # several nodes may join at the same time
            number, problem = self._number(hello)
            if problem is not None:
                name = "a node" if hello.number is None else f"node {hello.number}"
                self._refuse(f"{name} ({hello.host}) was refused: {problem}")
                channel.send({"refused": problem})
                raise ChannelEndedError(problem)
            channel.send({"welcome": number, "silence_seconds": self._silence_seconds})
            channel.keep_alive(self._silence_seconds)
            self.nodes[number] = ConnectedNode(
                number=number,
                host=hello.host,
                with_files=hello.with_files,
                address=hello.address,
                controller_address=channel.local_address,
                channel=channel,
            )
        return self.nodes[number]

    def _refuse(self, refusal: str) -> None:
        if len(self._refusals) < MAX_REFUSALS:
            self._refusals[refusal] = None

    def _number(self, hello: Hello) -> tuple[int, str | None]:
        """Return the node's number, or why the node is refused."""
        problem = key_difference(hello.key, self._key)
        if problem is not None:
            return -1, problem
        used = {number for number, node in self.nodes.items() if node.lost is None}
        number = hello.number
        if number is None:
            free = sorted(set(range(1, self.num_nodes)) - used)
            return (free[0], None) if free else (-1, "all nodes have joined already")
        if number >= self.num_nodes:
            return -1, f"there is no node {number}: the experiment takes {self.num_nodes}"
        return number, f"node {number} has joined already" if number in used else None

    def _receive_from(self, node: ConnectedNode) -> None:
        while True:
            message, piece = node.channel.receive()
            if "file" not in message:
                if message.pop("request", node.requests) == node.requests:  # not a late one
                    node.answers.put(message)
                continue
            name, directory = str(message["file"]), self._directory
            if directory is None:
                continue
            by_node = dict(enumerate(self._ranks_by_node))
            if not is_result(name, node=node.number, ranks=by_node.get(node.number, ())):
                raise ChannelEndedError("it sent a file that its ranks do not write")
            store_piece(directory, message, piece)
