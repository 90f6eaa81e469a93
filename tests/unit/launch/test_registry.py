"""Who is there, who is refused, who was lost: over real sockets, without processes."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from shardmark.core.errors import ShardmarkError
from shardmark.launch.nodes.protocol import (
    PIECE_BYTES,
    Channel,
    ChannelEndedError,
    accepted_path,
    key_difference,
    run_key,
)
from shardmark.launch.nodes.registry import NodeRegistry
from tests.unit.launch.nodes import KEY, FakeNode, until

PATIENCE_SECONDS = 1.0
Come = Callable[..., FakeNode]


@pytest.fixture
def registry() -> Iterator[NodeRegistry]:
    made = NodeRegistry(("127.0.0.1", 0), wanted=3, key=KEY, patience_seconds=PATIENCE_SECONDS)
    yield made
    made.close()


@pytest.fixture
def come(registry: NodeRegistry) -> Iterator[Come]:
    nodes: list[FakeNode] = []

    def node(number: int | None, **changes: str) -> FakeNode:
        nodes.append(FakeNode(registry, number, **changes))  # type: ignore[arg-type]
        return nodes[-1]

    yield node
    for node_ in nodes:
        node_.close()


def wait(registry: NodeRegistry, seconds: float, told: list[str]) -> None:
    registry.wait(seconds, lambda: None, told.append)


def test_nodes_are_numbered_by_wish_or_as_they_come(registry: NodeRegistry, come: Come) -> None:
    numbers = [come(wish).greeting.get("welcome") for wish in (None, 0, None)]
    assert numbers == [1, 0, 2], "none is made node 0, which has the controller's files"
    wait(registry, 5, [])
    assert [node.number for node in registry.in_order()] == [0, 1, 2]
    assert come(None).greeting == {"refused": "all nodes are here already"}


@pytest.mark.parametrize(
    ("number", "key", "reason"),
    [
        (1, {"recipe": "other"}, "it has another recipe"),
        (1, {"version of torch": "0"}, "it has another version of torch (0, here "),
        (3, {}, "there is no node 3: the experiment takes 3"),
        (0, {}, "node 0 is here already"),
    ],
)
def test_strangers_are_refused_with_the_reason(
    come: Come, number: int, key: dict[str, str], reason: str
) -> None:
    come(0)
    assert come(number, **key).greeting["refused"].startswith(reason)


def test_who_came_and_was_refused_is_told_while_others_are_awaited(
    registry: NodeRegistry, come: Come
) -> None:
    come(0)
    come(1, recipe="other")
    told: list[str] = []
    refused = "node 1 (host-1) came and was refused: it has another recipe"
    with pytest.raises(ShardmarkError) as caught:
        wait(registry, 0.3, told)
    assert told == [refused]
    assert refused in str(caught.value)


def test_sections_that_differ_are_named() -> None:
    content = {"name": "e", "recipe": {"steps": 1}, "matrix": {"strategy": ["ddp"]}}
    ours = run_key(content)
    assert key_difference(run_key(dict(reversed(content.items()))), ours) is None
    theirs = run_key({"name": "e", "recipe": {"steps": 2}})
    assert key_difference(theirs, ours) == "it has another matrix, recipe"


def test_answers_come_from_those_that_were_asked(registry: NodeRegistry, come: Come) -> None:
    nodes = [come(number) for number in range(3)]
    wait(registry, 10, [])
    nodes[2].answers["machine"] = {"cores": 7}
    answers = registry.ask([2, 0], {"do": "machine", "device": "cpu"})
    assert (list(answers), answers[2]) == ([0, 2], {"cores": 7})
    assert nodes[1].asked == []


def test_closed_connection_loses_the_node_until_it_comes_back(
    registry: NodeRegistry, come: Come
) -> None:
    come(0)
    come(1).close()
    until(lambda: registry.lost([0, 1]))
    lost = registry.lost([0, 1])
    assert str(lost) == "node 1 (host-1) was lost: its connection was closed"
    assert registry.lost([0]) is None
    with pytest.raises(ShardmarkError, match=r"node 1 \(host-1\) was lost: its connection was"):
        registry.ask([0, 1], {"do": "machine"})
    assert come(1).greeting["welcome"] == 1
    until(lambda: registry.lost([1]) is None)
    assert not registry.nodes[1].loaded


def test_silence_loses_the_node_after_the_stated_time(registry: NodeRegistry) -> None:
    connection = socket.create_connection(("127.0.0.1", registry.port))
    silent = Channel(connection, patience_seconds=30)
    hello = {"number": 1, "host": "b", "address": "", "with_files": False, "key": KEY}
    silent.send(hello)
    started = time.monotonic()
    until(lambda: registry.lost([1]))
    assert PATIENCE_SECONDS <= time.monotonic() - started + 0.1 < PATIENCE_SECONDS + 3
    assert str(registry.lost([1])) == "node 1 (b) was lost: nothing was heard for 1 s"
    silent.close()


def test_clocks_are_compared(registry: NodeRegistry) -> None:
    node = FakeNode(registry, 0, ahead_seconds=100.0)
    until(lambda: registry.nodes and registry.nodes[0].channel.ahead_seconds is not None)
    assert registry.nodes[0].channel.ahead_seconds == pytest.approx(100, abs=0.2)
    node.close()


def test_files_arrive_whole_in_the_folder(
    registry: NodeRegistry, come: Come, tmp_path: Path
) -> None:
    """In pieces, below folders, and also when they are empty."""
    content = bytes(range(256)) * (PIECE_BYTES // 256) * 2 + b"end"
    (tmp_path / "large").write_bytes(content)
    (tmp_path / "empty").write_bytes(b"")
    folder = tmp_path / "kept"
    folder.mkdir()
    node = come(1)
    node.channel.send_file(tmp_path / "empty", "dropped")
    until(lambda: registry.nodes)
    registry.ask([1], {"do": "machine"})
    registry.keep_files_in(folder)
    for name in ("large", "empty"):
        node.channel.send_file(tmp_path / name, f"logs/{name}")
    registry.ask([1], {"do": "machine"})
    assert (folder / "logs" / "large").read_bytes() == content
    assert {path.name for path in folder.rglob("*")} == {"logs", "large", "empty"}
    node.channel.send({"file": "../away", "last": True})
    until(lambda: registry.lost([1]))
    assert not (tmp_path / "away").exists()


@pytest.mark.parametrize("name", ["../away", "/tmp/away", "a/../../away"])
def test_files_stay_in_the_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(ChannelEndedError, match="to lie elsewhere"):
        accepted_path(tmp_path, name)


@pytest.mark.parametrize(
    "sent", [b"\xff" * 8, b"\x00\x00\x00\x02\x00\x00\x00\x00{{", b"GET / HTTP/1.1\r\n\r\n"]
)
def test_something_that_is_no_node_is_sent_away(registry: NodeRegistry, sent: bytes) -> None:
    with socket.create_connection(("127.0.0.1", registry.port)) as stranger:
        stranger.sendall(sent)
        stranger.settimeout(5)
        with suppress(ConnectionResetError):  # the same, told less politely
            assert stranger.recv(100) == b""
    assert registry.nodes == {}
