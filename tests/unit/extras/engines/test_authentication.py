"""Attacks on the port of a run over several nodes, each carried out: nobody gets in."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardmark.base.errors import InputError, ShardmarkError
from shardmark.extras.engines.nodes import protocol
from shardmark.extras.engines.nodes import registry as registry_module
from shardmark.extras.engines.nodes.node import join
from shardmark.extras.engines.nodes.protocol import (
    AuthenticationError,
    Channel,
    ChannelEndedError,
    JoinOptions,
    Message,
    new_secret,
    secret_file,
    shared_secret,
)
from shardmark.extras.engines.nodes.registry import NodeRegistry
from tests.unit.extras.engines.nodes import (
    KEY,
    SECRET,
    FakeNode,
    connected,
    hello,
    listening,
    node_options,
)
from tests.waiting import wait_for

GREETING_SECONDS = 0.8
PATIENCE_SECONDS = 1.0


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[NodeRegistry]:
    monkeypatch.setattr(protocol, "GREETING_SECONDS", GREETING_SECONDS)
    with listening(2, PATIENCE_SECONDS) as made:
        yield made


def dial(registry: NodeRegistry) -> socket.socket:
    stranger = socket.create_connection(("127.0.0.1", registry.port))
    stranger.settimeout(5)
    return stranger


def closed(stranger: socket.socket) -> bool:
    """Tell if the other side ends the connection, and sends only its challenge before."""
    said = b""
    with suppress(ConnectionError):
        while piece := stranger.recv(4096):
            said += piece
    return len(said) <= protocol.NONCE_BYTES


def check_open(registry: NodeRegistry) -> None:
    """An honest node is still welcome."""
    with closing(FakeNode(registry, 1)) as node:
        assert node.greeting["welcome"] == 1


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"\xff" * 1000,
        b"GET / HTTP/1.1\r\n\r\n" * 10,
        b"\x80\x04cos\nsystem\n(S'touch /tmp/in'\ntR." * 10,
        b'\x00\x00\x00\x11\x00\x00\x00\x00{"key": "text"}  ' * 10,
    ],
)
def test_controller_sends_nothing_before_authentication(
    registry: NodeRegistry, sent: bytes
) -> None:
    with dial(registry) as stranger:
        stranger.sendall(sent)
        assert closed(stranger)
    assert registry.nodes == {}
    check_open(registry)


def test_proofs_with_another_secret_or_of_another_connection_fail(registry: NodeRegistry) -> None:
    with dial(registry) as first, dial(registry) as second:
        challenges = [stranger.recv(protocol.NONCE_BYTES) for stranger in (first, second)]
        own = bytes(protocol.NONCE_BYTES)
        replayed = protocol._proof("known to the nodes alone", "node", challenges[0] + own)
        second.sendall(own + replayed)
        assert closed(second)
    channel = Channel(dial(registry))
    with pytest.raises(AuthenticationError):
        channel.prove("a guess of the stranger's", controls=False)
    channel.close()
    told: list[str] = []
    with pytest.raises(ShardmarkError):
        registry.wait(0.2, lambda: None, told.append)
    (line,) = told
    assert "127.0.0.1" in line
    assert "secret" in line


def test_a_controller_that_does_not_know_the_secret_gets_no_node() -> None:
    with socket.create_server(("127.0.0.1", 0)) as false:
        node = Channel(socket.create_connection(false.getsockname()))
        accepted, _ = false.accept()
        with accepted:
            accepted.sendall(bytes(protocol.NONCE_BYTES + protocol.PROOF_BYTES))
            with pytest.raises(AuthenticationError):
                node.prove("known to the nodes alone", controls=False)
        node.close()


def test_slow_connections_do_not_delay_nodes(registry: NodeRegistry) -> None:
    """Two that say nothing, and one that says a byte now and then: one deadline for all of it."""
    with dial(registry), dial(registry), dial(registry) as slow:
        check_open(registry)
        with pytest.raises(ConnectionError):  # noqa: PT012
            while True:
                slow.sendall(b"x")
                time.sleep(GREETING_SECONDS / 5)


def test_many_connections_do_not_lock_nodes_out(
    registry: NodeRegistry,
) -> None:
    with ExitStack() as strangers:
        for _ in range(registry_module.GREETINGS + 3):
            strangers.enter_context(dial(registry))
        wait_for(lambda: len(registry._channels) == registry_module.GREETINGS)
        join_options = JoinOptions.to("127.0.0.1", registry.port, node_options(), KEY, number=1)
        node = join(join_options, SECRET)  # it finds no room at first
        assert node.number == 1
        node._channel.close()


@pytest.mark.parametrize(
    "said",
    [
        hello(key="text"),
        hello() | {"number": "1"},
        hello() | {"number": True},
        hello() | {"more": 1},
        {"key": {}},
        {"beat": []},
        {"host": "x" * protocol.GREETING_BYTES},
    ],
)
def test_malformed_greeting_ends_only_its_connection(registry: NodeRegistry, said: Message) -> None:
    """Also from one that knows the secret."""
    channel = connected(registry)
    channel.send(said)
    with pytest.raises(ChannelEndedError):
        channel.receive()
    channel.close()
    check_open(registry)


@pytest.mark.parametrize("text", [b"5", b"[]", b"[" * 60_000, b'"text"', b"{{", b"\xff"])
def test_node_that_sends_malformed_messages_is_lost(registry: NodeRegistry, text: bytes) -> None:
    node = FakeNode(registry, 1)
    wait_for(lambda: registry.nodes)
    content = protocol._SIZES.pack(len(text), 0) + text
    with node.channel._sending:
        seal = node.channel._outgoing.next(content)
        node.channel._connection.sendall(content + seal)
    wait_for(lambda: registry.lost([1]))
    assert "no message" in str(registry.lost([1]))
    node.close()
    check_open(registry)


def test_changed_or_repeated_message_is_refused(registry: NodeRegistry) -> None:
    node = FakeNode(registry, 1)
    wait_for(lambda: registry.nodes)
    text = b'{"beat": 0}'
    content = protocol._SIZES.pack(len(text), 0) + text
    with node.channel._sending:
        sealed = content + node.channel._outgoing.next(content)
        node.channel._connection.sendall(sealed * 2)
    wait_for(lambda: registry.lost([1]))
    assert "does not know the secret" in str(registry.lost([1]))
    node.close()


def test_connection_may_close_while_it_joins(
    registry: NodeRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel = connected(registry)
    start = threading.Thread.start

    def close_first(thread: threading.Thread) -> None:
        channel.close()
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", close_first)
    channel.keep_alive(PATIENCE_SECONDS)


@pytest.mark.parametrize(
    "name",
    [
        *("trial.json", "result.json", "result.py", "numpy.py", "cells.json", "logs/numpy.py"),
        *("rank-0.json", "rank-1.py", "rank-1.json/x", "../rank-1.json", "/tmp/rank-1.json"),
        *("samples.node-0.jsonl", "verdicts.json", "agent.json", "logs/0/stdout.log"),
    ],
)
def test_node_may_send_only_files_of_its_ranks(
    registry: NodeRegistry, tmp_path: Path, name: str
) -> None:
    folder = tmp_path / "trial"
    folder.mkdir()
    node = FakeNode(registry, 1)
    wait_for(lambda: registry.nodes)
    registry.store_files_in(folder, ((0,), (1,)))
    with suppress(ChannelEndedError):
        node.send_file(b"import os", name)
    wait_for(lambda: registry.lost([1]))
    assert list(tmp_path.rglob("*")) == [folder]
    node.close()


SAID = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=4,
)
WORDS = st.sampled_from(["number", "host", "address", "with_files", "key", "beat", "file", "last"])


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(raw=st.binary(max_size=200), said=st.dictionaries(WORDS, SAID), joins=st.booleans())
def test_random_data_ends_only_its_connection(
    registry: NodeRegistry, tmp_path: Path, raw: bytes, said: Message, *, joins: bool
) -> None:
    """Before the proof, in its greeting, and by a node that has joined."""
    registry.store_files_in(tmp_path, ((0,), (1,)))
    with dial(registry) as stranger, suppress(ConnectionError):
        stranger.sendall(raw)
    channel = connected(registry)
    if joins:
        channel.send(hello(None))
        channel.receive()
    with suppress(ChannelEndedError):
        channel.send(said)
    channel.close()
    assert registry._accepting.is_alive()
    wait_for(lambda: not registry._channels or registry.lost([1]) or not joins)
    assert not list(tmp_path.iterdir())


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("SHARDMARK_SECRET", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return tmp_path


def test_secret_file_is_created_once_and_private(home: Path) -> None:
    first = shared_secret()
    assert len(first) == 64
    assert shared_secret() == first
    assert secret_file().stat().st_mode & 0o777 == 0o600
    assert [path.name for path in secret_file().parent.iterdir()] == ["secret"]
    assert new_secret() != new_secret()
    assert home in secret_file().parents


@pytest.mark.parametrize("made", ["0644", "a link", "a FIFO", "short"])
def test_readable_secret_file_is_refused(home: Path, made: str) -> None:
    secret = shared_secret()
    file = secret_file()
    if made == "0644":
        file.chmod(0o644)
    elif made == "a link":
        file.rename(home / "elsewhere")
        file.symlink_to(home / "elsewhere")
    elif made == "a FIFO":
        file.unlink()
        os.mkfifo(file, 0o600)
    else:
        file.write_text("guess me\n")
    with pytest.raises(InputError) as caught:
        shared_secret()
    assert str(file) in str(caught.value)
    assert secret not in str(caught.value)


def test_secret_of_the_environment_comes_first(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDMARK_SECRET", "a secret of some length")
    assert shared_secret() == new_secret() == "a secret of some length"
    assert not any(home.iterdir())
    monkeypatch.setenv("SHARDMARK_SECRET", "short")
    with pytest.raises(InputError, match="SHARDMARK_SECRET: found 5 characters"):
        new_secret()
