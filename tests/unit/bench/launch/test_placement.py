"""The placement of ranks, and whether the machines have room for it."""

from __future__ import annotations

import pytest

from shardmark.base.errors import StrategyUnavailable
from shardmark.base.machine import Machine
from shardmark.bench.launch.placement import check_trial, most_devices
from shardmark.ranks.strategies.fsdp import HybridFSDP
from shardmark.ranks.trial import Trial
from tests.unit.bench.launch import fakes
from tests.unit.bench.launch.fakes import FakeEngine

SERVED = "{name: ps-sync, servers: 1, server_device: cuda}"
SERVED_LAST = "{name: ps-sync, servers: 2, server_device: cuda, server_nodes: last}"


def trial_of(strategy: str, ranks: int, nodes: int) -> Trial:
    sizes = (f"matrix.world_size=[{ranks}]", f"placement.nodes={nodes}")
    return fakes.trial_of(strategy, *sizes, device="cuda")


@pytest.mark.parametrize(
    ("strategy", "devices"),
    [
        ("ddp", 2),
        ("{name: ps-sync, servers: 1}", 2),
        (SERVED, 3),
        ("{name: ps-sync, servers: 3}", 2),
        (SERVED_LAST, 4),
    ],
)
def test_devices_are_those_of_the_fullest_node(strategy: str, devices: int) -> None:
    assert most_devices(trial_of(strategy, 4, 2)) == devices


def test_trials_on_the_cpu_need_no_devices() -> None:
    assert most_devices(fakes.trial_of("ddp")) == 0


@pytest.mark.parametrize(
    ("size", "nodes", "group", "reason"),
    [
        (4, 1, None, None),
        (2, 1, None, "do not make two or more groups of shard_group 2"),
        (4, 2, None, None),
        (8, 2, None, None),
        (2, 2, None, "one rank on each node has nobody there to shard the model with"),
        (8, 2, 2, None),
        (8, 4, 4, None),
        (6, 2, 3, None),
        (6, 2, 2, "nodes of 3 ranks do not hold whole groups of shard_group 2"),
        (8, 2, 8, "8 ranks do not make two or more groups of shard_group 8"),
    ],
)
def test_hybrid_shards_inside_a_node(
    size: int, nodes: int, group: int | None, reason: str | None
) -> None:
    told = HybridFSDP(shard_group=group).unsupported_reason(size, nodes)
    assert told is None if reason is None else reason in str(told)
    if reason is None and group is None:
        assert HybridFSDP().group(size, nodes) == (2 if nodes == 1 else size // nodes)


@pytest.mark.parametrize(
    ("asked", "devices", "nodes", "lack"),
    [
        (("ddp", 4, 2), 2, 2, None),
        (("ddp", 4, 1), 2, 2, "it needs 4 CUDA devices and this machine"),
        ((SERVED_LAST, 4, 2), 3, 2, "4 CUDA devices on a node and some node has"),
        (("ddp", 2, 2), 2, 1, "2 nodes are asked for"),
    ],
)
def test_missing_devices_are_reported(
    asked: tuple[str, int, int], devices: int, nodes: int, lack: str | None
) -> None:
    trial = trial_of(*asked)
    machine = Machine(device_type="cuda", device_count=devices, cores=8)
    engine = FakeEngine(nodes=nodes)
    if lack is None:
        check_trial(trial, machine, engine)
        return
    with pytest.raises(StrategyUnavailable, match=lack):
        check_trial(trial, machine, engine)
