"""The engine `torchrun`: its options, who controls, and what is started where."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from shardmark.base.errors import InputError, ShardmarkError
from shardmark.bench.launch.engine import EngineRequest
from shardmark.bench.launch.engines import request_of, submission
from shardmark.experiment.engines import TorchrunOptions
from shardmark.experiment.matrix import expand
from shardmark.extras.engines.nodes import torchrun
from shardmark.extras.engines.nodes.protocol import key_difference
from shardmark.extras.engines.nodes.torchrun import HostCommands, node_rank
from tests.unit.bench.launch.fakes import experiment
from tests.unit.extras.engines.nodes import SECRET, request

TWO = ("placement.nodes=2", "matrix.strategy=[ddp]")
REQUESTS = [
    request(expand(experiment(f"placement.nodes={nodes}", "matrix.strategy=[ddp]"), "cpu").trials)
    for nodes in (1, 2)
]


def options(**given: object) -> TorchrunOptions:
    return TorchrunOptions.model_validate(given)


@pytest.fixture(autouse=True)
def _secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDMARK_SECRET", SECRET)


def serve_as_node(**given: object) -> int | None:
    return torchrun.serve_as_node(options(**given), REQUESTS[1])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"rendezvous": "node0"}, "found 'node0'; allowed is HOST:PORT"),
        ({"rendezvous": "node0:99999"}, "found 'node0:99999'; allowed is HOST:PORT"),
        ({"hosts": ["a", "b"], "node_rank": 1}, "hosts and node_rank are given"),
        ({"hosts": ["a", "b"], "remote": "ssh {host}"}, r"it needs \{quoted} or \{command}"),
        ({"hosts": ["a", "-oProxyCommand=x"]}, "hosts has '-oProxyCommand=x'; what begins"),
    ],
)
def test_invalid_options_are_refused(given: dict[str, object], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        options(**given)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "engine.rendezvous: missing, and the experiment takes 2 nodes"),
        ({"rendezvous": "a:0"}, "engine.rendezvous: a:0, and the experiment takes 2 nodes"),
        ({"hosts": ["a"]}, "engine.hosts: 1 hosts, and the experiment takes 2 nodes"),
        ({"rendezvous": "192.0.2.1:1", "node_rank": 5}, "engine.node_rank: found 5, and"),
        (
            {"rendezvous": "localhost:1", "hosts": ["localhost", "b.invalid"]},
            "engine.rendezvous: localhost names each machine itself, and b.invalid",
        ),
        (
            {"hosts": ["localhost", "user@192.0.2.1"]},
            "engine.hosts: localhost names each machine itself, and user@192.0.2.1",
        ),
        ({"rendezvous": "nowhere.invalid:1"}, "engine.rendezvous: nowhere.invalid has no address"),
    ],
)
def test_options_that_cannot_connect_two_nodes_are_refused(
    given: dict[str, object], said: str
) -> None:
    with pytest.raises(InputError) as caught:
        torchrun.build(options(**given), REQUESTS[1])
    assert str(caught.value).startswith(said)


def test_nodes_of_one_machine_may_meet_at_its_loopback() -> None:
    torchrun.check(options(rendezvous="localhost:1", hosts=["localhost", "127.0.0.1"]), 2)
    torchrun.check(options(rendezvous="[::1]:1", hosts=["a", "b"], remote="sh -c {quoted}"), 2)


def test_node_rank_comes_from_option_or_environment() -> None:
    named = {"SHARDMARK_NODE_RANK": "3"}
    assert node_rank(options(), named) == 3
    assert node_rank(options(node_rank=1), named) == 1
    assert node_rank(options(hosts=["a", "b"]), named) == 0, "the one that starts the others"
    assert node_rank(options(), {}) is None
    with pytest.raises(InputError, match="SHARDMARK_NODE_RANK: found 'one'"):
        node_rank(options(), {"SHARDMARK_NODE_RANK": "one"})


@pytest.mark.parametrize("nodes", [1, 2])
def test_node_rank_beyond_the_nodes_is_refused(nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDMARK_NODE_RANK", "2")
    with pytest.raises(InputError, match=f"SHARDMARK_NODE_RANK: found 2, and .* takes {nodes} "):
        torchrun.serve_as_node(options(rendezvous="192.0.2.1:1"), REQUESTS[nodes - 1])


def test_machine_with_the_address_controls_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHARDMARK_NODE_RANK", raising=False)
    assert serve_as_node(rendezvous="127.0.0.1:1") is None
    assert serve_as_node(rendezvous="192.0.2.1:1", node_rank=0) is None
    with pytest.raises(ShardmarkError, match=r"no controller at 127\.0\.0\.1:1 within 0\.1 s"):
        serve_as_node(rendezvous="127.0.0.1:1", node_rank=1, join_seconds=0.1)


def test_controller_cannot_listen_at_another_machines_address() -> None:
    engine = torchrun.build(options(rendezvous="192.0.2.1:1", node_rank=0), REQUESTS[1])
    with pytest.raises(InputError, match=r"this machine cannot listen at 192\.0\.2\.1:1"):
        engine.machine("cpu")
    engine.close()


def test_remote_command_as_one_word_or_as_words(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """ssh joins its arguments for a shell; `ip netns exec` takes them as they are."""
    folder = tmp_path / "a folder"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", "/some path")
    by_ssh = HostCommands(options(hosts=["a", "b"]), {"recipe": "e"}, "").remote(1, 7)
    assert by_ssh[:-1] == ["ssh", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=5", "b"]
    words = shlex.split(by_ssh[-1])
    netns = options(hosts=["a", "b"], remote="ip netns exec {host} {command}")
    by_netns = HostCommands(netns, {"recipe": "e"}, "").remote(1, 7)
    assert by_netns == ["ip", "netns", "exec", "b", *words]
    assert words[:2] == ["sh", "-c"]
    *start, join_options = shlex.split(words[2])
    assert start == [
        *("cd", str(folder), "&&", "PYTHONPATH=/some path", "exec", sys.executable),
        *("-P", "-m", "shardmark.extras.engines.nodes.node"),
    ]
    told = {"host": "a", "port": 7, "number": 1, "key": {"recipe": "e"}, "join_seconds": 300}
    assert told.items() <= json.loads(join_options).items()


def test_dry_run_shows_the_commands() -> None:
    def said(*overrides: str) -> list[str]:
        made = experiment(*overrides)
        return submission(made, expand(made), ["shardmark", "run", "e.yaml"])

    torchrun_on_two = (*TWO, "engine.name=torchrun")
    assert said(*torchrun_on_two, "engine.rendezvous=a:1") == [
        "on each of 2 nodes: shardmark run e.yaml"
    ]
    (line,) = said(*torchrun_on_two, "engine.hosts=[a, b]")
    assert line.startswith("node 1, b: ssh ")
    assert said() == []


def test_run_key_does_not_depend_on_the_engine() -> None:
    def asked(*overrides: str) -> EngineRequest:
        made = experiment(*overrides)
        return request_of(made, expand(made), print)

    two = asked(*TWO)
    assert two.nodes == 2
    assert asked(*TWO, "engine.name=torchrun", "engine.node_rank=1").key == two.key
    assert key_difference(asked().key, two.key) == "it has another matrix, placement"
