"""A trial over several nodes that are threads: what they are told, and how each end is seen."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest

from shardmark.core.errors import InputError, ShardmarkError
from shardmark.launch.nodes import cluster
from shardmark.launch.nodes.channel import Channel, Message
from shardmark.launch.nodes.cluster import ClusterEngine
from shardmark.launch.nodes.roster import Roster
from shardmark.launch.outcome import ProcessEnd
from shardmark.trials.matrix import expand
from shardmark.trials.trial import Trial
from tests.unit.launch.fakes import experiment
from tests.unit.launch.nodes import KEY, MACHINE, FakeNode, send_file

PATIENCE = 2.0


class FakeStarter:
    """Starts threads; `reason` is why it cannot."""

    def __init__(self, count: int) -> None:
        self.nodes: list[FakeNode] = []
        self.reason: str | None = None
        self.closed = False
        self._count = count

    def start(self, roster: Roster) -> None:
        if self.reason is None:
            self.nodes = [FakeNode(roster, n, ahead_seconds=100.0 * n) for n in range(self._count)]

    def check(self) -> None:
        if self.reason is not None:
            raise ShardmarkError(self.reason)

    def close(self) -> None:
        self.closed = True
        for node in self.nodes:
            node.close()


@pytest.fixture
def starter() -> FakeStarter:
    return FakeStarter(3)


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def engine(starter: FakeStarter, told: list[str]) -> Iterator[ClusterEngine]:
    def make_roster() -> Roster:
        return Roster(("127.0.0.1", 0), wanted=3, key=KEY, patience=PATIENCE)

    made = ClusterEngine(make_roster, starter, join_seconds=5, tell=told.append)
    yield made
    made.close()
    assert starter.closed or starter.nodes == []


def two_node_trial(directory: Path, *overrides: str) -> Trial:
    settings = ("matrix.strategy=[ddp]", "matrix.world_size=[2]", "placement.nodes=2", *overrides)
    (trial,) = expand(experiment(*settings), "cpu").trials
    (directory / "trial.json").write_text(trial.model_dump_json())
    return trial


def nothing() -> None: ...


def failed(rank: int, at_seconds: float) -> Message:
    end = ProcessEnd(rank=rank, exit_code=-9, at_seconds=at_seconds)
    return {"ended": 1, "failures": [asdict(end)], "oom_kills": 1}


def test_machine_is_the_least_of_all_nodes(
    engine: ClusterEngine, starter: FakeStarter, told: list[str]
) -> None:
    engine._gathered()  # so that there are nodes whose answers can be chosen
    for node, (count, cores) in zip(starter.nodes, [(4, 8), (2, 16), (4, 4)], strict=True):
        node.answers["machine"] = {
            "device_type": "cuda",
            "device_count": count,
            "cores": cores,
            "device_names": ["A"] * count,
        }
    machine = engine.machine("auto")
    assert (machine.device_type, machine.device_count, machine.cores) == ("cuda", 2, 4)
    assert machine.device_names == ("A",)
    assert machine.times(2).device_count == 4
    assert told[0].startswith("waiting for 3 nodes at 127.0.0.1:")
    assert told[1:] == [f"node {n} (host-{n}) is here, 127.0.0.1" for n in range(3)]


def test_nodes_of_different_kinds_are_refused(engine: ClusterEngine, starter: FakeStarter) -> None:
    engine._gathered()
    starter.nodes[1].answers["machine"] = MACHINE | {"device_type": "cuda", "device_count": 1}
    with pytest.raises(InputError, match=r"node 1 \(host-1\) has cuda, node 0 cpu"):
        engine.machine("auto")


def test_what_a_node_cannot_do_names_it(engine: ClusterEngine, starter: FakeStarter) -> None:
    engine._gathered()
    starter.nodes[2].answers["machine"] = {"input_error": ["device", "no CUDA device", "cpu"]}
    with pytest.raises(InputError, match=r"device: node 2 \(host-2\): no CUDA device; cpu"):
        engine.machine("cuda")
    starter.nodes[1].answers["load"] = {"error": "torch cannot be imported"}
    with pytest.raises(ShardmarkError, match=r"node 1 \(host-1\): torch cannot be imported"):
        engine.load([], "cpu")


def test_nodes_that_cannot_be_started_are_not_waited_for(
    engine: ClusterEngine, starter: FakeStarter
) -> None:
    starter.reason = "the command that starts node 1 ended"
    with pytest.raises(ShardmarkError, match="the command that starts node 1 ended"):
        engine.machine("cpu")


def test_refused_node_is_told_of(
    engine: ClusterEngine, starter: FakeStarter, told: list[str]
) -> None:
    strangers: list[FakeNode] = []

    def one_fails(roster: Roster) -> None:
        strangers.append(FakeNode(roster, 2, torch="2"))
        starter.start(roster)

    engine._starter = SimpleNamespace(start=one_fails, check=starter.check, close=starter.close)
    engine.machine("cpu")
    assert told[1] == "node 2 (host-2) came and was refused: its torch is 2, here it is 1"
    for stranger in strangers:
        stranger.close()


def test_environments_are_named_by_node(engine: ClusterEngine, starter: FakeStarter) -> None:
    engine._gathered()
    for node in starter.nodes:
        node.answers["environment"] = {"host": "h"}
    assert engine.environments() == [{"node": number, "host": "h"} for number in range(3)]


def test_trial_runs_on_its_nodes_alone(
    engine: ClusterEngine, starter: FakeStarter, tmp_path: Path
) -> None:
    trial, ticks = two_node_trial(tmp_path), []
    engine.machine("cpu")
    engine.load(["numpy"], "cpu")
    starter.nodes[1].before_end = lambda channel, _: send_file(
        channel, tmp_path, "rank-1.json", "{}"
    )
    ending = engine.run(tmp_path, trial_seconds=30, on_tick=lambda: ticks.append(1))
    assert (ending.how, ending.agent_exit_code, ending.failures) == ("exited", 0, ())
    assert (ending.lost, ending.oom_kills) == (None, 0)
    assert ticks
    assert (tmp_path / "rank-1.json").read_text() == "{}"
    assert [node.asked for node in starter.nodes] == [
        ["machine", "load", "run"],
        ["machine", "load", "run"],
        ["machine", "load"],
    ]
    first, second = (node.heard[-1] for node in starter.nodes[:2])
    assert Trial.model_validate_json(second["trial"]) == trial
    assert (first["task"], first["directory"]) == ("measure", str(tmp_path.resolve()))
    assert first["place"]["endpoint"] == second["place"]["endpoint"]
    assert (first["place"]["node"], second["place"]["node"]) == (0, 1)
    assert second["place"]["address"] == "127.0.0.1"


def test_one_node_is_told_of_no_meeting(
    engine: ClusterEngine, starter: FakeStarter, tmp_path: Path
) -> None:
    """Then ranks meet as they do on the local engine."""
    two_node_trial(tmp_path, "placement.nodes=1")
    engine.run(tmp_path, trial_seconds=30, on_tick=nothing)
    assert starter.nodes[0].heard[-1]["place"] is None
    assert starter.nodes[1].asked == []


def test_judge_is_node_0s(engine: ClusterEngine, starter: FakeStarter, tmp_path: Path) -> None:
    engine.run(tmp_path, trial_seconds=30, on_tick=nothing, task="judge")
    assert [node.asked for node in starter.nodes] == [["run"], [], []]
    assert starter.nodes[0].heard[-1]["trial"] is None


def test_deaths_are_told_by_our_clock(
    engine: ClusterEngine, starter: FakeStarter, tmp_path: Path
) -> None:
    """Node 1's clock is 100 s ahead: its rank died later than it says, and rank 0 first."""
    two_node_trial(tmp_path)
    engine._gathered()
    for node in starter.nodes:
        for _ in range(3):
            node.beat()
    starter.nodes[0].answers["run"] = failed(0, 50.0)
    starter.nodes[1].answers["run"] = failed(1, 151.0)
    ending = engine.run(tmp_path, trial_seconds=30, on_tick=nothing)
    assert {end.rank: end.at_seconds for end in ending.failures} == pytest.approx(
        {0: 50.0, 1: 51.0}, abs=0.2
    )
    assert ending.clocks_ahead_seconds == pytest.approx({0: 0.0, 1: 100.0}, abs=0.2)
    assert (ending.agent_exit_code, ending.oom_kills) == (1, 2)


