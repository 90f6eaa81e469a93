"""What the strategies with servers refuse, promise and write down."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardmark.core.errors import InputError, StrategyUnavailable
from shardmark.core.machine import Machine
from shardmark.core.recipe import Recipe
from shardmark.core.shares import Shard
from shardmark.strategies import build_strategy
from shardmark.strategies.base import RankContext
from tests.unit.training.toy import ToyWorkload, recipe

CPU = Machine(device_type="cpu", device_count=0, cores=8)
GPUS = Machine(device_type="cuda", device_count=4, cores=8)
NAMES = ("ps-sync", "ps-async", "ps-bounded")


def refusal(name: str, machine: Machine, options: dict[str, Any], asked: Recipe) -> str:
    with pytest.raises(StrategyUnavailable) as caught:
        build_strategy(name, options).check(3, machine, asked)
    return str(caught.value)


@pytest.mark.parametrize("name", NAMES)
def test_servers_come_on_top_of_the_workers(name: str) -> None:
    strategy = build_strategy(name, {"servers": 2})
    workers = tuple(Shard(index=rank, count=3) for rank in range(3))
    assert tuple(rank.share for rank in strategy.layout(3).ranks) == (*workers, None, None)
    assert strategy.unsupported_reason(1) is None, "one worker may learn from a server"
    assert strategy.backend("cuda") == strategy.backend("cpu") == "gloo"


def test_servers_have_devices_of_their_own_or_none() -> None:
    on_cpu = build_strategy("ps-async", {})
    on_device = build_strategy("ps-async", {"server_device": "cuda"})
    assert [on_cpu.rank_device(rank, 3, "cuda") for rank in (2, 3)] == ["cuda", "cpu"]
    assert [on_device.rank_device(rank, 3, "cuda") for rank in (2, 3)] == ["cuda", "cuda"]
    assert on_cpu.rank_device(3, 3, "cpu") == "cpu"
    on_device.check(3, GPUS, recipe())
    two = {"server_device": "cuda", "servers": 2}
    assert "it needs 5 CUDA devices and this machine offers 4" in refusal(
        "ps-async", GPUS, two, recipe()
    )
    assert "server_device is cuda, and the workers are on the CPU" in refusal(
        "ps-async", CPU, {"server_device": "cuda"}, recipe()
    )


@pytest.mark.parametrize("name", NAMES)
def test_fp16_and_offload_are_refused(name: str) -> None:
    for machine in (CPU, GPUS):
        assert "fp16 needs one loss scale" in refusal(name, machine, {}, recipe(precision="fp16"))
    assert "server_device: cpu" in refusal(name, GPUS, {}, recipe(cpu_offload=True))


@pytest.mark.parametrize(
    ("name", "options", "bound", "promises", "tolerates_worker_loss"),
    [
        ("ps-sync", {}, 0, None, False),
        ("ps-bounded", {"staleness": 0}, 0, None, False),
        ("ps-bounded", {"staleness": 2}, 2, "no worker over 2 steps ahead", True),
        ("ps-async", {}, None, "every gradient is applied once", True),
    ],
)
def test_promises(
    name: str,
    options: dict[str, Any],
    bound: int | None,
    promises: str | None,
    tolerates_worker_loss: bool,
) -> None:
    strategy = build_strategy(name, options)
    settings = strategy.settings(recipe())
    assert settings["staleness_bound"] == bound
    assert settings["wire_precision"] == "fp32"
    guarantee = strategy.guarantee()
    assert (
        (guarantee is None)
        if promises is None
        else (guarantee is not None and promises in guarantee)
    )
    assert strategy.tolerates_worker_loss() is tolerates_worker_loss
    together = build_strategy("ps-sync", {}).settings(recipe())["gradient_reduction"]
    assert (settings["gradient_reduction"] == together) is (bound == 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"servers": 0}, "option servers: found 0"),
        ({"staleness": -1}, "option staleness: found -1"),
        ({"wire": "fp8"}, "option wire: found 'fp8'"),
        ({"bucket_mb": 0}, "option bucket_mb: found 0"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        build_strategy("ps-bounded", options)
    assert message in str(caught.value)


@pytest.mark.parametrize("rank", [0, 1, 5])
def test_more_servers_than_parameters(rank: int) -> None:
    """Known on every rank before any waits for another."""
    process = RankContext(
        rank=rank, world_size=6, local_rank=rank, local_world_size=6, device=torch.device("cpu")
    )
    with pytest.raises(StrategyUnavailable) as caught:
        build_strategy("ps-sync", {"servers": 5}).start(ToyWorkload(), recipe(), process)
    assert str(caught.value) == (
        "cannot run 'ps-sync' here: 5 servers cannot share 4 trainable parameters; "
        "use at most 4 servers"
    )
