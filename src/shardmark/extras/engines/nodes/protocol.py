"""The protocol between the controller and a node over one TCP connection.  Imports no torch.

First both prove that they know the run's secret; nothing is parsed before.  Then a message is one
JSON object, which may be followed by a piece of a file.  The controller sends requests,
`{"do": ...}`; a node answers each with one message, and sends files in between.
"""

from __future__ import annotations

import hmac
import json
import math
import os
import re
import secrets
import select
import socket
import stat
import struct
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING, Any, Self

from shardmark.base.errors import InputError
from shardmark.base.results.files import open_regular
from shardmark.base.results.verification import VERDICTS_FILE
from shardmark.base.system.environment_variables import SECRET_VARIABLE
from shardmark.ranks.measure.network.probe import RECORD_FILE

if TYPE_CHECKING:
    from shardmark.experiment.engines import NodeOptions


Message = dict[str, Any]

GREETING_SECONDS = 10.0
"""Time limit for a node to join, from its connection on."""
GREETING_BYTES = 2**16
MESSAGE_SECONDS = 60.0
"""Time limit from the first byte of a message to its last."""
MESSAGE_BYTES = 2**22
PIECE_BYTES = 2**16
"""Largest part of a file in one message, so that heartbeats fit between two messages."""
BEAT_SECONDS = 1.0
INCOMING = ".incoming"
NONCE_BYTES = PROOF_BYTES = 32
_SIZES = struct.Struct("!II")


class ChannelEndedError(Exception):
    """The connection to the other side has ended, with the reason."""


class AuthenticationError(ChannelEndedError):
    """The other side does not know the secret."""