@pytest.fixture
def hanging(starter: FakeStarter, engine: ClusterEngine) -> Callable[[int], None]:
    """Has that node's part of a trial end only when it is told to."""

    def hang(number: int) -> None:
        engine._gathered()
        answers = starter.nodes[number].answers
        del answers["run"]
        answers["end"] = {"ended": -9, "failures": [], "oom_kills": 0}

    return hang


def test_trial_out_of_time_is_ended_on_all_nodes(
    engine: ClusterEngine, starter: FakeStarter, tmp_path: Path, hanging: Callable[[int], None]
) -> None:
    two_node_trial(tmp_path)
    hanging(0)
    hanging(1)
    ending = engine.run(tmp_path, trial_seconds=0.3, on_tick=nothing)
    assert (ending.how, ending.lost) == ("timed_out", None)
    assert [node.heard[-1] for node in starter.nodes[:2]] == [{"do": "end", "stacks": True}] * 2


def test_others_are_ended_a_while_after_one_has_failed(
    engine: ClusterEngine,
    starter: FakeStarter,
    tmp_path: Path,
    hanging: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cluster, "GRACE_SECONDS", 0.5)
    two_node_trial(tmp_path)
    hanging(0)
    starter.nodes[1].answers["run"] = failed(1, 1.0)
    started = time.monotonic()
    ending = engine.run(tmp_path, trial_seconds=60, on_tick=nothing)
    assert 0.5 < time.monotonic() - started < 10
    assert ending.how == "exited"
    assert [end.rank for end in ending.failures] == [1]
    assert starter.nodes[0].heard[-1] == {"do": "end", "stacks": False}


