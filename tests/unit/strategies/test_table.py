"""The table of strategies: names, options and what is said about wrong ones.  Without torch."""

from __future__ import annotations

from typing import Any

import pytest

from shardmark.core.errors import InputError
from shardmark.core.shares import Shard
from shardmark.strategies import (
    SHARED_OPTIONS,
    STRATEGIES,
    build_strategy,
    fixed_options,
    option_names,
    strategy_class,
)
from shardmark.strategies.deepspeed.strategy import Zero
from shardmark.strategies.fsdp import FSDP, HybridFSDP

NAMES = (
    "single",
    "dp",
    "ddp",
    "fsdp",
    "fsdp-grad-op",
    "fsdp-hybrid",
    "zero-0",
    "zero-1",
    "zero-2",
    "zero-3",
    "ps-sync",
    "ps-async",
    "ps-bounded",
)
SERVED = ("ps-sync", "ps-async", "ps-bounded")


def test_table_has_the_contract_s_names() -> None:
    assert tuple(STRATEGIES) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_strategy_knows_its_name_and_options(name: str) -> None:
    strategy = build_strategy(name, {})
    assert strategy.name == name
    assert type(strategy) is strategy_class(name)
    assert strategy_class(name).__doc__
    assert not set(option_names(name)) & ({"name"} | set(SHARED_OPTIONS) | set(fixed_options(name)))
    assert all(isinstance(module, str) for module in strategy.loads())


def test_names_fix_options() -> None:
    assert fixed_options("zero-2") == {"stage": 2}
    assert fixed_options("ddp") == {}
    assert option_names("ddp") == ("bucket_mb", "static_graph")
    grad_op = build_strategy("fsdp-grad-op", {"wrap": "layers"})
    assert grad_op == FSDP(name="fsdp-grad-op", reshard_after_forward=False, wrap="layers")
    assert build_strategy("zero-3", {"bucket_mb": 1}) == Zero(stage=3, bucket_mb=1.0)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "fdsp",
            {},
            "strategy: there is no strategy 'fdsp'; did you mean 'fsdp'? "
            f"allowed: {', '.join(NAMES)}",
        ),
        ("horovod", {}, f"there is no strategy 'horovod'; allowed: {', '.join(NAMES)}"),
        (
            "ddp",
            {"bucket": 5},
            "strategy ddp: it has no option 'bucket'; did you mean 'bucket_mb'? "
            "allowed: bucket_mb, static_graph",
        ),
        ("single", {"wrap": "root"}, "strategy single: it has no option 'wrap'; allowed: none"),
        ("zero-1", {"stage": 2}, "strategy zero-1: it has no option 'stage'"),
        (
            "ddp",
            {"bucket_mb": 0},
            "strategy ddp, option bucket_mb: found 0; Input should be greater than 0",
        ),
        (
            "ddp",
            {"bucket_mb": "large"},
            "strategy ddp, option bucket_mb: found 'large'; Input should be a valid number",
        ),
        ("ddp", {"static_graph": "maybe"}, "option static_graph: found 'maybe'; Input should be"),
        ("fsdp", {"wrap": "all"}, "found 'all'; Input should be 'blocks', 'layers' or 'root'"),
        (
            "fsdp-hybrid",
            {"shard_group": 1},
            "option shard_group: found 1; Input should be greater than or equal to 2",
        ),
        ("fsdp-hybrid", {"shard_group": 2.5}, "option shard_group: found 2.5; Input should be"),
        ("zero-3", {"persistence_threshold": -1}, "found -1; Input should be greater than or"),
        ("zero-3", {"max_reuse_distance": -1}, "found -1; Input should be greater than or"),
        ("zero-3", {"max_live_parameters": 0.5}, "found 0.5; Input should be a valid integer"),
        ("zero-2", {"mixed_precision": "amp"}, "Input should be 'autocast' or 'native'"),
    ],
)
def test_wrong_names_and_options(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        build_strategy(name, options)
    assert message in str(caught.value)


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"single", "fsdp-hybrid", *SERVED}))
def test_company_is_needed(name: str) -> None:
    strategy = build_strategy(name, {})
    assert strategy.unsupported_reason(1) == "one rank has nobody to share the work with"
    assert strategy.unsupported_reason(2) is None


def test_single_is_one_device() -> None:
    single = build_strategy("single", {})
    assert single.unsupported_reason(1) is None
    assert single.unsupported_reason(2) == "single is one device"


@pytest.mark.parametrize(
    ("group", "good", "bad"), [(2, (4, 6, 8), (1, 2, 3, 5)), (3, (6, 9), (3, 4))]
)
def test_hybrid_needs_two_whole_groups(
    group: int, good: tuple[int, ...], bad: tuple[int, ...]
) -> None:
    strategy = HybridFSDP(shard_group=group)
    assert [strategy.unsupported_reason(size) for size in good] == [None] * len(good)
    for size in bad:
        reason = f"{size} ranks do not make two or more groups of shard_group {group}"
        assert strategy.unsupported_reason(size) == reason


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"dp", *SERVED}))
def test_every_rank_takes_its_slice(name: str) -> None:
    expected = tuple(Shard(index=rank, count=4) for rank in range(4))
    assert tuple(rank.share for rank in build_strategy(name, {}).layout(4).ranks) == expected


def test_dp_is_one_process_with_the_whole_batch() -> None:
    assert [rank.share for rank in build_strategy("dp", {}).layout(4).ranks] == [
        Shard(index=0, count=1)
    ]
