"""What the controller and a node say to each other over one TCP connection.  Imports no torch.

Both prove first that they know the run's secret; nothing is parsed before.  Then a message is one
JSON object, followed by a piece of a file where it says so.  The controller sends requests,
`{"do": ...}`; a node answers each with one message, and sends files in between.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import os
import re
import select
import socket
import struct
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING, Any, Self

from shardmark.config.axes import canonical
from shardmark.core.version import __version__
from shardmark.measure.network.probe import RECORD_FILE
from shardmark.measure.system.environment import package_version
from shardmark.results.verification import VERDICTS_FILE

if TYPE_CHECKING:
    from shardmark.config.engines import NodeOptions

Message = dict[str, Any]

GREETING_SECONDS = 10.0
"""For all that is said before a node has joined."""
GREETING_BYTES = 2**16
MESSAGE_SECONDS = 60.0
"""From the first byte of a message to its last."""
MESSAGE_BYTES = 2**22
PIECE_BYTES = 2**16
"""Of a file in one message, so that heartbeats find their way between two of them."""
BEAT_SECONDS = 1.0
INCOMING = ".incoming"
NONCE_BYTES = PROOF_BYTES = 32
_SIZES = struct.Struct("!II")


class ChannelEndedError(Exception):
    """The other side cannot be reached any more, and why."""


class StrangerError(ChannelEndedError):
    """The other side does not know the secret."""


class Channel:
    """One side of a connection.  Any thread may send; one receives.

    Until `keep_alive`, all must be said in `GREETING_SECONDS`.  From then on the other side counts
    as gone where nothing arrives for the time given there.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(GREETING_SECONDS)  # of sending; receiving waits by itself
        self._connection = connection
        self._sending = threading.Lock()
        self._closing = threading.Event()
        self._beats: threading.Thread | None = None
        self._greeted_until = time.monotonic() + GREETING_SECONDS
        self._patience_seconds = GREETING_SECONDS
        self._most_bytes = GREETING_BYTES
        self._own_seals: _Seals
        self._their_seals: _Seals
        self.ahead_seconds: float | None = None
        """Of the other side's clock: the most of (sent - received), which the way makes smaller,
        never larger."""

    @property
    def own_address(self) -> str:
        return str(self._connection.getsockname()[0])

    def prove(self, secret: str, *, controls: bool) -> None:
        """Have both sides prove that they know the secret, the node first.

        Raises `StrangerError`, or another `ChannelEndedError` where nobody answers.
        """
        own = os.urandom(NONCE_BYTES)
        with self._errors_told():
            if controls:
                self._connection.sendall(own)
                nonces = own + self._exactly(NONCE_BYTES)
                self._check(self._exactly(PROOF_BYTES), _proof(secret, "node", nonces))
                self._connection.sendall(_proof(secret, "controller", nonces))
            else:
                nonces = self._exactly(NONCE_BYTES) + own
                self._connection.sendall(own + _proof(secret, "node", nonces))
                try:
                    answer = self._exactly(PROOF_BYTES)
                except ChannelEndedError:
                    raise StrangerError("it knows another secret, or none") from None
                self._check(answer, _proof(secret, "controller", nonces))
        seals = [_Seals(_proof(secret, f"from {side}", nonces)) for side in ("controller", "node")]
        self._own_seals, self._their_seals = seals if controls else reversed(seals)

    def keep_alive(self, patience_seconds: float) -> None:
        """Send heartbeats from now on, and expect them as often."""
        self._greeted_until = math.inf
        self._most_bytes = MESSAGE_BYTES
        self._patience_seconds = patience_seconds
        self._connection.settimeout(patience_seconds)
        beats = threading.Thread(target=self._beat, name="heartbeats", daemon=True)
        beats.start()
        self._beats = beats  # known once it can be joined: another thread may close meanwhile

    def send(self, message: Message, piece: bytes = b"") -> None:
        """Raises `ChannelEndedError`."""
        text = json.dumps(message).encode()
        content = _SIZES.pack(len(text), len(piece)) + text + piece
        with self._errors_told(), self._sending:
            self._connection.sendall(content + self._own_seals.next(content))

    def receive(self) -> tuple[Message, bytes]:
        """The next message that is no heartbeat.  Raises `ChannelEndedError`."""
        while True:
            with self._errors_told():
                sizes = self._exactly(_SIZES.size)
                text_bytes, piece_bytes = _SIZES.unpack(sizes)
                if text_bytes > self._most_bytes or piece_bytes > PIECE_BYTES:
                    raise ValueError("too long")
                content = self._exactly(text_bytes + piece_bytes, MESSAGE_SECONDS)
                self._check(self._exactly(PROOF_BYTES), self._their_seals.next(sizes + content))
                message = json.loads(content[:text_bytes])
                if not isinstance(message, dict):
                    raise TypeError("no object")
                if "beat" not in message:
                    return message, content[text_bytes:]
                ahead = float(message["beat"]) - time.time()
                self.ahead_seconds = max(ahead, self.ahead_seconds or ahead)

    def send_file(self, file: IO[bytes], name: str) -> None:
        """Have the other side hold the file's content under that name."""
        first, piece = True, file.read(PIECE_BYTES)
        while True:
            following = file.read(PIECE_BYTES)
            self.send({"file": name, "first": first, "last": not following}, piece)
            first = False
            if not following:
                return
            piece = following

    def close(self) -> None:
        self._closing.set()
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)  # wakes whoever waits in it
        self._connection.close()
        if self._beats is not None:
            self._beats.join()

    def _beat(self) -> None:
        with suppress(ChannelEndedError):
            while not self._closing.wait(min(BEAT_SECONDS, self._patience_seconds / 5)):
                self.send({"beat": time.time()})

    def _exactly(self, count: int, seconds: float | None = None) -> bytes:
        """So many bytes, in that time altogether."""
        patience = self._patience_seconds if seconds is None else seconds
        deadline = min(self._greeted_until, time.monotonic() + patience)
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        received = bytearray()
        while len(received) < count:
            left_seconds = deadline - time.monotonic()
            if left_seconds <= 0 or not poll.poll(left_seconds * 1000):
                raise TimeoutError
            chunk = self._connection.recv(min(count - len(received), PIECE_BYTES))
            if not chunk:
                raise ChannelEndedError("its connection was closed")
            received += chunk
        return bytes(received)

    @staticmethod
    def _check(proof: bytes, expected: bytes) -> None:
        if not hmac.compare_digest(proof, expected):
            raise StrangerError("it does not know the secret")

    @contextmanager
    def _errors_told(self) -> Iterator[None]:
        try:
            yield
        except TimeoutError as error:
            silent = f"nothing was heard for {self._patience_seconds:g} s"
            raise ChannelEndedError(silent) from error
        except OSError as error:
            raise ChannelEndedError(f"its connection broke: {error.strerror or error}") from error
        except (ValueError, TypeError, RecursionError) as error:
            raise ChannelEndedError("it sent something else than messages") from error


