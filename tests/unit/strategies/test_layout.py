"""What each strategy's ranks see, hold and send, worked out by hand.  Without torch."""

from __future__ import annotations

from typing import Any

import pytest

from shardmark.core.layout import Fractions
from shardmark.core.recipe import Recipe
from shardmark.core.shares import Shard
from shardmark.core.traffic import ModelSize
from shardmark.strategies import build_strategy

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
def test_layouts(
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
    """And the traffic across the groups is a shard's."""
    hybrid = build_strategy("fsdp-hybrid", {})
    assert hybrid.layout(8, 2).shard == 4
    wire = hybrid.wire_bytes(SIZE, Recipe(global_batch=64, steps=1), 8, 2)
    (across,) = (part for part in wire.traffic if part.kind == "all_reduce")
    assert across.ranks == 2
    assert across.payload_bytes == pytest.approx(MB)


SIZE = ModelSize(
    parameters=1_000_000,
    trained_parameters=1_000_000,
    divided={"in": 3_000, "out": 2_000, "rows": 1_000, "logits": 4_000, "exchanged": 6_000},
    divided_again={"in": 1_500, "out": 1_000, "exchanged": 1_000},
    between_stages_bytes=6_000,
    tied_parameters=20_000,
)
FROZEN = ModelSize(parameters=1_000_000, trained_parameters=400_000)
MB = 1e6
TWICE, BF16 = {"gradient_accumulation": 2}, {"precision": "bf16"}
AUTOCAST = {"mixed_precision": "autocast"}
SHARED_BY_TWO = {"mesh": {"shard": 2, "sequence": 2}}


@pytest.mark.parametrize(
    ("name", "ranks", "options", "changes", "megabytes"),
    [
        ("single", 1, {}, {}, 0),
        ("dp", 2, {}, {}, 0),
        ("ddp", 2, {}, {}, 4),
        ("ddp", 2, {}, TWICE, 4),
        ("fsdp", 2, {}, {}, 6),
        ("fsdp", 2, {}, TWICE, 8 + 2),  # each micro-batch gathers, the last one reduces
        ("fsdp", 2, AUTOCAST, BF16, 6),  # it keeps fp32 parameters
        ("fsdp", 2, {}, BF16, 2 + 2),
        ("fsdp", 2, {}, {"precision": "fp16"}, 6),
        ("zero-1", 2, {}, BF16, 2 + 1),
        ("fsdp-grad-op", 4, {}, {}, 6),
        ("fsdp-grad-op", 2, {}, TWICE, 4 + 2),
        ("fsdp-hybrid", 4, {"shard_group": 2}, {}, 4 + 2 + 2),  # P, G inside; G/2 across
        ("zero-0", 4, {}, {}, 6),
        ("zero-1", 4, {}, {}, 6),
        ("zero-1", 2, {}, TWICE, 2 + 2),
        ("zero-2", 2, {}, TWICE, 4 + 2),  # from stage 2 on each micro-batch is reduced
        ("zero-3", 4, {}, {}, 9),
        ("zero-3", 2, {}, TWICE, 4 + 8),
        ("zero-3", 2, {}, BF16, 2 + 2),
        ("ddp", 2, {"compress": "bf16"}, TWICE, 2),
        ("ddp", 4, {"compress": "fp16"}, BF16, 3),
        ("zro", 2, {}, {}, 4 + 2),
        ("fsdp1", 2, {}, {}, 6),
        ("fsdp1", 2, {}, TWICE, 8 + 2),
        ("fsdp1", 2, {"reshard_after_forward": False}, TWICE, 2 + 2),
        ("local-sgd", 2, {"period_steps": 8}, TWICE, 4 / 8),
        ("diloco", 4, {"period_steps": 40, "fragments": 2}, {}, 6 / 40),
        # 64 samples: 24 kB of fp32 of each, 4 more with checkpoints; half of 16 kB of logits.
        ("tp", 2, {}, {}, 64 * (28 + 8) / 1000),
        ("tp", 2, {"loss_parallel": True}, BF16, 64 * (24 - 4 + 2) / 1000),
        # Gathered, 24 and 6 again, and scattered, 24 and 4 again: half of both.
        ("tp", 2, {"sequence_parallel": True, "loss_parallel": True}, {}, 64 * 29 / 1000),
        # Half the samples, and 3 x half the gradients and parameters of a half.
        ("fsdp-tp", 4, {}, {}, 32 * (28 + 8) / 1000 + 3),
        # 64 samples of 6 kB both ways, sent by 2 ranks, which each share a tied gradient of 80 kB.
        ("pp", 2, {}, {}, 64 * 6 / 2000 + 0.08),
        # Each pipeline has half the samples, and half of the gradients on each of its ranks.
        ("ddp-pp", 4, {}, {}, 32 * 6 / 2000 + 0.08 + 2.04),
        ("fsdp-pp", 4, {}, TWICE, 32 * 6 / 2000 + 0.04 + 2 * 2.04),
        # Half of what passes between tensor ranks, a quarter of the parameters.
        ("fsdp-tp-pp", 8, {}, {}, 16 * (28 + 8) / 1000 + 32 * 6 / 2000 + 0.02 + 1.02),
        # 64 samples of 6,000 numbers both ways and 1,000 again, of which 2 ranks hand in a half
        # each and send half of that; and gradients.
        ("ulysses", 2, {}, {}, 64 * (2 * 6 + 1) * 4 / 4000 + 4),
        ("fsdp-ulysses", 4, SHARED_BY_TWO, BF16, 32 * (2 * 6 + 1) * 2 / 4000 + 3 + 3),
        ("ps-sync", 4, {}, {}, 8),
        ("ps-sync", 2, {}, TWICE, 8),
        ("ps-sync", 2, {"wire": "bf16"}, {}, 4),
        ("ps-bounded", 3, {}, {}, 8),
    ],
)
def test_bytes_that_the_network_has_to_carry(
    name: str, ranks: int, options: dict[str, Any], changes: dict[str, Any], megabytes: float
) -> None:
    recipe = Recipe.model_validate({"global_batch": 64, "steps": 1, **changes})
    wire = build_strategy(name, options).wire_bytes(SIZE, recipe, ranks)
    assert wire.required_bytes == pytest.approx(megabytes * MB)


def test_frozen_parameters_have_no_gradients() -> None:
    for name, megabytes in (("ddp", 1.6), ("fsdp", 4.8), ("zero-1", 1.6)):
        wire = build_strategy(name, {}).wire_bytes(FROZEN, Recipe(global_batch=64, steps=1), 2)
        assert wire.required_bytes == pytest.approx(megabytes * MB)


def test_powersgd_sends_thin_matrices_and_the_rest_whole() -> None:
    """Three matrices of rank 2 or less than that; a small one and the vectors save too little."""
    matrices = ((1000, 300, 2), (1, 5000, 1), (6, 6, 4), (500, 1, 3), (1, 1, 1))
    elements = sum(rows * columns * count for rows, columns, count in matrices)
    size = ModelSize(parameters=elements, trained_parameters=elements, trained_matrices=matrices)
    options = {"compress": "powersgd", "powersgd_rank": 2}
    wire = build_strategy("ddp", options).wire_bytes(size, Recipe(global_batch=8, steps=9), 2)
    rest = 5000 + 4 * 36 + 3 * 500 + 1
    assert wire.required_bytes == 4 * (2 * 2 * (1000 + 300) + rest)
    assert wire.note == "the first 2 steps reduce whole gradients"


@pytest.mark.parametrize(
    ("options", "changes", "large_gathers"),
    [
        ({}, {}, 1),  # stays for the backward pass
        ({}, TWICE, 2),
        ({"max_reuse_distance": 0}, {}, 2),
        ({"max_reuse_distance": 0}, TWICE, 4),
    ],
)
def test_stage_3_sends_small_parameters_one_by_one(
    options: dict[str, Any], changes: dict[str, Any], large_gathers: int
) -> None:
    """A large matrix, and five vectors that stay whole on every rank until they are updated."""
    matrices = ((1000, 200, 1), (2000, 1, 5))
    size = ModelSize(
        parameters=210_000, trained_parameters=210_000, trained_matrices=matrices, units=3
    )
    recipe = Recipe.model_validate({"global_batch": 64, "steps": 1, **changes})
    reduced, gathered, small = build_strategy("zero-3", options).sent(size, recipe, 2)
    assert reduced.kind == "reduce_scatter"
    assert gathered.payload_bytes == pytest.approx(large_gathers * 4 * 200_000 / 2)
    assert (small.payload_bytes, small.calls, small.waited_for) == (4 * 10_000 / 2, 5, True)
    everything = build_strategy("zero-3", {"persistence_threshold": 0, "max_reuse_distance": 0})
    sent = sum(each.required_bytes for each in everything.sent(size, recipe, 2))
    assert sent == pytest.approx(everything.wire_bytes(size, recipe, 2).required_bytes)
