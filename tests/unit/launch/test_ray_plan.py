"""What the engine `ray` asks a cluster for, said without Ray."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from pydantic import ValidationError

from shardmark.config.engines import RayOptions
from shardmark.config.experiment import Experiment
from shardmark.config.load import from_mapping
from shardmark.core.errors import InputError
from shardmark.launch.engines import ENGINES, submission
from shardmark.launch.ray.plan import Room, bundles, gpus_of_a_rank, rooms
from shardmark.trials.matrix import expand
from tests.unit.launch.fakes import MAPPING

TWO = [Room(ranks=3, devices=2), Room(ranks=1, devices=1)]
CPUS: list[dict[str, float]] = [{"CPU": 8}, {"CPU": 8}]
GPUS: list[dict[str, float]] = [{"CPU": 8, "GPU": 1}, {"CPU": 8, "GPU": 2}, {"CPU": 8}]


def options(**given: object) -> RayOptions:
    return RayOptions.model_validate(given)


def experiment(strategies: list[Any], *, nodes: list[int], **engine: object) -> Experiment:
    matrix = {"strategy": strategies, "nodes": nodes, "ranks_per_node": [1, 2]}
    return from_mapping(MAPPING | {"matrix": matrix, "engine": {"name": "ray"} | engine})


def asked(strategies: list[Any], nodes: list[int]) -> tuple[Room, ...]:
    return rooms(expand(experiment(strategies, nodes=nodes), "cpu").trials)


@pytest.mark.parametrize(
    "address", ["ray://head:10001", "head", "head:port", "head:0", "local", "http://head:80"]
)
def test_address_is_that_of_a_head(address: str) -> None:
    with pytest.raises(ValidationError, match="allowed are auto and HOST:PORT of the head"):
        options(address=address)


@pytest.mark.parametrize("address", ["auto", "10.0.0.1:6379", "[::1]:6379", "head.lan:6379"])
def test_address_of_a_head_is_taken(address: str) -> None:
    assert options(address=address).address == address


@pytest.mark.parametrize(
    ("name", "value"),
    [("gpus_per_rank", 2), ("gpus_per_rank", 0.5), ("cpus_per_rank", 0), ("node_seconds", 1)],
)
def test_amounts_that_no_rank_can_use_are_refused(name: str, value: float) -> None:
    with pytest.raises(ValidationError, match=name):
        options(**{name: value})


def test_room_is_that_of_the_largest_trial_on_each_node() -> None:
    assert asked(["single", "ddp"], [1]) == (Room(ranks=2, devices=2),)
    assert asked(["ddp"], [1, 2]) == (Room(ranks=2, devices=2),) * 2


def test_parameter_server_has_room_and_no_device() -> None:
    there = asked([{"name": "ps-sync", "servers": 1}], [2])
    assert there == (Room(ranks=3, devices=2), Room(ranks=2, devices=2))


def test_one_rank_of_several_devices_has_room_for_them() -> None:
    trials = expand(experiment(["dp"], nodes=[1]), "cuda").trials
    assert rooms(trials) == (Room(ranks=2, devices=2),)


def test_restarts_are_refused() -> None:
    given = from_mapping(MAPPING | {"limits": {"max_restarts": 1}, "engine": "ray"})
    with pytest.raises(InputError, match=r"limits\.max_restarts: 1, and the engine ray"):
        submission(given, [])


def test_bundle_holds_what_all_ranks_of_a_node_need() -> None:
    given = options(cpus_per_rank=1.5, resources={"fast": 0.5})
    assert bundles(given, TWO, 1) == [
        {"CPU": 4.5, "GPU": 2, "fast": 1.5},
        {"CPU": 1.5, "GPU": 1, "fast": 0.5},
    ]
    assert bundles(options(), TWO, 0) == [{"CPU": 3}, {"CPU": 1}]


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
def test_gpus_by_device_and_cluster(
    given: int | None, device: str, nodes: list[dict[str, float]], gpus: int
) -> None:
    assert gpus_of_a_rank(options(gpus_per_rank=given), device, TWO, nodes) == gpus


def test_cuda_without_gpus_contradicts_itself() -> None:
    with pytest.raises(InputError, match=r"engine\.gpus_per_rank: 0, and device is cuda"):
        gpus_of_a_rank(options(gpus_per_rank=0), "cuda", TWO, GPUS)


def test_dry_run_says_what_would_be_reserved() -> None:
    strategies = ["ddp", {"name": "ps-sync", "servers": 1}]
    said = submission(experiment(strategies, nodes=[1, 2]), ["shardmark", "run"])
    assert said == [
        "in the cluster at auto: one placement group for all trials, STRICT_SPREAD, 2 bundles",
        'node 0: {"CPU": 3.0}, and {"GPU": 2} where the device is cuda: a node actor and '
        "3 rank actors",
        'node 1: {"CPU": 2.0}, and {"GPU": 2} where the device is cuda: a node actor and '
        "2 rank actors",
    ]


def test_dry_run_shows_gpus_and_runtime_env_that_were_given() -> None:
    engine = {
        "address": "head:6379",
        "gpus_per_rank": 1,
        "runtime_env": {"working_dir": "."},
    }
    said = submission(experiment(["ddp"], nodes=[1], **engine), ["shardmark", "run"])
    assert said == [
        "in the cluster at head:6379: one placement group for all trials, STRICT_SPREAD, 1 bundle",
        'node 0: {"CPU": 2.0, "GPU": 2.0}: a node actor and 2 rank actors',
        'runtime_env: {"working_dir": "."}',
    ]


def test_table_of_engines_loads_no_ray() -> None:
    assert "ray" in ENGINES
    code = "import sys, shardmark.launch.engines; print('ray' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert found.stdout.strip() == "False"
