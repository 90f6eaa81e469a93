"""Messages and pieces of files over one TCP connection between the controller and a node."""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any

Message = dict[str, Any]

PIECE_BYTES = 2**16
"""Of a file in one message, so that heartbeats find their way between two of them."""

MOST_BYTES = 64 * 2**20
_SIZES = struct.Struct("!II")
INCOMING = ".incoming"


class ChannelEndedError(Exception):
    """The other side cannot be reached any more, and why."""


class Channel:
    """One side of a connection.  Any thread may send; one receives.

    Heartbeats are the users' to send: where nothing at all arrives for `patience_seconds`, the
    other side counts as gone.
    """

    def __init__(self, connection: socket.socket, *, patience_seconds: float) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = connection
        self._sending = threading.Lock()
        self.set_patience(patience_seconds)

    @property
    def own_address(self) -> str:
        return str(self._connection.getsockname()[0])

    def set_patience(self, seconds: float) -> None:
        """For what is sent and received from now on."""
        self._patience_seconds = seconds
        self._connection.settimeout(seconds)

    def send(self, message: Message, piece: bytes = b"") -> None:
        """Raises `ChannelEndedError`."""
        text = json.dumps(message).encode()
        with self._guarded(), self._sending:
            self._connection.sendall(_SIZES.pack(len(text), len(piece)) + text + piece)

    def receive(self) -> tuple[Message, bytes]:
        """The next message.  Raises `ChannelEndedError`, also when nothing comes for too long."""
        with self._guarded():
            text_bytes, piece_bytes = _SIZES.unpack(self._exactly(_SIZES.size))
            if max(text_bytes, piece_bytes) > MOST_BYTES:
                raise ChannelEndedError("it sent something else than messages")
            message: Message = json.loads(self._exactly(text_bytes))
            return message, self._exactly(piece_bytes)

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
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)  # wakes whoever waits in it
        self._connection.close()

    def _exactly(self, count: int) -> bytes:
        found = bytearray()
        while len(found) < count:
            chunk = self._connection.recv(min(count - len(found), PIECE_BYTES))
            if not chunk:
                raise ChannelEndedError("its connection was closed")
            found += chunk
        return bytes(found)

    def _guarded(self) -> _Guard:
        return _Guard(self._patience_seconds)


class _Guard:
    """StalenessGate every error of a socket into the one that callers know."""

    def __init__(self, patience_seconds: float) -> None:
        self._patience_seconds = patience_seconds

    def __enter__(self) -> None: ...

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, TimeoutError):
            raise ChannelEndedError(
                f"nothing was heard for {self._patience_seconds:g} s"
            ) from error
        if isinstance(error, OSError):
            raise ChannelEndedError(f"its connection broke: {error.strerror or error}") from error
        if isinstance(error, ValueError):
            raise ChannelEndedError("it sent something else than messages") from error


def keep_piece(directory: Path, message: Message, piece: bytes) -> None:
    """Write one piece of a file that `send_file` sends; the file is there when it is whole."""
    name = PurePosixPath(message["file"])
    if name.is_absolute() or ".." in name.parts:
        raise ChannelEndedError(f"it sent a file that is to lie elsewhere: {name}")
    path = directory / name
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
