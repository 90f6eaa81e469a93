"""A trial over several nodes that are threads: what they are told, and how each end is seen."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from shardmark.base.errors import InputError, ShardmarkError
from shardmark.bench.launch.outcome import Ending, ProcessEnd
from shardmark.extras.engines.nodes import engine as nodes_engine
from shardmark.extras.engines.nodes.engine import NodesEngine
from shardmark.extras.engines.nodes.protocol import Channel, Message
from shardmark.extras.engines.nodes.registry import NodeRegistry
from shardmark.ranks.trial import Trial
from tests.unit.bench.launch.fakes import trial_of
from tests.unit.extras.engines.nodes import MACHINE, PORT, SECRET, FakeNode, node_options, request
from tests.waiting import wait_for


class FakeStarter:
    """Starts threads; `reason` is why it cannot."""

    def __init__(self) -> None:
        self.nodes: list[FakeNode] = []
        self.titles: list[str] = []
        self.reason: str | None = None
        self.ending = False
        self.new_nodes_for_each_trial = False
        self.with_files = True
        self.secret = SECRET

    def address(self, nodes: int) -> tuple[str, int]:
        assert nodes
        return ("127.0.0.1", 0)

    def start(self, registry: NodeRegistry, title: str) -> None:
        self.titles.append(f"{title} {registry.num_nodes}")
        if self.reason is None:
            self.nodes = [
                FakeNode(registry, n, ahead_seconds=100.0 * n, with_files=self.with_files)
                for n in range(registry.num_nodes)
            ]

    def check(self) -> None:
        if self.reason is not None:
            raise ShardmarkError(self.reason)

    def is_ending(self) -> bool:
        return self.ending

    def close(self) -> None:
        for node in self.nodes:
            node.close()


class World:
    """An engine of three nodes."""

    def __init__(self) -> None:
        self.starter = FakeStarter()
        self.messages: list[str] = []
        three = ("placement.nodes=3", "matrix.world_size=[3]", "recipe.global_batch=9")
        trials = [trial_of("ddp", *three)]
        self.engine = NodesEngine(
            node_options(), self.starter, request(trials, self.messages.append)
        )

    @property
    def nodes(self) -> list[FakeNode]:
        if not self.starter.nodes:
            self.engine.machine("cpu")
            for node in self.starter.nodes:
                node.heard.clear()
        return self.starter.nodes

    def run(self, directory: Path, **changes: Any) -> Ending:
        given: dict[str, Any] = {"trial_seconds": 30, "on_tick": lambda: None}
        return self.engine.run(directory, **given | changes)

    def hang(self, number: int) -> None:
        """Have that node's part of a trial end only when it is told to."""
        answers = self.nodes[number].answers
        del answers["run"]
        answers["end"] = {"ended": -9, "failures": [], "oom_kills": 0}


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.engine.close()


def two_node_trial(directory: Path, nodes: int = 2, limits: str = "{}") -> Trial:
    sizes = ("matrix.world_size=[2]", f"placement.nodes={nodes}")
    trial = trial_of("ddp", *sizes, f"limits={limits}")
    (directory / "trial.json").write_text(trial.model_dump_json())
    return trial


def failed(rank: int, at_seconds: float) -> Message:
    end = ProcessEnd(rank=rank, exit_code=-9, at_seconds=at_seconds)
    return {"ended": 1, "failures": [asdict(end)], "oom_kills": 1}


def test_machine_is_the_minimum_of_all_nodes(world: World) -> None:
    for node, (count, cores) in zip(world.nodes, [(4, 8), (2, 16), (4, 4)], strict=True):
        facts = {"device_type": "cuda", "device_count": count, "cores": cores}
        node.answers["machine"] = MACHINE | facts | {"device_names": ["A"] * count}
    machine = world.engine.machine("auto")
    assert (machine.device_type, machine.device_count, machine.cores) == ("cuda", 2, 4)
    assert machine.device_names == ("A",)
    assert machine.libraries == (("NCCL", "2.27.3"),)
    assert world.engine.environments()[1] == {"node": 1, "host": "host-1"}
    assert world.messages[0].startswith("waiting for 3 nodes at 127.0.0.1:")
    assert world.messages[1:] == [
        f"node {n} (host-{n}) has joined from 127.0.0.1" for n in range(3)
    ]


@pytest.mark.parametrize(
    ("answer", "kind", "said"),
    [
        (MACHINE | {"device_type": "cuda"}, InputError, "node 1 (host-1) has cuda, node 0 cpu"),
        ({"input_error": ["device", "none", "cpu"]}, InputError, "device: node 1 (host-1): none;"),
        ({"error": "no torch"}, ShardmarkError, "node 1 (host-1): no torch"),
    ],
)
def test_errors_name_their_node(
    world: World, answer: Message, kind: type[ShardmarkError], said: str
) -> None:
    world.nodes[1].answers["machine"] = answer
    with pytest.raises(kind) as caught:
        world.engine.machine("auto")
    assert said in str(caught.value)


