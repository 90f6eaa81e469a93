"""Which rank sits where, and whether the machines have room for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardmark.core.errors import StrategyUnavailable
from shardmark.core.machine import Machine
from shardmark.launch.placement import Rendezvous, check_trial, most_devices, ranks_by_node
from shardmark.strategies import STRATEGIES, build_strategy, option_names
from shardmark.strategies.fsdp import HybridFSDP
from shardmark.trials.matrix import expand
from shardmark.trials.trial import Trial
from tests.unit.launch.fakes import FakeEngine, experiment

DEVICES = Machine(device_type="cuda", device_count=2, cores=8)


def trial_of(strategy: str, ranks: int, nodes: int, device: str = "cpu") -> Trial:
    settings = (f"matrix.strategy=[{strategy}]", f"matrix.world_size=[{ranks}]")
    made = experiment(*settings, f"placement.nodes={nodes}")
    (trial,) = expand(made, "cuda" if device == "cuda" else "cpu").trials
    return trial


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ("ddp", ((0, 1), (2, 3))),
        ("{name: ps-sync, servers: 1}", ((0, 1, 4), (2, 3))),
        ("{name: ps-sync, servers: 3}", ((0, 1, 4, 6), (2, 3, 5))),
        ("{name: ps-sync, servers: 2, server_nodes: last}", ((0, 1), (2, 3, 4, 5))),
    ],
)
def test_neighbours_sit_together_and_servers_in_turn(
    strategy: str, expected: tuple[tuple[int, ...], ...]
) -> None:
    assert ranks_by_node(trial_of(strategy, 4, 2)) == expected


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_process_has_a_seat(name: str) -> None:
    """On one node the order is the ranks' own, so that a local rank is the rank."""
    options = {"servers": 3} if "servers" in option_names(name) else {}
    strategy = build_strategy(name, options)
    for size, nodes in ((4, 1), (4, 2), (6, 3)):
        if (
            strategy.unsupported_reason(size, nodes) is None
            and strategy.layout(size, nodes).processes >= nodes
        ):
            nodes_of = [rank.node for rank in strategy.layout(size, nodes).ranks]
            assert len(nodes_of) == strategy.layout(size, nodes).processes
            assert set(nodes_of) <= set(range(nodes))
            training = [
                n
                for n, s in zip(nodes_of, strategy.layout(size, nodes).ranks, strict=True)
                if s.share
            ]
            assert training == sorted(training)
            assert len({training.count(node) for node in set(training)}) == 1


@pytest.mark.parametrize(
    ("size", "nodes", "group", "reason"),
    [
        (4, 1, None, None),
        (2, 1, None, "2 ranks do not make two or more groups of shard_group 2"),
        (4, 2, None, None),
        (8, 2, None, None),
        (2, 2, None, "one rank on each node has nobody there to shard the model with"),
        (8, 2, 2, None),
        (8, 4, 4, None),
        (6, 2, 3, None),
        (
            *(6, 2, 2),
            "nodes of 3 ranks do not hold whole groups of shard_group 2: "
            "some would lie in a node and others across nodes",
        ),
        (8, 2, 8, "8 ranks do not make two or more groups of shard_group 8"),
    ],
)
def test_hybrid_shards_inside_a_node(
    size: int, nodes: int, group: int | None, reason: str | None
) -> None:
    assert HybridFSDP(shard_group=group).unsupported_reason(size, nodes) == reason
    if reason is None and group is None:
        assert HybridFSDP().group(size, nodes) == (2 if nodes == 1 else size // nodes)


def test_devices_are_counted_on_the_fullest_node() -> None:
    assert most_devices(trial_of("ddp", 4, 2, "cuda")) == 2
    assert most_devices(trial_of("ddp", 4, 2)) == 0
    assert most_devices(trial_of("{name: ps-sync, servers: 1}", 4, 2, "cuda")) == 2
    served = "{name: ps-sync, servers: 1, server_device: cuda}"
    assert most_devices(trial_of(served, 4, 2, "cuda")) == 3


def test_what_the_machines_lack_is_said() -> None:
    engine = FakeEngine()
    engine.nodes = 2
    check_trial(trial_of("ddp", 4, 2, "cuda"), DEVICES, engine)
    with pytest.raises(StrategyUnavailable, match="it needs 4 CUDA devices and this machine"):
        check_trial(trial_of("ddp", 4, 1, "cuda"), DEVICES, engine)
    served = "{name: ps-sync, servers: 2, server_device: cuda, server_nodes: last}"
    four = Machine(device_type="cuda", device_count=3, cores=8)
    with pytest.raises(StrategyUnavailable, match="4 CUDA devices on a node and some node offers"):
        check_trial(trial_of(served, 4, 2, "cuda"), four, engine)
    engine.nodes = 1
    with pytest.raises(StrategyUnavailable, match="2 nodes are asked for"):
        check_trial(trial_of("ddp", 2, 2), DEVICES, engine)


def test_rendezvous_is_kept_beside_the_trial(tmp_path: Path) -> None:
    assert Rendezvous.read(tmp_path) == Rendezvous()
    written = Rendezvous(node=1, endpoint="a:1", address="b")
    written.write(tmp_path)
    assert Rendezvous.read(tmp_path) == written