def test_lost_node_ends_the_trial_and_is_missed_by_the_next(
    engine: ClusterEngine, starter: FakeStarter, tmp_path: Path, hanging: Callable[[int], None]
) -> None:
    two_node_trial(tmp_path)
    hanging(0)

    def vanish(channel: Channel, _: Message) -> None:
        channel.close()

    starter.nodes[1].before_end = vanish
    assert engine.lacks(2) is None
    ending = engine.run(tmp_path, trial_seconds=60, on_tick=nothing)
    assert ending.lost is not None
    assert (ending.lost.node, ending.lost.host) == (1, "host-1")
    assert starter.nodes[0].asked[-1] == "end"
    assert engine.lacks(2) == f"node 1 (host-1) was lost: {ending.lost.reason}"
    assert engine.lacks(1) is None
    assert engine.lacks(4) == "4 nodes are asked for, and the engine has 3"


def test_interrupt_ends_the_trial_everywhere(
    engine: ClusterEngine, starter: FakeStarter, tmp_path: Path, hanging: Callable[[int], None]
) -> None:
    two_node_trial(tmp_path)
    hanging(0)
    hanging(1)

    def interrupt() -> None:
        raise KeyboardInterrupt

    ending = engine.run(tmp_path, trial_seconds=60, on_tick=_first_only(interrupt))
    assert ending.how == "interrupted"
    assert [node.asked[-1] for node in starter.nodes[:2]] == ["end", "end"]


def _first_only(work: Callable[[], None]) -> Callable[[], None]:
    calls: list[int] = []

    def once() -> None:
        calls.append(1)
        if len(calls) == 1:
            work()

    return once


def test_node_that_came_back_loads_again(
    engine: ClusterEngine, starter: FakeStarter, tmp_path: Path
) -> None:
    two_node_trial(tmp_path)
    engine.machine("cpu")
    engine.load([], "cpu")
    roster = engine._gathered()
    starter.nodes[1].close()
    deadline = time.monotonic() + 10
    while engine.lacks(2) is None:
        assert time.monotonic() < deadline
    starter.nodes[1] = FakeNode(roster, 1)
    while engine.lacks(2) is not None:
        assert time.monotonic() < deadline
    ending = engine.run(tmp_path, trial_seconds=30, on_tick=nothing)
    assert ending.agent_exit_code == 0
    assert starter.nodes[1].asked == ["load", "run"]


def test_error_of_a_node_stops_the_run(
    engine: ClusterEngine, starter: FakeStarter, tmp_path: Path
) -> None:
    """As when the local engine's nursery dies."""
    two_node_trial(tmp_path)
    engine._gathered()
    starter.nodes[1].answers["run"] = {"error": "the process that ranks are forked from has died"}
    with pytest.raises(ShardmarkError, match=r"node 1 \(host-1\): the process that ranks are"):
        engine.run(tmp_path, trial_seconds=30, on_tick=nothing)