def test_failed_start_ends_the_wait_for_nodes(world: World) -> None:
    world.starter.reason = "the command that starts node 1 ended"
    with pytest.raises(ShardmarkError, match="the command that starts node 1 ended"):
        world.engine.machine("cpu")


def test_trial_uses_its_first_nodes_only(world: World, tmp_path: Path) -> None:
    trial, ticks = two_node_trial(tmp_path), []
    world.nodes[1].before_end = lambda channel: channel.send(
        {"file": "rank-1.json", "last": True}, b"{}"
    )
    world.engine.load(["numpy"], "cpu")
    ending = world.run(tmp_path, on_tick=lambda: ticks.append(1))
    assert (ending.status, ending.agent_exit_code, ending.failures) == ("exited", 0, ())
    assert (ending.lost, ending.oom_kills) == (None, 0)
    assert ticks
    assert (tmp_path / "rank-1.json").read_text() == "{}"
    asked = [["load", "load", "port", "run"], ["load", "load", "run"], ["load"]]
    assert [node.asked for node in world.nodes] == asked
    first, second = (node.heard[-1] for node in world.nodes[:2])
    assert Trial.model_validate_json(second["trial"]) == trial
    assert (first["task"], first["directory"]) == ("measure", str(tmp_path.resolve()))
    places = [first["rendezvous"], second["rendezvous"]]
    assert places == [
        {"node": n, "host": "127.0.0.1", "port": PORT, "address": "127.0.0.1"} for n in (0, 1)
    ]
    two_node_trial(tmp_path, nodes=1)
    world.run(tmp_path)
    assert world.nodes[0].heard[-1]["rendezvous"] is None, "ranks meet as on the local engine"
    assert world.nodes[1].asked == asked[1]


@pytest.mark.parametrize("with_files", [True, False])
def test_compare_runs_on_node_0_with_all_captures(
    world: World, tmp_path: Path, *, with_files: bool
) -> None:
    world.starter.with_files = with_files
    cells = [tmp_path / name for name in ("a", "b")]
    for cell in cells:
        cell.mkdir()
        (cell / "rank-0.capture.npz").write_text(cell.name)
    (tmp_path / "cells.json").write_text(json.dumps([str(cell) for cell in cells]))
    world.run(tmp_path, task="compare")
    assert [node.asked for node in world.nodes] == [["run"], [], []]
    assert world.nodes[0].heard[-1]["trial"] is None
    sent = {} if with_files else {"0/rank-0.capture.npz": b"a", "1/rank-0.capture.npz": b"b"}
    assert world.nodes[0].files == sent


def test_times_of_deaths_use_the_controllers_clock(world: World, tmp_path: Path) -> None:
    """Node 1's clock is 100 s ahead: its rank died later than it says, and rank 0 first."""
    two_node_trial(tmp_path)
    world.nodes[0].answers["run"] = failed(0, 50.0)
    world.nodes[1].answers["run"] = failed(1, 151.0)
    ending = world.run(tmp_path)
    ends = {end.rank: end.at_seconds for end in ending.failures}
    assert ends == pytest.approx({0: 50.0, 1: 51.0}, abs=0.2)
    assert ending.clocks_ahead_seconds == pytest.approx({0: 0.0, 1: 100.0}, abs=0.2)
    assert (ending.agent_exit_code, ending.oom_kills) == (1, 2)


@pytest.mark.parametrize("how", ["timed_out", "interrupted"])
def test_trial_is_ended_on_all_nodes(world: World, tmp_path: Path, how: str) -> None:
    two_node_trial(tmp_path)
    world.hang(0)
    world.hang(1)
    ticks = iter([KeyboardInterrupt()] if how == "interrupted" else [])

    def interrupt_first() -> None:
        for error in ticks:
            raise error

    seconds = 30 if how == "interrupted" else 0.3
    ending = world.run(tmp_path, trial_seconds=seconds, on_tick=interrupt_first)
    assert (ending.status, ending.lost) == (how, None)
    request = {"do": "end", "stacks": how == "timed_out"}
    assert [node.heard[-1] for node in world.nodes[:2]] == [request] * 2


def test_other_nodes_end_after_one_has_failed(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes_engine, "GRACE_SECONDS", 0.5)
    two_node_trial(tmp_path)
    world.hang(0)
    world.nodes[1].answers["run"] = failed(1, 1.0)
    started = time.monotonic()
    ending = world.run(tmp_path, trial_seconds=60)
    assert time.monotonic() - started > 0.5
    assert (ending.status, [end.rank for end in ending.failures]) == ("exited", [1])
    assert world.nodes[0].heard[-1] == {"do": "end", "stacks": False}


