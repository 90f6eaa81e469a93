"""Requests of the engine `ray` to a cluster, and its message where there is none."""

from __future__ import annotations

import os
import signal
import socket
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from shardmark.base.errors import InputError
from shardmark.bench.launch.engines import submission
from shardmark.experiment.engines import RayOptions
from shardmark.experiment.experiment import Experiment
from shardmark.experiment.load import from_mapping
from shardmark.experiment.matrix import expand
from shardmark.extras.engines.ray import engine as ray_engine
from shardmark.extras.engines.ray.engine import NodeNeeds, connect, gpus_per_rank, needs_by_node
from shardmark.ranks.trial import Trial
from tests.unit.bench.launch.fakes import MAPPING
from tests.unit.extras.engines.nodes import request

TWO = [NodeNeeds(ranks=3, devices=2), NodeNeeds(ranks=1, devices=1)]
CPUS: list[dict[str, float]] = [{"CPU": 8}, {"CPU": 8}]
GPUS: list[dict[str, float]] = [{"CPU": 8, "GPU": 1}, {"CPU": 8, "GPU": 2}, {"CPU": 8}]
SERVER = {"name": "ps-sync", "servers": 1}


def options(**given: object) -> RayOptions:
    return RayOptions.model_validate(given)


def experiment(strategies: list[Any], *, nodes: list[int], **engine: object) -> Experiment:
    matrix = {"strategy": strategies, "nodes": nodes, "ranks_per_node": [1, 2]}
    return from_mapping(MAPPING | {"matrix": matrix, "engine": {"name": "ray"} | engine})


def trials_of(strategies: list[Any], nodes: list[int], device: Any = "cpu") -> tuple[Trial, ...]:
    return expand(experiment(strategies, nodes=nodes), device).trials


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("address", text) for text in ("ray://head:10001", "head", "head:port", "head:0")],
        *(("address", "local"), ("address", "http://head:80")),
        *(("gpus_per_rank", 2), ("gpus_per_rank", 0.5), ("cpus_per_rank", 0), ("node_seconds", 1)),
    ],
)
def test_impossible_placements_are_refused(name: str, value: object) -> None:
    with pytest.raises(ValidationError, match=name):
        options(**{name: value})
    assert options(address="[::1]:6379").address == "[::1]:6379"


@pytest.mark.parametrize(
    ("trials", "needs"),
    [
        (trials_of(["single", "ddp"], [1]), [(2, 2)]),
        (trials_of(["ddp"], [1, 2]), [(2, 2), (2, 2)]),
        (trials_of([SERVER], [2]), [(3, 2), (2, 2)]),
        (trials_of(["dp"], [1], "cuda"), [(2, 2)]),
    ],
    ids=["one node", "the largest trial", "a server without a device", "a rank of two devices"],
)
def test_needs_are_those_of_the_largest_trial_on_each_node(
    trials: tuple[Trial, ...], needs: list[tuple[int, int]]
) -> None:
    assert [(node.ranks, node.devices) for node in needs_by_node(trials)] == needs


@pytest.mark.parametrize(
    ("given", "device", "nodes", "gpus"),
    [
        (None, "cpu", GPUS, 0),
        (None, "auto", CPUS, 0),
        (None, "auto", GPUS, 1),
        (None, "auto", GPUS[:1], 0),
        (None, "cuda", CPUS, 1),
        (0, "auto", GPUS, 0),
        (1, "auto", CPUS, 1),
        (1, "cpu", GPUS, 0),
    ],
)
def test_gpus_per_rank_depend_on_device_and_cluster(
    given: int | None, device: str, nodes: list[dict[str, float]], gpus: int
) -> None:
    assert gpus_per_rank(options(gpus_per_rank=given), device, TWO, nodes) == gpus


def test_cuda_without_gpus_is_refused() -> None:
    with pytest.raises(InputError, match=r"engine\.gpus_per_rank: 0, and device is cuda"):
        gpus_per_rank(options(gpus_per_rank=0), "cuda", TWO, GPUS)


def said_of(made: Experiment) -> list[str]:
    return submission(made, expand(made), ["shardmark", "run"])


def test_dry_run_shows_reserved_resources() -> None:
    group, first, second = said_of(experiment(["ddp", SERVER], nodes=[1, 2]))
    assert "STRICT_SPREAD" in group
    assert "CPU 3, and 2 GPUs where the device is cuda" in first
    assert second.endswith("for 2 ranks")
    engine = {"address": "head:6379", "gpus_per_rank": 1, "runtime_env": {"working_dir": "."}}
    group, first, variables = said_of(experiment(["ddp"], nodes=[1], **engine))
    assert "at head:6379" in group
    assert "CPU 2, GPU 2, for 2 ranks" in first
    assert "working_dir" in variables


class RayError(Exception):
    """Ray's own error."""


class FakeRay:
    """A cluster, or why there is none."""

    def __init__(self, problem: Exception | None = None) -> None:
        self.problem = problem
        self._private = SimpleNamespace(worker=SimpleNamespace(_worker_logs_enabled=True))
        self.exceptions = SimpleNamespace(RayError=RayError)

    def init(self, **given: Any) -> None:
        self.given = given
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as Ray installs its own handler
        if self.problem is not None:
            raise self.problem


@pytest.fixture(autouse=True)
def _environment_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    for name in ("RAY_USAGE_STATS_ENABLED", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def test_missing_ray_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    engine = ray_engine.build(options(), request(trials_of(["ddp"], [1])))
    with pytest.raises(InputError, match="engine ray: ray is not installed") as caught:
        engine.machine("cpu")
    assert "pip install 'shardmark[ray]'" in str(caught.value)
    engine.close()


def _unused_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return f"127.0.0.1:{taken.getsockname()[1]}"


@pytest.mark.parametrize(
    ("problem", "address", "said"),
    [
        (None, "ray://head:10001", "RAY_ADDRESS: found ray://head:10001"),
        (None, _unused_address(), "engine.address: nobody answers at 127.0.0.1:"),
        (ConnectionError("None there\nx"), "", "engine.address: no Ray cluster: None there; st"),
        (RuntimeError("Version mismatch:\nx"), "", "engine: Ray refuses: Version mismatch:; the"),
        (ValueError("runtime_env is odd"), "", "engine: Ray refuses: runtime_env is odd"),
    ],
    ids=["client", "nobody", "no cluster", "version", "options"],  # a free port is no name
)
def test_missing_cluster_is_reported(
    problem: Exception | None, address: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(InputError) as caught:
        connect(FakeRay(problem), options())
    assert str(caught.value).startswith(said)
    assert signal.getsignal(signal.SIGTERM) == before


def test_connection_is_quiet_and_keeps_signal_handlers() -> None:
    ray, before = FakeRay(), signal.getsignal(signal.SIGTERM)
    connect(ray, options(namespace="mine", runtime_env={"working_dir": "."}))
    assert signal.getsignal(signal.SIGTERM) == before
    assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0"
    assert (ray.given["address"], ray.given["namespace"]) == ("auto", "mine")
    assert ray.given["runtime_env"] == {"working_dir": "."}
    assert not ray._private.worker._worker_logs_enabled
