"""What the controller and a node say to each other over one TCP connection.  Imports no torch.

A message is one JSON object, followed by a piece of a file where it says so.  The controller sends
requests, `{"do": ...}`; a node answers each with one message, and sends files in between.
"""

from __future__ import annotations

import hashlib
import json
import socket
import struct
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Self

from shardmark.config.axes import canonical
from shardmark.core.version import __version__
from shardmark.measure.system.environment import package_version

if TYPE_CHECKING:
    from shardmark.config.engines import NodeOptions

Message = dict[str, Any]

PIECE_BYTES = 2**16
"""Of a file in one message, so that heartbeats find their way between two of them."""
MOST_BYTES = 64 * 2**20
BEAT_SECONDS = 1.0
INCOMING = ".incoming"
_SIZES = struct.Struct("!II")


class ChannelEndedError(Exception):
    """The other side cannot be reached any more, and why."""


class Channel:
    """One side of a connection.  Any thread may send; one receives.

    Where nothing at all arrives for `patience_seconds`, the other side counts as gone.
    """

    def __init__(self, connection: socket.socket, *, patience_seconds: float) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = connection
        self._sending = threading.Lock()
        self._closing = threading.Event()
        self._beats: threading.Thread | None = None
        self._patience_seconds = patience_seconds
        connection.settimeout(patience_seconds)
        self.ahead_seconds: float | None = None
        """Of the other side's clock: the most of (sent - received), which the way makes smaller,
        never larger."""

    @property
    def own_address(self) -> str:
        return str(self._connection.getsockname()[0])

    def keep_alive(self, patience_seconds: float) -> None:
        """Send heartbeats from now on, and expect them as often."""
        self._patience_seconds = patience_seconds
        self._connection.settimeout(patience_seconds)
        self._beats = threading.Thread(target=self._beat, name="heartbeats", daemon=True)
        self._beats.start()

    def send(self, message: Message, piece: bytes = b"") -> None:
        """Raises `ChannelEndedError`."""
        text = json.dumps(message).encode()
        with self._errors_told(), self._sending:
            self._connection.sendall(_SIZES.pack(len(text), len(piece)) + text + piece)

    def receive(self) -> tuple[Message, bytes]:
        """The next message that is no heartbeat.  Raises `ChannelEndedError`."""
        while True:
            with self._errors_told():
                text_bytes, piece_bytes = _SIZES.unpack(self._exactly(_SIZES.size))
                if max(text_bytes, piece_bytes) > MOST_BYTES:
                    raise ValueError("too long")
                message: Message = json.loads(self._exactly(text_bytes))
                piece = self._exactly(piece_bytes)
            if "beat" not in message:
                return message, piece
            ahead = float(message["beat"]) - time.time()
            self.ahead_seconds = max(ahead, self.ahead_seconds or ahead)

    def send_file(self, path: Path, name: str) -> None:
        """Have the other side hold the file's content under that name."""
        with path.open("rb") as file:
            piece = file.read(PIECE_BYTES)
            while True:
                following = file.read(PIECE_BYTES)
                self.send({"file": name, "last": not following}, piece)
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

    def _exactly(self, count: int) -> bytes:
        received = bytearray()
        while len(received) < count:
            chunk = self._connection.recv(min(count - len(received), PIECE_BYTES))
            if not chunk:
                raise ChannelEndedError("its connection was closed")
            received += chunk
        return bytes(received)

    @contextmanager
    def _errors_told(self) -> Iterator[None]:
        try:
            yield
        except TimeoutError as error:
            silent = f"nothing was heard for {self._patience_seconds:g} s"
            raise ChannelEndedError(silent) from error
        except OSError as error:
            raise ChannelEndedError(f"its connection broke: {error.strerror or error}") from error
        except ValueError as error:
            raise ChannelEndedError("it sent something else than messages") from error


def accepted_path(directory: Path, name: str) -> Path:
    """Where a file that the other side sends is written.  `ChannelEndedError` if nowhere."""
    relative = PurePosixPath(name)
    if relative.is_absolute() or ".." in relative.parts:
        raise ChannelEndedError(f"it sent a file that is to lie elsewhere: {name}")
    return directory / relative


def keep_piece(directory: Path, message: Message, piece: bytes) -> None:
    """Write one piece of a file that `send_file` sends; the file is there when it is whole."""
    path = accepted_path(directory, message["file"])
    path.parent.mkdir(parents=True, exist_ok=True)
    incoming = path.with_name(path.name + INCOMING)
    with incoming.open("ab") as file:
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
    """How a node comes to the controller."""

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
        return ["-m", "shardmark.launch.nodes.node", json.dumps(asdict(self))]


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


def key_difference(theirs: Mapping[str, Any], ours: Mapping[str, str]) -> str | None:
    """Why a node with that key belongs to another run; None if it belongs to ours."""
    differing = sorted(k for k in theirs.keys() | ours.keys() if theirs.get(k) != ours.get(k))
    told = [
        f"{name} ({theirs.get(name)}, here {ours.get(name)})" if "version" in name else name
        for name in differing
    ]
    return f"it has another {', '.join(told)}" if told else None