def test_node_that_does_not_end_a_trial_is_lost(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The late answer would be taken for the answer to another request."""
    monkeypatch.setattr(nodes_engine, "END_SECONDS", 0.3)
    two_node_trial(tmp_path)
    world.hang(0)
    world.hang(1)
    del world.nodes[1].answers["end"]
    ending = world.run(tmp_path, trial_seconds=0.1)
    assert (ending.status, ending.lost) == ("timed_out", None)
    assert "did not end the trial within 0.3 s" in str(world.engine.unavailable_reason(2))
    assert world.engine.unavailable_reason(1) is None


def test_lost_node_ends_the_trial(world: World, tmp_path: Path) -> None:
    two_node_trial(tmp_path)
    world.hang(0)
    world.nodes[1].before_end = Channel.close
    assert world.engine.unavailable_reason(2) is None
    ending = world.run(tmp_path, trial_seconds=60)
    assert ending.lost is not None
    assert (ending.lost.node, ending.lost.host) == (1, "host-1")
    assert world.nodes[0].asked[-1] == "end"
    assert world.engine.unavailable_reason(2) == str(ending.lost)
    assert world.engine.unavailable_reason(1) is None
    assert world.engine.unavailable_reason(4) == "4 nodes are asked for, and the engine has 3"


def test_returned_node_loads_modules_again(world: World, tmp_path: Path) -> None:
    two_node_trial(tmp_path)
    world.engine.load([], "cpu")
    world.nodes[1].close()
    wait_for(lambda: world.engine.unavailable_reason(2))
    world.nodes[1] = FakeNode(world.engine._joined(), 1)
    wait_for(lambda: world.engine.unavailable_reason(2) is None)
    assert world.run(tmp_path).agent_exit_code == 0
    assert world.nodes[1].asked == ["load", "run"]


def test_returned_node_does_not_join_the_current_trial(world: World, tmp_path: Path) -> None:
    two_node_trial(tmp_path)
    world.hang(0)

    def come_back(channel: Channel) -> None:
        channel.close()
        wait_for(lambda: world.engine.unavailable_reason(2))
        world.nodes[1] = FakeNode(world.engine._joined(), 1)
        wait_for(lambda: world.engine.unavailable_reason(2) is None)

    world.nodes[1].before_end = come_back
    ending = world.run(tmp_path, trial_seconds=60)
    assert ending.lost is not None
    assert ending.lost.node == 1
    assert world.nodes[1].asked == []


def test_error_of_a_node_stops_the_run(world: World, tmp_path: Path) -> None:
    two_node_trial(tmp_path)
    world.nodes[1].answers["run"] = {"error": "torch cannot be imported"}
    with pytest.raises(ShardmarkError, match=r"node 1 \(host-1\): torch cannot be imported"):
        world.run(tmp_path)


def test_new_nodes_load_modules_outside_the_timeout(world: World, tmp_path: Path) -> None:
    """Earlier nodes report their machines and verify; only the new ones are told of."""
    world.starter.new_nodes_for_each_trial = True
    trial = two_node_trial(tmp_path)
    world.engine.machine("cpu")
    world.engine.load(["torch"], "cpu")
    world.run(tmp_path, task="capture")
    common = world.starter.nodes
    count = len(world.messages)
    world.engine.prepare(trial)
    assert world.starter.titles == ["shardmark 3", f"{trial.id} 2"]
    assert [node.asked for node in common] == [
        ["machine", "load", "port", "run", "bye"],
        ["machine", "load", "run", "bye"],
        ["machine", "bye"],
    ]
    assert [node.asked for node in world.starter.nodes] == [["load"], ["load"]]
    assert len(world.messages) == count


def test_missing_nodes_make_trials_unavailable(world: World, tmp_path: Path) -> None:
    world.starter.new_nodes_for_each_trial = True
    trial = two_node_trial(tmp_path)
    assert world.engine.unavailable_reason(2) is None
    world.starter.reason = "the step ended"
    world.engine.prepare(trial)
    assert world.engine.unavailable_reason(2) == "the step ended"
    assert world.engine.unavailable_reason(1) is None


@pytest.mark.parametrize(("ending", "how"), [(True, "interrupted"), (False, "exited")])
def test_end_by_a_scheduler_is_an_interruption(
    *, ending: bool, how: str, world: World, tmp_path: Path
) -> None:
    world.starter.ending = ending
    two_node_trial(tmp_path)
    world.nodes[1].answers["run"] = failed(1, 1.0)
    assert world.run(tmp_path).status == how


def test_a_late_answer_is_not_that_of_the_next_request(world: World) -> None:
    """A node that is slow to end a trial answers when the next request is on its way."""
    world.nodes[1].channel.send({"ended": 0, "failures": [], "oom_kills": 0, "request": 0})
    assert all("ended" not in answer for answer in world.engine.environments())
