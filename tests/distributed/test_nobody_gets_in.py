"""A trial on one machine listens on its loopback alone; where nodes meet, no pickle is read."""

from __future__ import annotations

import os
import pickle
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch exports it lazily

from shardmark.base.errors import ShardmarkError
from shardmark.base.results.schema import Outcome
from shardmark.base.results.store import load_run
from shardmark.bench.launch.listener import ProgressListener, TrialProgress
from shardmark.bench.launch.local.rank_store import FileOfRanks, NodesStore
from shardmark.bench.launch.placement import MeetingPoint
from shardmark.bench.launch.session import run_experiment
from shardmark.experiment.load import from_mapping
from tests import ROOT
from tests.distributed.experiments import experiment
from tests.kept_engine import KeptEngine
from tests.listening import Address, is_loopback, of_this_process


@pytest.fixture
def seen(kept_engine: KeptEngine, monkeypatch: pytest.MonkeyPatch) -> set[Address]:
    """Addresses where trials listened, whatever their task and the user's settings."""
    addresses: set[Address] = set()
    run = kept_engine.run

    def watched(*arguments: Any, on_tick: Callable[[], None], **more: Any) -> Any:
        def look() -> None:
            addresses.update(of_this_process())
            on_tick()

        return run(*arguments, on_tick=look, **more)

    monkeypatch.setattr(kept_engine, "run", watched)
    return addresses


def test_verification_and_links_listen_on_loopback_alone(
    seen: set[Address], kept_engine: KeptEngine, tmp_path: Path
) -> None:
    """So do trials of each library that makes groups or connections of its own."""
    mapping = experiment(
        matrix={"strategy": ["fsdp", "zero-3", "zro", "ps-async"]},
        measure={"verify": True, "link_seconds": 0.2},
    )
    out = run_experiment(from_mapping(mapping), tmp_path / "run", engine=kept_engine)
    assert [trial.outcome for trial in load_run(out).trials] == [Outcome.OK] * 4
    assert seen, "gloo connects ranks by TCP"
    assert all(map(is_loopback, seen)), seen


def test_a_script_listens_on_loopback_alone(
    seen: set[Address], kept_engine: KeptEngine, tmp_path: Path
) -> None:
    """The ranks meet at the store of the agent, not at one of PyTorch's on all interfaces."""
    script = Path(__file__).with_name("plain_script.py")
    mapping = experiment(workload={}, matrix={"variant": {"ddp": ""}, "world_size": [2]}) | {
        "workload": {"name": "script", "command": str(script)},
        "recipe": {"steps": 2000},
    }
    del mapping["matrix"]["strategy"]
    out = run_experiment(from_mapping(mapping), tmp_path / "run", engine=kept_engine)
    assert [trial.outcome for trial in load_run(out).trials] == [Outcome.OK]
    assert seen, "the store listens, and gloo"
    assert all(map(is_loopback, seen)), seen


def test_single_node_of_a_torchrun_engine_listens_on_loopback_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The controller and the node process talk on the loopback, and the settings yield."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "an interface of the cluster")
    addresses: set[Address] = set()

    class Looking(ProgressListener):
        def trial_stepped(self, progress: TrialProgress) -> None:  # noqa: ARG002
            addresses.update(of_this_process())

    engine = {"name": "torchrun", "rendezvous": f"{socket.gethostname()}:29999"}
    mapping = experiment(engine=engine, recipe={"steps": 60})
    run_experiment(from_mapping(mapping), tmp_path / "run", listener=Looking())
    (trial,) = load_run(tmp_path / "run").trials
    assert trial.outcome is Outcome.OK, trial.failure
    assert addresses
    assert all(map(is_loopback, addresses)), addresses


class Pwned:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (str(self.path),)


def meeting_points(nodes: int) -> list[MeetingPoint]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    return [MeetingPoint(node=node, host="127.0.0.1", port=port) for node in range(nodes)]


def test_pickles_in_the_store_of_several_nodes_are_not_read(tmp_path: Path) -> None:
    """PyTorch's own store lets anybody in who can reach it: what is there is words to us."""
    points = meeting_points(2)
    pickled = pickle.dumps(Pwned(tmp_path / "pwned")).decode("latin-1")
    with ThreadPoolExecutor() as threads:
        first = NodesStore(2, points[0])
        waiting = threads.submit(first.open)
        second = NodesStore(2, points[1])
        stranger = TCPStore(
            "127.0.0.1", points[0].port, is_master=False, timeout=timedelta(seconds=5)
        )
        for key in (*stranger.list_keys(), "torch.rendezvous.t", "MASTER_ADDR"):
            stranger.set(key, pickled)
        second.open()
        waiting.result(timeout=60)
        address = f"tcp 127.0.0.1 {points[0].port} ranks"
        assert [second.address(), first.address()] == [address] * 2
        assert not (tmp_path / "pwned").exists()
        ending = threads.submit(first.close, succeeded=True)
        second.close(succeeded=True)
        ending.result(timeout=60)


def test_failed_node_ends_the_wait_of_other_nodes() -> None:
    here, there = meeting_points(2)
    with ThreadPoolExecutor() as threads:
        first = NodesStore(2, here)
        waiting = threads.submit(first.open)
        NodesStore(2, there).close(succeeded=False)
        with pytest.raises(ShardmarkError, match="another node has failed"):
            waiting.result(timeout=60)
        first.close(succeeded=True)


def test_store_of_one_node_is_a_deleted_file() -> None:
    """Nothing is left of it, however the trial ends."""
    before = of_this_process()
    kind, path = FileOfRanks().address().split()
    assert kind == "file"
    assert "(deleted)" in str(Path(path).readlink())
    assert of_this_process() == before
