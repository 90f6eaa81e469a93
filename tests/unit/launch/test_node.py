"""What a node sends while a trial runs, and what it answers: without ranks."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardmark.launch.nodes import mirror as mirroring
from shardmark.launch.nodes import node
from shardmark.launch.nodes.joining import join
from shardmark.launch.nodes.mirror import Mirror
from shardmark.launch.nodes.node import Node
from shardmark.launch.nodes.roster import Roster
from tests.unit.launch.nodes import KEY, FakeNode


@pytest.fixture
def roster() -> Iterator[Roster]:
    made = Roster(("127.0.0.1", 0), wanted=2, key=KEY, patience=10)
    yield made
    made.close()


def joined(roster: Roster, number: int) -> Node:
    address = ("127.0.0.1", roster.port)
    return join(address, number=number, here=False, interface=None, key=KEY, join_seconds=5)


def test_small_files_follow_when_they_change(
    roster: Roster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirroring, "MIRROR_SECONDS", 0.0)
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    for folder in (ours, theirs):
        folder.mkdir()
    roster.keep_files_in(ours)
    sender = FakeNode(roster, 1)
    mirror = Mirror(sender.channel, theirs)
    for name in ("rank-1.json", "rank-1.progress", "rank-1.steps.jsonl", "trial.json"):
        (theirs / name).write_text("1")
    mirror.look()
    (theirs / "rank-1.json").write_text("2")
    mirror.look()
    deadline = time.monotonic() + 10
    while not (ours / "rank-1.json").exists() or (ours / "rank-1.json").read_text() != "2":
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert {path.name for path in ours.iterdir()} == {"rank-1.json", "rank-1.progress"}
    assert set(mirror._sent) == {"rank-1.json", "rank-1.progress"}
    sender.close()


def test_node_answers_until_the_run_is_over(
    roster: Roster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node, "environment", lambda: {"host": "there"})
    made = joined(roster, 1)
    ends: list[str | None] = []
    serving = threading.Thread(target=lambda: ends.append(made.serve()))
    serving.start()
    while not roster.members():
        time.sleep(0.01)
    assert roster.ask([1], {"do": "environment"}) == {1: {"host": "there"}}
    roster.close()
    serving.join(timeout=10)
    assert ends == [None]


def test_node_whose_controller_is_gone_says_so(roster: Roster) -> None:
    made = joined(roster, 1)
    while not roster.members():
        time.sleep(0.01)
    roster.member(1).channel.close()
    assert made.serve() == "its connection was closed"