class Channel:
    """A side of a connection.  Any thread may send; one receives.

    Until `keep_alive`, all messages must arrive within `GREETING_SECONDS`.  After it, the
    connection ends if nothing arrives for the time that it is given.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(GREETING_SECONDS)  # limits sending; receiving has its own deadline
        self._connection = connection
        self._sending = threading.Lock()
        self._closing = threading.Event()
        self._beats: threading.Thread | None = None
        self._joined_until = time.monotonic() + GREETING_SECONDS
        self._silence_seconds = GREETING_SECONDS
        self._max_message_bytes = GREETING_BYTES
        self._outgoing: _MessageAuthenticator
        self._incoming: _MessageAuthenticator
        self.ahead_seconds: float | None = None
        """Seconds by which the other side's clock is ahead: the largest difference of sending and
        receiving time, since transmission only reduces it."""

    @property
    def local_address(self) -> str:
        return str(self._connection.getsockname()[0])

    def prove(self, secret: str, *, controls: bool) -> None:
        """Authenticate both sides by the secret, the node first.

        Raises `AuthenticationError`, or another `ChannelEndedError` if the connection ends.
        """
        nonce = os.urandom(NONCE_BYTES)
        with self._converted_errors():
            if controls:
                self._connection.sendall(nonce)
                nonces = nonce + self._exactly(NONCE_BYTES)
                self._check(self._exactly(PROOF_BYTES), _proof(secret, "node", nonces))
                self._connection.sendall(_proof(secret, "controller", nonces))
            else:
                nonces = self._exactly(NONCE_BYTES) + nonce
                self._connection.sendall(nonce + _proof(secret, "node", nonces))
                try:
                    answer = self._exactly(PROOF_BYTES)
                except ChannelEndedError:
                    raise AuthenticationError("it knows another secret, or none") from None
                self._check(answer, _proof(secret, "controller", nonces))
        both = [
            _MessageAuthenticator(_proof(secret, f"from {side}", nonces))
            for side in ("controller", "node")
        ]
        self._outgoing, self._incoming = both if controls else reversed(both)

    def keep_alive(self, silence_seconds: float) -> None:
        """Send heartbeats from now on; end the connection after a silence of so many seconds."""
        self._joined_until = math.inf
        self._max_message_bytes = MESSAGE_BYTES
        self._silence_seconds = silence_seconds
        self._connection.settimeout(silence_seconds)
        beats = threading.Thread(target=self._beat, name="heartbeats", daemon=True)
        beats.start()
        self._beats = beats  # set once it can be joined: another thread may call `close`

    def send(self, message: Message, piece: bytes = b"") -> None:
        """Send a message and a piece of a file.  Raises `ChannelEndedError`."""
        text = json.dumps(message).encode()
        content = _SIZES.pack(len(text), len(piece)) + text + piece
        with self._converted_errors(), self._sending:
            self._connection.sendall(content + self._outgoing.next(content))

    def receive(self) -> tuple[Message, bytes]:
        """Return the next message that is no heartbeat.  Raises `ChannelEndedError`."""
        while True:
            with self._converted_errors():
                sizes = self._exactly(_SIZES.size)
                text_bytes, piece_bytes = _SIZES.unpack(sizes)
                if text_bytes > self._max_message_bytes or piece_bytes > PIECE_BYTES:
                    raise ValueError("too long")
                content = self._exactly(text_bytes + piece_bytes, MESSAGE_SECONDS)
                self._check(self._exactly(PROOF_BYTES), self._incoming.next(sizes + content))
                message = json.loads(content[:text_bytes])
                if not isinstance(message, dict):
                    raise TypeError("no object")
                if "beat" not in message:
                    return message, content[text_bytes:]
                ahead = float(message["beat"]) - time.time()
                self.ahead_seconds = max(ahead, self.ahead_seconds or ahead)

    def send_file(self, file: IO[bytes], name: str) -> None:
        """Send the file's content, which the other side stores under that name."""
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
            self._connection.shutdown(socket.SHUT_RDWR)  # wakes threads that wait for the socket
        self._connection.close()
        if self._beats is not None:
            self._beats.join()

    def _beat(self) -> None:
        with suppress(ChannelEndedError):
            while not self._closing.wait(min(BEAT_SECONDS, self._silence_seconds / 5)):
                self.send({"beat": time.time()})

    def _exactly(self, count: int, seconds: float | None = None) -> bytes:
        """Receive so many bytes within the given time, by default that of a silence."""
        limit_seconds = self._silence_seconds if seconds is None else seconds
        deadline = min(self._joined_until, time.monotonic() + limit_seconds)
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
            raise AuthenticationError("it does not know the secret")

    @contextmanager
    def _converted_errors(self) -> Iterator[None]:
        try:
            yield
        except TimeoutError as error:
            reason = f"nothing was heard for {self._silence_seconds:g} s"
            raise ChannelEndedError(reason) from error
        except OSError as error:
            raise ChannelEndedError(f"its connection broke: {error.strerror or error}") from error
        except (ValueError, TypeError, RecursionError) as error:
            raise ChannelEndedError("it sent data that is no message") from error


class _MessageAuthenticator:
    """Authenticates the messages of one side by an HMAC over a counter and the content."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._count = 0

    def next(self, content: bytes) -> bytes:
        self._count += 1
        return hmac.digest(self._key, self._count.to_bytes(8) + content, "sha256")


def _proof(secret: str, role: str, nonces: bytes) -> bytes:
    return hmac.digest(secret.encode(), role.encode() + nonces, "sha256")


def is_result(name: str, *, node: int, ranks: Collection[int]) -> bool:
    """Return whether ranks of this node write a file of that name in a trial's folder."""
    if name in (f"samples.node-{node}.jsonl", f"agent.node-{node}.log"):
        return True
    if name in (RECORD_FILE, VERDICTS_FILE):
        return node == 0
    patterns = (
        r"rank-(\d+)\.(?:json|progress|steps\.jsonl|capture\.npz)",
        r"logs/(\d+)/(?:stdout|stderr)\.log",
    )
    matches = (re.fullmatch(pattern, name) for pattern in patterns)
    return any(match is not None and int(match[1]) in ranks for match in matches)


def accepted_path(directory: Path, name: str) -> Path:
    """Return the path for a file that the other side sends; raise `ChannelEndedError` if unsafe."""
    relative = PurePosixPath(name)
    if relative.is_absolute() or ".." in relative.parts:
        raise ChannelEndedError("it sent a file for another folder")
    return directory / relative


