"""Options of the engine `torchrun`, who controls, and what is started where."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from shardmark.config.engines import TorchrunOptions
from shardmark.core.errors import InputError, ShardmarkError
from shardmark.launch.engines import ENGINES, most_nodes, run_key, submission
from shardmark.launch.nodes import torchrun
from shardmark.launch.nodes.host_commands import Commands
from shardmark.launch.nodes.interfaces import INTERFACE_VARIABLES, interface_of, interface_variables
from shardmark.launch.nodes.joining import join
from shardmark.launch.nodes.roster import Roster
from shardmark.launch.nodes.run_key import difference
from shardmark.launch.nodes.torchrun import own_rank
from tests.unit.launch.fakes import experiment
from tests.unit.launch.nodes import KEY

NETNS = "ip netns exec {host} {command}"


def options(**given: object) -> TorchrunOptions:
    return TorchrunOptions.model_validate(given)


def silent(_: str) -> None: ...


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"rendezvous": "node0"}, "found 'node0'; allowed is HOST:PORT"),
        ({"rendezvous": "node0:99999"}, "found 'node0:99999'; allowed is HOST:PORT"),
        ({"hosts": ["a", "b"], "node_rank": 1}, "hosts and node_rank are given"),
        ({"hosts": ["a", "b"], "remote": "ssh {host}"}, "it needs {quoted} or {command}"),
    ],
)
def test_options_that_say_nothing_are_refused(given: dict[str, object], said: str) -> None:
    with pytest.raises(ValidationError, match=said.replace("{", r"\{")):
        options(**given)


@pytest.mark.parametrize(
    ("given", "where"),
    [
        ({}, "engine.rendezvous: missing, and the experiment takes 2 nodes"),
        ({"rendezvous": "a:0"}, "engine.rendezvous: a:0, and the experiment takes 2 nodes"),
        ({"hosts": ["a"]}, "engine.hosts: 1 hosts, and the experiment takes 2 nodes"),
        (
            {"rendezvous": "192.0.2.1:1", "node_rank": 5},
            "engine.node_rank: found 5, and the experiment takes 2 nodes; allowed is 0 to 1",
        ),
        (
            {"rendezvous": "localhost:1", "hosts": ["localhost", "b.invalid"]},
            "engine.rendezvous: localhost is every machine's own name for itself, and b.invalid",
        ),
        (
            {"rendezvous": "127.0.1.1:1", "hosts": ["a", "user@192.0.2.1"]},
            "engine.rendezvous: 127.0.1.1 is every machine's own name for itself, and user@192",
        ),
        (
            {"hosts": ["localhost", "192.0.2.1"]},
            "engine.hosts: localhost is every machine's own name for itself, and 192.0.2.1",
        ),
    ],
)
def test_too_little_for_so_many_nodes(given: dict[str, object], where: str) -> None:
    with pytest.raises(InputError) as caught:
        torchrun.build(options(**given), 2, KEY, silent)
    assert str(caught.value).startswith(where)


def test_nodes_of_one_machine_may_meet_at_its_loopback() -> None:
    torchrun.check(options(rendezvous="localhost:1", hosts=["localhost", "127.0.0.1"]), 2)
    started_here = options(rendezvous="[::1]:1", hosts=["a", "b"], remote="sh -c {quoted}")
    torchrun.check(started_here, 2)


def test_number_beyond_the_nodes_is_refused_before_it_dials(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SHARDMARK_NODE_RANK", "2")
    given = options(rendezvous="192.0.2.1:1")
    with pytest.raises(InputError, match=r"SHARDMARK_NODE_RANK: found 2, and .* takes 2 nodes"):
        torchrun.serve(given, 2, KEY, silent)
    with pytest.raises(InputError, match=r"SHARDMARK_NODE_RANK: found 2, and .* takes 1 node;"):
        torchrun.serve(given, 1, KEY, silent)


def test_number_comes_from_option_or_environment() -> None:
    named = {"SHARDMARK_NODE_RANK": "3"}
    assert own_rank(options(), named) == 3
    assert own_rank(options(node_rank=1), named) == 1
    assert own_rank(options(hosts=["a", "b"]), named) == 0, "the one that starts the others"
    assert own_rank(options(), {}) is None
    with pytest.raises(InputError, match="SHARDMARK_NODE_RANK: found 'one'"):
        own_rank(options(), {"SHARDMARK_NODE_RANK": "one"})


def test_owner_of_the_address_controls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHARDMARK_NODE_RANK", raising=False)
    assert not torchrun.serve(options(rendezvous="127.0.0.1:1"), 2, KEY, silent)
    assert not torchrun.serve(options(rendezvous="192.0.2.1:1", node_rank=0), 2, KEY, silent)
    other = options(rendezvous="127.0.0.1:1", node_rank=1, join_seconds=0.1)
    with pytest.raises(ShardmarkError, match=r"no controller at 127\.0\.0\.1:1 within 0\.1 s"):
        torchrun.serve(other, 2, KEY, silent)


def test_name_without_an_address() -> None:
    with pytest.raises(InputError, match=r"engine\.rendezvous: nowhere\.invalid has no address"):
        torchrun.build(options(rendezvous="nowhere.invalid:1"), 2, KEY, silent)


def test_address_of_another_machine_cannot_be_listened_at() -> None:
    engine = torchrun.build(options(rendezvous="192.0.2.1:1", node_rank=0), 2, KEY, silent)
    with pytest.raises(InputError, match=r"this machine cannot listen at 192\.0\.2\.1:1"):
        engine.machine("cpu")
    engine.close()


def test_refusal_is_told_to_the_node() -> None:
    roster = Roster(("127.0.0.1", 0), wanted=2, key=KEY, patience=5)
    with pytest.raises(ShardmarkError, match="refuses this node: its experiment is x, here it is"):
        join(
            ("127.0.0.1", roster.port),
            number=1,
            here=False,
            interface=None,
            key={"experiment": "x"},
            join_seconds=5,
        )
    roster.close()


def test_remote_command_as_one_word_or_as_words(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """ssh joins its arguments for a shell; `ip netns exec` takes them as they are."""
    folder = tmp_path / "a folder"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", "/some path")
    by_ssh = Commands(options(hosts=["a", "b"]), 2, {"experiment": "e"}).remote(1, "a", 7)
    assert by_ssh[:-1] == ["ssh", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=5", "b"]
    words = shlex.split(by_ssh[-1])
    by_netns = Commands(options(hosts=["a", "b"], remote=NETNS), 2, {"experiment": "e"})
    assert by_netns.remote(1, "a", 7) == ["ip", "netns", "exec", "b", *words]
    assert words[:2] == ["sh", "-c"]
    assert shlex.split(words[2]) == [
        *("cd", str(folder), "&&", "PYTHONPATH=/some path", "exec", sys.executable),
        *("-m", "shardmark.launch.nodes.joining", "--host", "a", "--port", "7", "--number", "1"),
        *("--join-seconds", "300", "--key", "experiment=e"),
    ]


def test_dry_run_shows_the_commands() -> None:
    command = ["shardmark", "run", "e.yaml"]
    two = ("engine.name=torchrun", "placement.nodes=2", "matrix.strategy=[ddp]")
    assert submission(experiment(*two, "engine.rendezvous=a:1"), command) == [
        "on each of 2 nodes: shardmark run e.yaml"
    ]
    (line,) = submission(experiment(*two, "engine.hosts=[a, b]"), command)
    assert line.startswith("node 1, b: ssh ")
    assert "--host a --port PORT --number 1" in line
    assert submission(experiment(), command) == []


def test_every_engine_has_its_options_and_a_summary() -> None:
    assert next(iter(ENGINES)) == "local"
    for kind in ENGINES.values():
        assert kind.options.model_validate({}) is not None
        assert kind.summary


def test_key_is_the_experiments_whatever_the_engine() -> None:
    one = experiment("placement.nodes=2", "matrix.strategy=[ddp]")
    assert most_nodes(one) == 2
    other = ("placement.nodes=2", "matrix.strategy=[ddp]", "engine.name=torchrun")
    assert run_key(one) == run_key(experiment(*other, "engine.node_rank=1"))
    said = "its experiment is another one, with a different matrix, placement"
    assert difference(run_key(experiment()), run_key(one)) == said


def test_interface_is_the_addresss_unless_the_user_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in INTERFACE_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.1") is None
    assert interface_variables(None, "192.0.2.1") == {}
    assert interface_variables("ib0", "127.0.0.1") == dict.fromkeys(INTERFACE_VARIABLES, "ib0")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "mine")
    assert interface_variables(None, "127.0.0.1") == {"NCCL_SOCKET_IFNAME": "lo"}
