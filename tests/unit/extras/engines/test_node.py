"""Messages of a node while a trial runs, and its answers, without ranks."""

from __future__ import annotations

import errno
import json
import os
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from shardmark.base.errors import InputError, ShardmarkError, StorageError
from shardmark.base.machine import Machine
from shardmark.extras.engines.nodes import addresses, node
from shardmark.extras.engines.nodes.addresses import (
    INTERFACE_VARIABLES,
    interface_of,
    interface_variables,
    listening_address,
)
from shardmark.extras.engines.nodes.engine import _checked
from shardmark.extras.engines.nodes.node import Mirror, Node, join
from shardmark.extras.engines.nodes.protocol import JoinOptions
from shardmark.extras.engines.nodes.registry import NodeRegistry
from tests.unit.extras.engines.nodes import KEY, SECRET, FakeNode, listening, node_options
from tests.waiting import wait_for


class FakeForkServer:
    """Runs a judge at once, which finds what was sent."""

    def machine(self, device: str) -> Machine:
        assert device == "cpu"
        return Machine(device_type="cpu", device_count=0, cores=3)

    def begin(self, directory: Path, task: str, variables: dict[str, str]) -> None:
        assert (task, variables) == ("compare", {})
        cells = [Path(cell) for cell in json.loads((directory / "cells.json").read_text())]
        told = [(cell / "rank-0.capture.npz").read_text() for cell in cells]
        (directory / "verdicts.json").write_text(json.dumps(told))

    def ended(self, _: float) -> int:
        return 0

    def close(self) -> None: ...


@pytest.fixture
def registry() -> Iterator[NodeRegistry]:
    with listening(2) as made:
        yield made


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def joined(registry: NodeRegistry, number: int, **key: str) -> Node:
    options = node_options()
    join_options = JoinOptions.to("127.0.0.1", registry.port, options, KEY | key, number=number)
    made = join(join_options, SECRET)
    wait_for(lambda: registry.nodes)
    return made


@contextmanager
def serving(registry: NodeRegistry) -> Iterator[None]:
    """Node 0 does what it is told, until it is told that the run is over."""
    made, ends = joined(registry, 0), list[str | None]()
    thread = threading.Thread(target=lambda: ends.append(made.serve()))
    thread.start()
    try:
        yield
    finally:
        registry.close()
        thread.join(timeout=10)
    assert ends == [None]


def test_mirror_sends_changed_files(
    registry: NodeRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node, "MIRROR_SECONDS", 0.0)
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    for folder in (ours, theirs):
        folder.mkdir()
    registry.store_files_in(ours, ((), (1,)))
    sender = FakeNode(registry, 1)
    mirror = Mirror(sender.channel, theirs)
    for name in ("rank-1.json", "rank-1.progress", "rank-1.steps.jsonl", "trial.json"):
        (theirs / name).write_text("1")
    mirror.look()
    (theirs / "rank-1.json").write_text("2")
    mirror.look()
    wait_for(lambda: (ours / "rank-1.json").exists() and (ours / "rank-1.json").read_text() == "2")
    assert {path.name for path in ours.iterdir()} == {"rank-1.json", "rank-1.progress"}
    sender.close()


