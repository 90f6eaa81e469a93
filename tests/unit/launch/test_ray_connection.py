"""What the user reads where Ray, a cluster or room in it is missing; Ray is stood in for."""

from __future__ import annotations

import os
import signal
import socket
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from shardmark.config.engines import RayOptions
from shardmark.core.errors import InputError, ShardmarkError
from shardmark.launch.ray import cluster as ray_cluster
from shardmark.launch.ray import engine as ray_engine
from shardmark.launch.ray.cluster import RayCluster
from shardmark.launch.ray.connection import connected, disconnected, ray_module, reason_of
from shardmark.launch.ray.plan import Room
from tests.unit.launch.nodes import KEY

NODE = {"Alive": True, "NodeManagerHostname": "head", "Resources": {"CPU": 4.0, "node:a": 1.0}}
DEAD = {"Alive": False, "NodeManagerHostname": "gone", "Resources": {}}


class RayError(Exception):
    """Ray's own error."""


class Group:
    """A placement group for which there is no room."""

    def wait(self, seconds: float) -> bool:
        assert seconds > 0
        return False


class FakeRay:
    """A cluster of one node, or none."""

    def __init__(self, problem: Exception | None = None) -> None:
        self.problem = problem
        self._private = SimpleNamespace(worker=SimpleNamespace(_worker_logs_enabled=True))
        self.removed: list[Group] = []
        self.shut = 0
        self.variables: dict[str, str] = {}
        self.exceptions = SimpleNamespace(RayError=RayError)
        self.util = SimpleNamespace(
            placement_group=lambda *_, **__: Group(), remove_placement_group=self.removed.append
        )

    def init(self, **given: Any) -> None:
        self.given = given
        self.variables = dict(os.environ)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as Ray installs its own handler
        if self.problem is not None:
            raise self.problem

    def is_initialized(self) -> bool:
        return False

    def nodes(self) -> list[dict[str, Any]]:
        return [NODE, DEAD]

    def available_resources(self) -> dict[str, float]:
        return {"CPU": 1.5, "memory": 1e9, "object_store_memory": 1e9}

    def shutdown(self) -> None:
        self.shut += 1


def options(**given: object) -> RayOptions:
    return RayOptions.model_validate(given)


@pytest.fixture(autouse=True)
def _no_cluster_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def test_without_ray_the_remedy_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InputError, match="engine: ray cannot be imported") as caught:
        ray_engine.build(options(), [Room(ranks=1, devices=1)], KEY, print).machine("cpu")
    assert "pip install 'shardmark[ray]'" in str(caught.value)
    with pytest.raises(InputError):
        ray_module()


def test_nobody_at_the_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(InputError, match=rf"nobody answers at 127\.0\.0\.1:{port}") as caught:
        connected(FakeRay(), options(address=f"127.0.0.1:{port}"))
    assert "ray start --head" in str(caught.value)


@pytest.mark.parametrize(
    ("problem", "said"),
    [
        (ConnectionError("Could not find any\nmore"), "no Ray cluster: Could not find any; start"),
        (RuntimeError("Version mismatch:\nmore"), "Ray refuses: Version mismatch:; the same"),
        (ValueError("runtime_env is odd"), "Ray refuses: runtime_env is odd"),
    ],
)
def test_what_ray_says_is_told_in_one_line(problem: Exception, said: str) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(InputError) as caught:
        connected(FakeRay(problem), options())
    assert said in str(caught.value)
    assert signal.getsignal(signal.SIGTERM) == before


def test_ray_client_from_the_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "ray://head:10001")
    with pytest.raises(InputError, match="RAY_ADDRESS: found ray://head:10001"):
        connected(FakeRay(), options())


def test_connects_quietly_and_leaves_the_process_as_it_was() -> None:
    ray = FakeRay()
    before, variables = signal.getsignal(signal.SIGTERM), dict(os.environ)
    connected(ray, options(namespace="mine", runtime_env={"working_dir": "."}))
    assert signal.getsignal(signal.SIGTERM) == before
    assert dict(os.environ) == variables
    assert ray.variables["RAY_USAGE_STATS_ENABLED"] == "0"
    assert ray.given["address"] == "auto"
    assert ray.given["namespace"] == "mine"
    assert ray.given["runtime_env"] == {"working_dir": "."}
    assert ray.given["log_to_driver"] is False
    assert not ray._private.worker._worker_logs_enabled
    disconnected(ray)
    assert ray._private.worker._worker_logs_enabled


def test_without_room_both_sides_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = FakeRay()
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr(ray_cluster, "POLL_SECONDS", 0.001)
    told: list[str] = []
    cluster = RayCluster(options(join_seconds=0.01, cpus_per_rank=4), key=KEY, tell=told.append)
    cluster.connect()
    assert cluster.resources() == [{"CPU": 4.0, "node:a": 1.0}]
    cluster.ask_for([Room(ranks=2, devices=2), Room(ranks=1, devices=1)], 1)
    with pytest.raises(ShardmarkError) as caught:
        cluster.start(SimpleNamespace(place="127.0.0.1:1"))  # type: ignore[arg-type]  # not used
    asked = "CPU 8, GPU 2 and CPU 4, GPU 1, each on a node of its own"
    assert told == [f"waiting for room in the Ray cluster: {asked}"]
    assert str(caught.value) == (
        f"Ray had no room within 0.01 s for {asked}; the cluster has 1 node (head CPU 4), free of "
        "it is CPU 1.5; free the resources, add nodes, or set engine.cpus_per_rank, "
        "engine.gpus_per_rank"
    )
    assert len(ray.removed) == 1
    cluster.close()
    cluster.close()
    assert ray.shut == 1


def test_reason_is_the_first_line_of_the_cause() -> None:
    assert reason_of(ValueError("\n  what went wrong\nand where")) == "what went wrong"
    wrapped = RuntimeError("outer")
    wrapped.cause = ValueError("inner")  # type: ignore[attr-defined]  # as Ray's errors have it
    assert reason_of(wrapped) == "inner"
    assert reason_of(ValueError()) == "ValueError"