def store_piece(directory: Path, message: Message, piece: bytes) -> None:
    """Write one piece of a file from `send_file`; the last piece gives the file its name."""
    path = accepted_path(directory, message["file"])
    path.parent.mkdir(parents=True, exist_ok=True)
    incoming = path.with_name(path.name + INCOMING)
    # A node that is lost during the transfer leaves an incomplete file.
    with incoming.open("wb" if message.get("first") else "ab") as file:
        file.write(piece)
    if message["last"]:
        incoming.replace(path)


def files_below(directory: Path) -> Iterator[tuple[Path, str]]:
    """Yield every file below the folder, with its name relative to it."""
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            yield path, path.relative_to(directory).as_posix()


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinOptions:
    """Options of a node's connection to the controller.  Other users can read them: no secret."""

    host: str
    port: int
    key: Mapping[str, str]
    """Properties of the controller's run, from `run_key`."""
    number: int | None = None
    """Number of the node; None takes any that is free."""
    number_variable: str | None = None
    """Environment variable of the node that has its number."""
    with_files: bool = False
    """True if node 0 works in the controller's folders."""
    interface: str | None = None
    join_seconds: float

    @classmethod
    def to(
        cls, host: str, port: int, options: NodeOptions, key: Mapping[str, str], **more: Any
    ) -> Self:
        """Make join options from the options that all engines have."""
        return cls(
            host=host,
            port=port,
            key=key,
            interface=options.interface,
            join_seconds=options.join_seconds,
            **more,
        )

    def words(self) -> list[str]:
        """Return the arguments of Python on the node."""
        return ["-P", "-m", "shardmark.extras.engines.nodes.node", json.dumps(asdict(self))]


def key_difference(node: Mapping[str, str], run: Mapping[str, str]) -> str | None:
    """Return the names in which a node's key differs from the run's; None if they are equal."""
    differing = sorted(key for key in node.keys() | run.keys() if node.get(key) != run.get(key))
    return f"it has another {', '.join(differing)}" if differing else None


MIN_CHARACTERS = 16


def secret_from_environment() -> str | None:
    """Return the secret in the environment.  Raises `InputError` for one that can be guessed."""
    secret = os.environ.get(SECRET_VARIABLE)
    if secret is not None and len(secret) < MIN_CHARACTERS:
        raise InputError(
            SECRET_VARIABLE,
            f"found {len(secret)} characters, which can be guessed",
            f"at least {MIN_CHARACTERS}, the same on every node, such as `openssl rand -hex 32`",
        )
    return secret


def new_secret() -> str:
    """Return a secret for nodes that this process starts."""
    return secret_from_environment() or secrets.token_hex(32)


def shared_secret() -> str:
    """Return the secret for the same command on every node: from the environment or the file.

    A missing file is created.  Raises `InputError` for a file that other users can read.
    """
    return secret_from_environment() or _read(secret_file())


def secret_file() -> Path:
    base = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(base) / "shardmark" / "secret"


def _read(path: Path) -> str:
    remedy = f"have the same file on every node, of mode 0600, or set {SECRET_VARIABLE}"
    try:
        _make(path)
        with open_regular(path) as file:
            status = os.fstat(file.fileno())
            if status.st_uid != os.geteuid():
                raise InputError(str(path), "belongs to another user", remedy)
            if status.st_mode & 0o077:
                mode = f"has mode {stat.S_IMODE(status.st_mode):04o}, so that others can read it"
                raise InputError(str(path), mode, remedy)
            secret = file.readline().decode(errors="replace").strip()
    except OSError as error:
        raise InputError(str(path), f"cannot be used: {error.strerror or error}", remedy) from None
    if len(secret) < MIN_CHARACTERS:
        raise InputError(str(path), f"has fewer than {MIN_CHARACTERS} characters", remedy)
    return secret


def _make(path: Path) -> None:
    """Write a new secret unless there is one; of several nodes, the first one wins."""
    if path.exists():
        return
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(f"{secrets.token_hex(32)}\n")
        path.hardlink_to(temporary)  # atomic
    except FileExistsError:
        pass
    finally:
        temporary.unlink()
