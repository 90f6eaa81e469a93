"""The samples and the state that each rank of a strategy has, computed by hand, without torch."""

from __future__ import annotations

from typing import Any

import pytest

from shardmark.base.layout import Fractions, Shard
from shardmark.ranks.strategies import build_strategy

WHOLE = (1.0, 1.0, 1.0)
MESH = {"data": 2, "shard": 2, "tensor": 2}
SHARED = {"data": 2, "shard": 2, "sequence": 2}
LAYOUTS: list[tuple[str, dict[str, Any], int, tuple[int, int, int], tuple[float, float, float]]] = [
    # name, options, ranks; copies, parts of a copy, servers; fractions that a training rank holds
    ("single", {}, 1, (1, 1, 0), WHOLE),
    ("dp", {}, 4, (4, 1, 0), WHOLE),
    ("ddp", {}, 4, (4, 1, 0), WHOLE),
    ("fsdp", {}, 4, (1, 4, 0), (0.25, 0.25, 0.25)),
    ("fsdp-grad-op", {}, 4, (1, 4, 0), (1.0, 0.25, 0.25)),
    ("fsdp-hybrid", {}, 4, (2, 2, 0), (0.5, 0.5, 0.5)),
    ("fsdp-hybrid", {"shard_group": 4}, 8, (2, 4, 0), (0.25, 0.25, 0.25)),
    ("zero-0", {}, 4, (4, 1, 0), WHOLE),
    ("zero-1", {}, 4, (1, 4, 0), (1.0, 1.0, 0.25)),
    ("zero-2", {}, 4, (1, 4, 0), (1.0, 0.25, 0.25)),
    ("zero-3", {}, 4, (1, 4, 0), (0.25, 0.25, 0.25)),
    ("zro", {}, 4, (1, 4, 0), (1.0, 1.0, 0.25)),
    ("fsdp1", {}, 4, (1, 4, 0), (0.25, 0.25, 0.25)),
    ("fsdp1", {"reshard_after_forward": False}, 4, (1, 4, 0), (1.0, 0.25, 0.25)),
    ("local-sgd", {}, 4, (4, 1, 0), WHOLE),
    ("diloco", {}, 4, (4, 1, 0), (2.0, 1.0, 1.0)),
    ("tp", {}, 4, (1, 1, 0), (0.25, 0.25, 0.25)),
    ("fsdp-tp", {}, 8, (1, 4, 0), (0.125, 0.125, 0.125)),
    ("fsdp-tp", {"mesh": MESH}, 8, (2, 2, 0), (0.25, 0.25, 0.25)),
    ("pp", {}, 4, (1, 1, 0), (0.25, 0.25, 0.25)),
    ("ddp-pp", {"mesh": {"data": 2, "pipeline": 4}}, 8, (2, 1, 0), (0.25, 0.25, 0.25)),
    ("fsdp-pp", {}, 8, (1, 4, 0), (0.5, 0.5, 0.125)),
    ("fsdp-tp-pp", {}, 8, (1, 2, 0), (0.25, 0.25, 0.125)),
    ("fsdp-tp-pp", {"mesh": {"data": 2, "tensor": 2}}, 4, (2, 1, 0), (0.5, 0.5, 0.5)),
    ("ulysses", {}, 4, (1, 1, 0), WHOLE),
    ("ulysses", {"mesh": {"data": 2, "sequence": 4}}, 8, (2, 1, 0), WHOLE),
    ("fsdp-ulysses", {"mesh": SHARED}, 8, (2, 2, 0), (0.25, 0.25, 0.25)),
    ("ps-sync", {}, 3, (3, 1, 1), (1.0, 1.0, 0.0)),
    ("ps-async", {"servers": 2}, 4, (4, 1, 2), (1.0, 1.0, 0.0)),
    ("ps-bounded", {}, 1, (1, 1, 1), (1.0, 1.0, 0.0)),
]


def fractions(holds: Fractions) -> tuple[float, float, float]:
    return holds.parameters, holds.gradients, holds.optimizer_state


@pytest.mark.parametrize(("name", "options", "ranks", "factors", "held"), LAYOUTS)
def test_layout_has_shares_and_held_fractions(
    name: str,
    options: dict[str, Any],
    ranks: int,
    factors: tuple[int, int, int],
    held: tuple[float, float, float],
) -> None:
    layout = build_strategy(name, options).layout(ranks)
    assert (layout.data, layout.shard, len(layout.server_ranks)) == factors
    together = ranks // (factors[0] * factors[1])
    assert layout.tensor * layout.pipeline * layout.sequence == together
    assert layout.pipeline == 1 or name.endswith("pp")
    assert layout.tensor == 1 or "tp" in name
    assert layout.sequence == 1 or "ulysses" in name
    assert (layout.devices, layout.shares) == (ranks, ranks // together)
    training = [layout.ranks[rank] for rank in layout.training_ranks]
    count = 1 if name == "dp" else ranks // together
    shares = [Shard(index=i, count=count) for i in range(count) for _ in range(together)]
    assert [rank.share for rank in training] == shares
    assert {fractions(rank.holds) for rank in training} == {held}
    counted = [rank.share for rank in training if rank.counts_loss]
    assert counted == shares[::together], "each share once"
    assert layout.server_ranks == tuple(range(ranks, ranks + factors[2])), "servers come last"


@pytest.mark.parametrize(("device", "on_cpu"), [("cpu", True), ("cuda", False)])
def test_a_server_holds_its_part_and_a_gradient_of_each_worker(device: str, on_cpu: bool) -> None:
    layout = build_strategy("ps-sync", {"servers": 2, "server_device": device}).layout(3)
    assert [fractions(layout.ranks[rank].holds) for rank in (3, 4)] == [(0.5, 1.5, 0.5)] * 2
    assert [rank.on_cpu for rank in layout.ranks] == [False] * 3 + [on_cpu] * 2


@pytest.mark.parametrize(
    ("name", "options", "ranks", "nodes", "expected"),
    [
        ("ddp", {}, 4, 2, ((0, 1), (2, 3))),
        ("fsdp-hybrid", {}, 6, 2, ((0, 1, 2), (3, 4, 5))),
        ("fsdp-tp", {}, 8, 2, ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("ulysses", {}, 4, 2, ((0, 1), (2, 3))),
        ("dp", {}, 4, 1, ((0,),)),
        ("ps-sync", {"servers": 3}, 4, 2, ((0, 1, 4, 6), (2, 3, 5))),
        ("ps-async", {"servers": 2, "server_nodes": "last"}, 4, 2, ((0, 1), (2, 3, 4, 5))),
    ],
)
def test_neighbours_sit_together_and_servers_in_turn(
    name: str, options: dict[str, Any], ranks: int, nodes: int, expected: Any
) -> None:
    assert build_strategy(name, options).layout(ranks, nodes).ranks_by_node == expected


def test_a_hybrid_s_group_is_a_node() -> None:
    assert build_strategy("fsdp-hybrid", {}).layout(8, 2).shard == 4
