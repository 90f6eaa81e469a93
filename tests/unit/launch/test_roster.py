"""Who is there, who is refused, who was lost: over real sockets, without processes."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from shardmark.core.errors import ShardmarkError
from shardmark.launch.nodes.channel import PIECE_BYTES, Channel, ChannelEndedError, keep_piece
from shardmark.launch.nodes.roster import Roster
from shardmark.launch.nodes.run_key import difference, sections
from tests.unit.launch.nodes import KEY, FakeNode

PATIENCE = 1.0


@pytest.fixture
def roster() -> Iterator[Roster]:
    made = Roster(("127.0.0.1", 0), wanted=3, key=KEY, patience=PATIENCE)
    yield made
    made.close()


@pytest.fixture
def come(roster: Roster) -> Iterator[Callable[..., FakeNode]]:
    nodes: list[FakeNode] = []

    def node(number: int | None, **changes: str) -> FakeNode:
        nodes.append(FakeNode(roster, number, **changes))  # type: ignore[arg-type]
        return nodes[-1]

    yield node
    for one in nodes:
        one.close()


def until(condition: Callable[[], object], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "in vain"
        time.sleep(0.01)


def nothing() -> None: ...


def silent(_: str) -> None: ...


def test_nodes_are_numbered_by_wish_or_as_they_come(
    roster: Roster, come: Callable[..., FakeNode]
) -> None:
    numbers = [come(wish).greeting.get("welcome") for wish in (None, 0, None)]
    assert numbers == [1, 0, 2], "none is made node 0, which has the controller's files"
    roster.wait(5, nothing, silent)
    assert [member.number for member in roster.members()] == [0, 1, 2]


@pytest.mark.parametrize(
    ("number", "key", "reason"),
    [
        (1, {"experiment": "other"}, "its experiment is other, here it is e"),
        (1, {"torch": "2"}, "its torch is 2, here it is 1"),
        (3, {}, "there is no node 3: the experiment takes 3"),
        (0, {}, "node 0 is here already"),
    ],
)
def test_strangers_are_refused_with_the_reason(
    come: Callable[..., FakeNode], number: int, key: dict[str, str], reason: str
) -> None:
    come(0)
    assert come(number, **key).greeting == {"refused": reason}


def test_one_too_many_is_refused(come: Callable[..., FakeNode]) -> None:
    for number in range(3):
        come(number)
    assert come(None).greeting == {"refused": "all nodes are here already"}


def test_who_has_not_come_is_named(roster: Roster, come: Callable[..., FakeNode]) -> None:
    come(1)
    with pytest.raises(ShardmarkError, match=r"node 0, 2 has not come within 0\.1 s"):
        roster.wait(0.1, nothing, silent)


def test_who_came_and_was_refused_is_told_at_once(
    roster: Roster, come: Callable[..., FakeNode]
) -> None:
    """While others are still waited for; and why nobody else came is said in the end."""
    come(0)
    come(1, torch="2")
    come(None, experiment="other")
    told: list[tuple[str, float]] = []
    refused = [
        "node 1 (host-1) came and was refused: its torch is 2, here it is 1",
        "a node (host-None) came and was refused: its experiment is other, here it is e",
    ]
    started = time.monotonic()
    with pytest.raises(ShardmarkError) as caught:
        roster.wait(1, nothing, lambda text: told.append((text, time.monotonic() - started)))
    assert [text for text, _ in told] == refused
    assert max(seconds for _, seconds in told) < 0.9, "before the time is up"
    assert str(caught.value) == "; ".join(("node 1, 2 has not come within 1 s", *refused))


def test_sections_that_differ_are_named() -> None:
    """In whatever order they come; a section that one side lacks differs, too."""
    content = {"name": "e", "recipe": {"steps": 1}, "matrix": {"strategy": ["ddp"]}}
    here = {"experiment": sections(content), "torch": "1"}
    assert difference(here, here) is None
    other = sections(content | {"recipe": {"steps": 2}, "matrix": {"strategy": ["fsdp"]}})
    said = "its experiment is another one, with a different matrix, recipe"
    assert difference(here | {"experiment": other}, here) == said
    fewer = sections({key: content[key] for key in ("name", "recipe")})
    said = "its experiment is another one, with a different matrix"
    assert difference(here | {"experiment": fewer}, here) == said
    assert difference({"torch": "1"}, here) == (
        f"its experiment is None, here it is {here['experiment']}"
    )


def test_something_that_is_no_node_is_sent_away(roster: Roster) -> None:
    with socket.create_connection(("127.0.0.1", roster.port)) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        stranger.settimeout(5)
        with suppress(ConnectionResetError):  # the same, told less politely
            assert stranger.recv(100) == b""
    assert roster.members() == []


def test_answers_come_from_all(roster: Roster, come: Callable[..., FakeNode]) -> None:
    nodes = [come(number) for number in range(3)]
    roster.wait(10, nothing, silent)
    nodes[2].answers["machine"] = {"cores": 7}
    found = roster.ask([0, 2], {"do": "machine", "device": "cpu"})
    assert found[2] == {"cores": 7}
    assert set(found) == {0, 2}
    assert nodes[1].asked == []


def test_closed_connection_loses_the_node_at_once(
    roster: Roster, come: Callable[..., FakeNode]
) -> None:
    come(0)
    come(1).close()
    until(lambda: roster.lost([0, 1]))
    lost = roster.lost([0, 1])
    assert lost is not None
    assert (lost.node, lost.host, lost.reason) == (1, "host-1", "its connection was closed")
    assert roster.lost([0]) is None
    with pytest.raises(ShardmarkError, match=r"node 1 \(host-1\) was lost: its connection was"):
        roster.ask([0, 1], {"do": "machine"})


def test_silence_loses_the_node_after_the_stated_time(
    roster: Roster, come: Callable[..., FakeNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    started = time.monotonic()
    silent = come(0)
    monkeypatch.setattr(silent, "beat", nothing)
    come(1)
    until(lambda: roster.lost([0]))
    assert PATIENCE <= time.monotonic() - started < PATIENCE + 3
    lost = roster.lost([0, 1])
    assert lost is not None
    assert (lost.node, lost.reason) == (0, "nothing was heard for 1 s")


def test_lost_node_may_come_back(roster: Roster, come: Callable[..., FakeNode]) -> None:
    come(1).close()
    until(lambda: roster.lost([1]))
    assert come(1).greeting["welcome"] == 1
    until(lambda: roster.lost([1]) is None)
    assert not roster.member(1).prepared


def test_clocks_are_compared(roster: Roster) -> None:
    node = FakeNode(roster, 0, ahead_seconds=100.0)
    for _ in range(3):
        node.beat()
    until(lambda: roster.members() and roster.member(0).ahead_seconds is not None)
    assert roster.member(0).ahead_seconds == pytest.approx(100, abs=0.2)
    node.close()


def test_files_arrive_whole_in_the_folder(
    roster: Roster, come: Callable[..., FakeNode], tmp_path: Path
) -> None:
    """In pieces, below folders, and also when they are empty."""
    content = bytes(range(256)) * (PIECE_BYTES // 256) * 2 + b"end"
    (tmp_path / "large").write_bytes(content)
    (tmp_path / "empty").write_bytes(b"")
    folder = tmp_path / "kept"
    folder.mkdir()
    node = come(1)
    node.channel.send_file(tmp_path / "empty", "dropped")
    until(roster.members)
    roster.ask([1], {"do": "machine"})
    roster.keep_files_in(folder)
    for name in ("large", "empty"):
        node.channel.send_file(tmp_path / name, f"logs/{name}")
    roster.ask([1], {"do": "machine"})
    assert (folder / "logs" / "large").read_bytes() == content
    assert {path.name for path in folder.rglob("*")} == {"logs", "large", "empty"}


@pytest.mark.parametrize("name", ["../away", "/tmp/away", "a/../../away"])
def test_files_stay_in_the_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(ChannelEndedError, match="to lie elsewhere"):
        keep_piece(tmp_path / "inside", {"file": name, "last": True}, b"")
    assert list(tmp_path.iterdir()) == []


def test_sender_of_a_bad_name_is_lost(
    roster: Roster, come: Callable[..., FakeNode], tmp_path: Path
) -> None:
    roster.keep_files_in(tmp_path)
    come(1).channel.send({"file": "../away", "last": True})
    until(lambda: roster.members() and roster.lost([1]))


@pytest.mark.parametrize("sent", [b"\xff" * 8, b"\x00\x00\x00\x02\x00\x00\x00\x00{{"])
def test_messages_of_no_sense_end_the_channel(sent: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        theirs = socket.create_connection(server.getsockname())
        channel = Channel(server.accept()[0], patience_seconds=5)
    theirs.sendall(sent)
    with pytest.raises(ChannelEndedError, match="something else than messages"):
        channel.receive()
    channel.close()
    theirs.close()
