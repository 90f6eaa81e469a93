"""What each strategy's definition has to send, worked out by hand.  Without torch."""

from __future__ import annotations

from typing import Any

import pytest

from shardmark.core.recipe import Recipe
from shardmark.strategies import STRATEGIES, build_strategy
from shardmark.strategies.wire import ModelSize, carried_share

SIZE = ModelSize(parameters=1_000_000, trained_parameters=1_000_000)
FROZEN = ModelSize(parameters=1_000_000, trained_parameters=400_000)
MB = 1e6


def recipe(**changes: Any) -> Recipe:
    return Recipe(global_batch=64, steps=1, **changes)


def carried(  # noqa: PLR0917
    name: str,
    world_size: int,
    options: dict[str, Any] | None = None,
    changes: dict[str, Any] | None = None,
    size: ModelSize = SIZE,
    nodes: int = 1,
) -> float:
    strategy = build_strategy(name, options or {})
    wire = strategy.wire_bytes(size, recipe(**(changes or {})), world_size, nodes)
    assert wire.formula
    return wire.carried_bytes


@pytest.mark.parametrize(
    ("name", "world_size", "megabytes"),
    [
        ("single", 1, 0.0),
        ("dp", 2, 0.0),
        ("ddp", 2, 4.0),
        ("ddp", 4, 6.0),
        ("fsdp", 2, 6.0),
        ("fsdp", 4, 9.0),
        ("fsdp-grad-op", 4, 6.0),
        ("zero-0", 4, 6.0),
        ("zero-1", 4, 6.0),
        ("zero-2", 4, 6.0),
        ("zero-3", 4, 9.0),
        ("ps-sync", 4, 8.0),
        ("ps-async", 1, 8.0),
        ("ps-bounded", 3, 8.0),
    ],
)
def test_fp32(name: str, world_size: int, megabytes: float) -> None:
    assert carried(name, world_size) == pytest.approx(megabytes * MB)


def test_hybrid_crosses_groups_with_a_shard_alone() -> None:
    """Two groups of two: 2 x 1/2 P + 1/2 G inside, 2 x 1/2 G/2 across."""
    assert carried("fsdp-hybrid", 4, {"shard_group": 2}) == pytest.approx((4 + 2 + 2) * MB)
    wire = build_strategy("fsdp-hybrid", {}).wire_bytes(SIZE, recipe(), 8, 2)
    across = next(one for one in wire.traffic if one.kind == "all_reduce")
    assert across.ranks == 2  # a group on each node
    assert across.payload_bytes == pytest.approx(MB)


def test_micro_batches() -> None:
    """They are gathered each; reduced once, by ZeRO from stage 2 on each."""
    twice = {"gradient_accumulation": 2}
    assert carried("ddp", 2, changes=twice) == pytest.approx(4 * MB)
    assert carried("fsdp", 2, changes=twice) == pytest.approx((8 + 2) * MB)
    assert carried("fsdp-grad-op", 2, changes=twice) == pytest.approx((4 + 2) * MB)
    assert carried("zero-1", 2, changes=twice) == pytest.approx((2 + 2) * MB)
    assert carried("zero-2", 2, changes=twice) == pytest.approx((4 + 2) * MB)
    assert carried("zero-3", 2, changes=twice) == pytest.approx((4 + 8) * MB)
    assert carried("ps-sync", 2, changes=twice) == pytest.approx(8 * MB)


def test_precision_of_what_is_gathered() -> None:
    """Autocast keeps fp32 parameters; `native` gathers 16 bits and reduces fp32."""
    bf16 = {"precision": "bf16"}
    assert carried("fsdp", 2, changes=bf16) == pytest.approx(6 * MB)
    assert carried("fsdp", 2, {"mixed_precision": "native"}, bf16) == pytest.approx((2 + 2) * MB)
    assert carried("zero-3", 2, {"mixed_precision": "native"}, bf16) == pytest.approx(4 * MB)
    assert carried("ps-sync", 2, {"wire": "bf16"}) == pytest.approx(4 * MB)


def test_frozen_parameters_have_no_gradients() -> None:
    assert carried("ddp", 2, size=FROZEN) == pytest.approx(1.6 * MB)
    assert carried("fsdp", 2, size=FROZEN) == pytest.approx((4 + 0.8) * MB)
    assert carried("zero-1", 2, size=FROZEN) == pytest.approx((0.8 + 0.8) * MB)


@pytest.mark.parametrize("name", sorted(STRATEGIES))
def test_every_collective_of_a_formula_has_a_share(name: str) -> None:
    wire = build_strategy(name, {}).wire_bytes(SIZE, recipe(), 4)
    assert all(carried_share(one.kind, one.ranks) is not None for one in wire.traffic)


def test_an_unknown_collective_has_none() -> None:
    assert carried_share("permute", 2) is None
    assert carried_share("barrier", 2) == 0