def test_node_serves_requests_until_the_run_is_over(
    registry: NodeRegistry, scratch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has none of the controller's files: the judge's evidence is sent to it."""
    monkeypatch.setattr(node, "environment", lambda: {"host": "there"})
    monkeypatch.setattr(node, "ForkServer", FakeForkServer)
    with serving(registry):
        assert registry.ask([0], {"do": "environment"}) == {0: {"host": "there"}}
        assert registry.ask([0], {"do": "machine", "device": "cpu"})[0]["cores"] == 3
        assert "port" in registry.ask([0], {"do": "port", "address": "127.0.0.1"})[0]
        for number, content in ((0, "first"), (10, "last"), (2, "second")):
            (tmp_path / "evidence").write_text(content)
            registry.send_file(0, tmp_path / "evidence", f"{number}/rank-0.capture.npz")
        folder = tmp_path / "compare"
        folder.mkdir()
        registry.store_files_in(folder)
        given = {"directory": str(folder), "trial": None, "task": "compare", "rendezvous": None}
        run = {"do": "run"} | given
        assert registry.ask([0], run)[0]["ended"] == 0
        assert json.loads((folder / "verdicts.json").read_text()) == ["first", "second", "last"]
        assert {path.name for path in folder.iterdir()} == {"verdicts.json"}
    assert list(scratch.iterdir()) == []


@pytest.mark.usefixtures("scratch")
def test_disk_error_of_a_node_is_reported(
    registry: NodeRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(FakeForkServer):
        def ended(self, _: float) -> int:
            raise OSError(errno.EIO, "Input/output error", "/scratch/trial")

    monkeypatch.setattr(node, "ForkServer", Full)
    with serving(registry):
        (tmp_path / "evidence").write_text("of a cell")
        registry.send_file(0, tmp_path / "evidence", "0/rank-0.capture.npz")
        given = {"directory": str(tmp_path), "trial": None, "task": "compare", "rendezvous": None}
        answer = registry.ask([0], {"do": "run"} | given)[0]
        with pytest.raises(StorageError, match=r"/scratch/trial: node 0 .*Input/output error"):
            _checked(registry.nodes[0], answer)
        assert registry.ask([0], {"do": "machine", "device": "cpu"})[0]["cores"] == 3


@pytest.mark.usefixtures("scratch")
def test_node_reports_refusal_and_lost_controller(
    registry: NodeRegistry,
) -> None:
    with pytest.raises(ShardmarkError, match="refuses this node: it has another recipe"):
        joined(registry, 1, recipe="x")
    made = joined(registry, 1)
    registry.nodes[1].channel.close()
    assert made.serve() == "its connection was closed"


def test_interface_variables_follow_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in INTERFACE_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert interface_of("127.0.0.1") == "lo"
    assert interface_variables(None, "192.0.2.1") == {}
    assert interface_variables("ib0", "127.0.0.1") == dict.fromkeys(INTERFACE_VARIABLES, "ib0")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "mine")
    assert interface_variables(None, "127.0.0.1") == {"NCCL_SOCKET_IFNAME": "lo"}


@pytest.mark.parametrize(
    ("host", "nodes", "interface", "address"),
    [
        ("node0", 1, None, "127.0.0.1"),
        ("localhost", 2, None, "127.0.0.1"),
        ("192.0.2.7", 2, None, "192.0.2.7"),
        ("node0", 2, "eth0", "192.0.2.1"),
        ("node0", 2, "eth9", None),
        ("node0", 2, None, None),
    ],
)
def test_listening_address_is_unique(
    host: str,
    nodes: int,
    interface: str | None,
    address: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Never at all of the machine's, also where its own name leads to its loopback."""
    there = {"lo": "127.0.0.1", "eth0": "192.0.2.1", "eth1": "198.51.100.1"}
    interfaces = {
        name: [SimpleNamespace(family=socket.AF_INET, address=known)]
        for name, known in there.items()
    }
    names = {"node0": "127.0.1.1", "localhost": "127.0.0.1"}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: interfaces)
    monkeypatch.setattr(addresses, "resolved", lambda host, _: names.get(host, host))
    refused = pytest.raises(InputError, match=r"engine\.host: node0 is 127\.0\.1\.1 here")
    with nullcontext() if address else refused:
        option = "engine.host"
        where = listening_address(host, nodes=nodes, interface=interface, option=option)
        assert where == address


def test_node_ends_with_its_starter() -> None:
    reader, writer = os.pipe()
    os.close(writer)
    nobody = JoinOptions(host="127.0.0.1", port=9, key=KEY, join_seconds=300.0)
    with (
        os.fdopen(reader) as starter,
        pytest.raises(ShardmarkError, match="process that started this node has ended"),
    ):
        node.join(nobody, SECRET, starter)
