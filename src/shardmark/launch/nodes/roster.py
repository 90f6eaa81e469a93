"""The controller's connections to the nodes: who is there, who was lost, what they say."""

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
from shardmark.launch.nodes.channel import Channel, ChannelEndedError, Message, keep_piece
from shardmark.launch.nodes.run_key import difference
from shardmark.launch.outcome import LostNode

BEAT_SECONDS = 1.0
GREETING_SECONDS = 10.0
_POLL_SECONDS = 0.2


class NodeLostError(ShardmarkError):
    """A node that was asked something is gone."""


@dataclass(slots=True, kw_only=True)
class Member:
    """One node that has come."""

    number: int
    host: str
    address: str
    """Its own end of the connection."""
    dialled: str
    """The controller's end: how that node reaches node 0."""
    channel: Channel
    lost: str | None = None
    prepared: bool = False
    """Whether it has loaded what ranks need."""
    ahead_seconds: float | None = None
    """Of its clock: the most of (sent - received), which the way makes smaller, never larger."""
    answers: queue.SimpleQueue[Message] = field(default_factory=queue.SimpleQueue)

    @property
    def title(self) -> str:
        return f"node {self.number} ({self.host})"


class Roster:
    """Listens for nodes, hears them and has them hear it; from threads of its own.

    `key` says what run this is: a node of another one is refused.
    """

    def __init__(
        self, address: tuple[str, int], *, wanted: int, key: Mapping[str, str], patience: float
    ) -> None:
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._listener = socket.create_server(address, family=family)
        self._listener.settimeout(_POLL_SECONDS)
        self.port = int(self._listener.getsockname()[1])
        self.place = f"{address[0]}:{self.port}"
        self.wanted = wanted
        self._key = dict(key)
        self._patience = patience
        self._members: dict[int, Member] = {}
        self._refusals: list[str] = []
        """Only ever grows: its thread appends, others read."""
        self._directory: Path | None = None
        self._closing = threading.Event()
        self._threads: list[threading.Thread] = []
        self._start(self._accept, "roster-accept")
        self._start(self._beat, "roster-beat")

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
            if len(self._members) >= self.wanted:
                return
            check()
            if time.monotonic() > deadline:
                raise ShardmarkError(self._missing(seconds))
            time.sleep(_POLL_SECONDS / 4)

    def _missing(self, seconds: float) -> str:
        missing = sorted(set(range(self.wanted)) - set(self._members))
        who = f"node {', '.join(map(str, missing))} has not come within {seconds:g} s"
        if self._refusals:
            return "; ".join((who, *dict.fromkeys(self._refusals)))
        return f"{who}; is the same command running there, and can it reach this machine?"

    def member(self, number: int) -> Member:
        return self._members[number]

    def members(self) -> list[Member]:
        return [self._members[number] for number in sorted(self._members)]

    def lost(self, numbers: Iterable[int]) -> LostNode | None:
        """One of those nodes that is lost, if any is."""
        for number in numbers:
            member = self._members.get(number)
            if member is not None and member.lost is not None:
                return LostNode(node=number, host=member.host, reason=member.lost)
        return None

    def keep_files_in(self, directory: Path | None) -> None:
        """Where files go that nodes send from now on; None drops them."""
        self._directory = directory

    def tell(self, number: int, message: Message) -> None:
        """Send; where that cannot be done, the node is lost, which `lost` says."""
        member = self._members[number]
        try:
            member.channel.send(message)
        except ChannelEndedError as ended:
            self._lose(member, str(ended))

    def ask(self, numbers: Iterable[int], message: Message) -> dict[int, Message]:
        """Each node's answer, all at work at once.  Raises `ShardmarkError` if one is lost."""
        asked = list(numbers)
        for number in asked:
            self.tell(number, message)
        found: dict[int, Message] = {}
        while len(found) < len(asked):
            for number in set(asked) - set(found):
                with suppress(queue.Empty):
                    found[number] = self._members[number].answers.get(timeout=_POLL_SECONDS / 4)
            gone = self.lost(set(asked) - set(found))
            if gone is not None:
                raise NodeLostError(f"node {gone.node} ({gone.host}) was lost: {gone.reason}")
        return found

    def close(self) -> None:
        """Tell all nodes that the run is over, and end the threads."""
        for member in self.members():
            if member.lost is None:
                self.tell(member.number, {"do": "bye"})
        self._closing.set()
        for member in self.members():
            member.channel.close()
        self._listener.close()
        for thread in self._threads:
            thread.join()

    def _start(self, work: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=work, name=name, daemon=True)
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
                hello, _ = channel.receive()
                member = self._greet(hello, channel)
            except (ChannelEndedError, KeyError, TypeError, ValueError):
                channel.close()
                continue
            channel.set_patience(self._patience)
            self._members[member.number] = member
            self._start(lambda member=member: self._hear(member), f"roster-{member.number}")  # type: ignore[misc]

    def _greet(self, hello: Message, channel: Channel) -> Member:
        number, problem = self._number(hello)
        if problem is not None:
            who = "a node" if hello["number"] is None else f"node {hello['number']}"
            self._refusals.append(f"{who} ({hello['host']}) came and was refused: {problem}")
            channel.send({"refused": problem})
            raise ChannelEndedError(problem)
        channel.send({"welcome": number, "patience_seconds": self._patience})
        return Member(
            number=number,
            host=str(hello["host"]),
            address=str(hello["address"]),
            dialled=channel.own_address,
            channel=channel,
        )

    def _number(self, hello: Message) -> tuple[int, str | None]:
        """The number that the node gets, or why it gets none."""
        problem = difference(hello["key"], self._key)
        if problem is not None:
            return -1, problem
        taken = {number for number, one in self._members.items() if one.lost is None}
        wish = hello["number"]
        if wish is None:
            free = sorted(set(range(1, self.wanted)) - taken)
            return (free[0], None) if free else (-1, "all nodes are here already")
        if not 0 <= int(wish) < self.wanted:
            return -1, f"there is no node {wish}: the experiment takes {self.wanted}"
        return int(wish), f"node {wish} is here already" if int(wish) in taken else None

    def _hear(self, member: Member) -> None:
        try:
            while True:
                message, piece = member.channel.receive()
                if "beat" in message:
                    ahead = float(message["beat"]) - time.time()
                    member.ahead_seconds = max(ahead, member.ahead_seconds or ahead)
                elif "file" not in message:
                    member.answers.put(message)
                elif self._directory is not None:
                    keep_piece(self._directory, message, piece)
        except (ChannelEndedError, OSError, KeyError) as error:
            self._lose(member, str(error))

    def _beat(self) -> None:
        while not self._closing.wait(min(BEAT_SECONDS, self._patience / 5)):
            for member in self.members():
                if member.lost is None:
                    self.tell(member.number, {"do": "beat"})

    def _lose(self, member: Member, reason: str) -> None:
        if member.lost is None and not self._closing.is_set():
            member.lost = reason
        member.channel.close()