class _Seals:
    """What follows each message of one side: nobody else can send, change or repeat one."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._count = 0

    def next(self, content: bytes) -> bytes:
        self._count += 1
        return hmac.digest(self._key, self._count.to_bytes(8) + content, "sha256")


def _proof(secret: str, role: str, nonces: bytes) -> bytes:
    return hmac.digest(secret.encode(), role.encode() + nonces, "sha256")


def is_result(name: str, *, node: int, ranks: Collection[int]) -> bool:
    """Whether a file of that name below a trial's folder is one that this node's ranks leave."""
    if name in (f"samples.node-{node}.jsonl", f"agent.node-{node}.log"):
        return True
    if name in (RECORD_FILE, VERDICTS_FILE):
        return node == 0
    patterns = (
        r"rank-(\d+)\.(?:json|progress|steps\.jsonl|capture\.npz)",
        r"(?:joined|lost)-(\d+)\.txt",
        r"logs/[^/]+/attempt_\d+/(\d+)/(?:stdout|stderr)\.log",
    )
    matches = (re.fullmatch(pattern, name) for pattern in patterns)
    return any(match is not None and int(match[1]) in ranks for match in matches)


def accepted_path(directory: Path, name: str) -> Path:
    """Where a file that the other side sends is written.  `ChannelEndedError` if nowhere."""
    relative = PurePosixPath(name)
    if relative.is_absolute() or ".." in relative.parts:
        raise ChannelEndedError("it sent a file that is to lie elsewhere")
    return directory / relative


def keep_piece(directory: Path, message: Message, piece: bytes) -> None:
    """Write one piece of a file that `send_file` sends; the file is there when it is whole."""
    path = accepted_path(directory, message["file"])
    path.parent.mkdir(parents=True, exist_ok=True)
    incoming = path.with_name(path.name + INCOMING)
    # A node that was lost in the middle of it leaves a part.
    with incoming.open("wb" if message.get("first") else "ab") as file:
        file.write(piece)
    if message["last"]:
        incoming.replace(path)


def files_below(directory: Path) -> Iterator[tuple[Path, str]]:
    """Every file below the folder, with its name relative to it."""
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            yield path, path.relative_to(directory).as_posix()


@dataclass(frozen=True, slots=True, kw_only=True)
class Invitation:
    """How a node comes to the controller.  Others can read it: the secret is not in it."""

    host: str
    port: int
    key: Mapping[str, str]
    """What the controller's run is: `run_key`."""
    number: int | None = None
    """The node's; None takes any that is free."""
    number_variable: str | None = None
    """The environment variable that holds the number there."""
    with_files: bool = False
    """Whether node 0 works in the controller's own folders."""
    interface: str | None = None
    join_seconds: float

    @classmethod
    def to(
        cls, host: str, port: int, options: NodeOptions, key: Mapping[str, str], **more: Any
    ) -> Self:
        """With the options that every engine has."""
        return cls(
            host=host,
            port=port,
            key=key,
            interface=options.interface,
            join_seconds=options.join_seconds,
            **more,
        )

    def words(self) -> list[str]:
        """What Python is to run on the node."""
        return ["-P", "-m", "shardmark.launch.nodes.node", json.dumps(asdict(self))]


def run_key(experiment: Mapping[str, Any]) -> dict[str, str]:
    """What all nodes of a run must have in common: the experiment's sections, and versions."""
    sections = {
        name: hashlib.sha256(canonical(content).encode()).hexdigest()[:16]
        for name, content in experiment.items()
    }
    return sections | own_versions()


def own_versions() -> dict[str, str]:
    """Those that must be the same on every node."""
    torch = str(package_version("torch"))
    return {"version of shardmark": __version__, "version of torch": torch}


def key_difference(theirs: Mapping[str, str], ours: Mapping[str, str]) -> str | None:
    """Why a node with that key belongs to another run, without values; None if it is ours."""
    differing = sorted(k for k in theirs.keys() | ours.keys() if theirs.get(k) != ours.get(k))
    return f"it has another {', '.join(differing)}" if differing else None
