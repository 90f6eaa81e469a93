"""Nodes that are present, refused or lost: over real sockets, without processes."""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import pytest

from shardmark.base.errors import ShardmarkError
from shardmark.bench.launch.engine import run_key
from shardmark.extras.engines.nodes import registry as registry_module
from shardmark.extras.engines.nodes.protocol import (
    PIECE_BYTES,
    ChannelEndedError,
    accepted_path,
    key_difference,
)
from shardmark.extras.engines.nodes.registry import POLL_SECONDS, NodeRegistry
from tests.unit.extras.engines.nodes import PORT, FakeNode, connected, hello, listening
from tests.waiting import wait_for

PATIENCE_SECONDS = 1.0
Come = Callable[..., FakeNode]


@pytest.fixture
def registry() -> Iterator[NodeRegistry]:
    with listening(3, PATIENCE_SECONDS) as made:
        yield made


@pytest.fixture
def come(registry: NodeRegistry) -> Iterator[Come]:
    nodes: list[FakeNode] = []

    def node(number: int | None, **changes: str) -> FakeNode:
        nodes.append(FakeNode(registry, number, **changes))  # type: ignore[arg-type]
        return nodes[-1]

    yield node
    for node_ in nodes:
        node_.close()


def wait(registry: NodeRegistry, seconds: float, messages: list[str]) -> None:
    registry.wait(seconds, lambda: None, messages.append)


def test_nodes_get_their_requested_or_the_next_free_number(
    registry: NodeRegistry, come: Come
) -> None:
    numbers = [come(wish).greeting.get("welcome") for wish in (None, 0, None)]
    assert numbers == [1, 0, 2], "none is made node 0, which has the controller's files"
    wait(registry, 5, [])
    assert [node.number for node in registry.in_order()] == [0, 1, 2]
    assert come(None).greeting == {"refused": "all nodes have joined already"}


@pytest.mark.parametrize(
    ("number", "key", "reason"),
    [
        (1, {"recipe": "other"}, "it has another recipe"),
        (1, {"version of torch": "0"}, "it has another version of torch"),
        (3, {}, "there is no node 3: the experiment takes 3"),
        (0, {}, "node 0 has joined already"),
    ],
)
def test_nodes_of_other_runs_are_refused(
    registry: NodeRegistry, come: Come, number: int, key: dict[str, str], reason: str
) -> None:
    come(0)
    assert come(number, **key).greeting == {"refused": reason}
    messages: list[str] = []
    with pytest.raises(ShardmarkError) as caught:
        wait(registry, 0.1, messages)
    assert messages == [f"node {number} (host-{number}) was refused: {reason}"]
    assert messages[0] in str(caught.value)


def test_key_difference_names_sections() -> None:
    content = {"name": "e", "recipe": {"steps": 1}, "matrix": {"strategy": ["ddp"]}}
    ours = run_key(content)
    assert key_difference(run_key(dict(reversed(content.items()))), ours) is None
    theirs = run_key({"name": "e", "recipe": {"steps": 2}})
    assert key_difference(theirs, ours) == "it has another matrix, recipe"


def test_answers_come_from_the_asked_nodes(
    registry: NodeRegistry, come: Come, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that sends heartbeats but no answer is lost in time."""
    nodes = [come(number) for number in range(3)]
    wait(registry, 10, [])
    nodes[2].answers["machine"] = {"cores": 7}
    answers = registry.ask([2, 0], {"do": "machine", "device": "cpu"})
    assert (list(answers), answers[2]) == ([0, 2], {"cores": 7})
    assert nodes[1].asked == []
    monkeypatch.setattr(registry_module, "ANSWER_SECONDS", 0.1)
    with pytest.raises(ShardmarkError, match="was lost: it did not answer"):
        registry.ask([0, 1], {"do": "what it does not know"})


def test_closed_connection_loses_the_node_until_it_returns(
    registry: NodeRegistry, come: Come
) -> None:
    come(0)
    come(1).close()
    wait_for(lambda: registry.lost([0, 1]))
    lost = registry.lost([0, 1])
    assert str(lost) == "node 1 (host-1) was lost: its connection was closed"
    assert registry.lost([0]) is None
    with pytest.raises(ShardmarkError, match=r"node 1 \(host-1\) was lost: its connection was"):
        registry.ask([0, 1], {"do": "machine"})
    assert come(1).greeting["welcome"] == 1
    wait_for(lambda: registry.lost([1]) is None)


def test_a_late_answer_is_not_that_to_the_next_request(registry: NodeRegistry, come: Come) -> None:
    """The first node of two is lost while the second has still to answer."""
    slow = come(0)
    come(1).close()
    wait_for(lambda: registry.lost([1]))
    del slow.answers["load"]
    later = threading.Timer(0.3, lambda: slow.channel.send({"to": "load"}))
    later.start()
    with pytest.raises(ShardmarkError, match=r"node 1 .* was lost"):
        registry.ask([0, 1], {"do": "load"})
    later.join()
    assert registry.ask([0], {"do": "port"}) == {0: {"port": PORT}}


def test_silence_loses_the_node_after_the_stated_time() -> None:
    with listening(2, silence_seconds=0.4) as registry:
        silent = connected(registry)
        silent.send(hello(1))
        started = time.monotonic()
        wait_for(lambda: registry.lost([1]))
        assert time.monotonic() - started >= 0.3
        assert str(registry.lost([1])) == "node 1 (host-1) was lost: nothing was heard for 0.4 s"
        silent.close()


def test_files_arrive_complete(registry: NodeRegistry, come: Come, tmp_path: Path) -> None:
    """Files are sent in pieces, below folders, and also when they are empty."""
    content = bytes(range(256)) * (PIECE_BYTES // 256) * 2 + b"end"
    node = come(1)
    node.send_file(b"", "dropped")
    wait_for(lambda: registry.nodes)
    registry.ask([1], {"do": "machine"})
    registry.store_files_in(tmp_path, ((0,), (1, 2)))
    node.send_file(content, "logs/2/stdout.log")
    node.send_file(b"", "rank-1.steps.jsonl")
    registry.ask([1], {"do": "machine"})
    assert (tmp_path / "logs/2/stdout.log").read_bytes() == content
    files = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert files == {"stdout.log", "rank-1.steps.jsonl"}


@pytest.mark.parametrize("name", ["../away", "/tmp/away", "a/../../away"])
def test_files_stay_in_the_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(ChannelEndedError, match="for another folder"):
        accepted_path(tmp_path, name)


def test_registry_waits_when_descriptors_run_out() -> None:
    waited: list[float | None] = []

    class Closing(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waited.append(timeout)
            self.set()
            return True

    class Listener:
        def accept(self) -> None:
            raise OSError(errno.EMFILE, "Too many open files")

    registry = NodeRegistry.__new__(NodeRegistry)
    registry._closing = Closing()
    registry._listener = cast("socket.socket", Listener())
    registry._accept()
    assert waited == [POLL_SECONDS]
