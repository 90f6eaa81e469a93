"""Lost nodes that come back, or do not."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

from shardmark.launch.nodes.returning import Returns, with_returns
from shardmark.launch.nodes.roster import Roster
from shardmark.results.schema import RestartRecord


@dataclass
class Member:
    host: str
    lost: str | None = None


@dataclass
class FakeRoster:
    members: dict[int, Member]

    def member(self, number: int) -> Member:
        return self.members[number]


@dataclass
class World:
    """Two nodes, and a clock that is set."""

    seconds: float
    now: float = 1000.0
    roster: FakeRoster = field(default_factory=lambda: FakeRoster({0: Member("a"), 1: Member("b")}))
    again: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.returns = Returns(
            cast("Roster", self.roster),
            (0, 1),
            seconds=self.seconds,
            again=self.again.append,
            clock=lambda: self.now,
        )

    def look(self, at_seconds: float) -> Any:
        self.now = at_seconds
        return self.returns.look((0, 1))


def test_without_patience_a_lost_node_is_lost_at_once() -> None:
    world = World(seconds=0)
    assert world.look(1000.0) is None
    world.roster.members[1].lost = "its connection ended"
    found = world.look(1001.0)
    assert (found.node, found.host, found.reason) == (1, "b", "its connection ended")


def test_a_node_is_awaited_so_long_and_takes_up_its_part_once() -> None:
    world = World(seconds=30)
    world.roster.members[1].lost = "nothing was heard"
    assert world.look(1001.0) is None
    assert world.look(1030.0) is None
    world.roster.members[1] = Member("c")
    assert world.look(1030.5) is None
    assert world.look(1090.0) is None
    assert world.again == [1]
    world.roster.members[1].lost = "again"
    assert world.look(1100.0) is None
    assert world.look(1130.0).reason == "again"
    (returned,) = world.returns.returned
    assert (returned.lost.host, returned.noticed_at_seconds) == ("b", 1001.0)


def test_a_node_that_is_back_before_anybody_looked() -> None:
    world = World(seconds=30)
    world.roster.members[1].lost = "its connection ended"
    world.roster.members[1] = Member("b")
    assert world.look(1001.0) is None
    assert world.again == [1]


def test_the_loss_is_the_cause_of_what_followed_it() -> None:
    world = World(seconds=30)
    world.roster.members[1].lost = "its connection ended"
    world.look(1001.0)
    world.roster.members[1] = Member("b")
    world.look(1002.0)
    earlier = RestartRecord(restart=1, at_seconds=900.0, reason="rank 0 was ended by SIGKILL")
    later = RestartRecord(restart=2, at_seconds=1000.8, reason="rank 0: connection reset")
    found = with_returns([earlier, later], world.returns.returned)
    assert [one.reason for one in found] == [
        "rank 0 was ended by SIGKILL",
        "node 1 (b) was lost: its connection ended",
    ]
    (alone,) = with_returns([], world.returns.returned)
    assert alone.restart == 1
