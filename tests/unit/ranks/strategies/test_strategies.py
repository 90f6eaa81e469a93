"""The table of strategies: options, refusals and recorded mathematics.  Without torch."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from shardmark.base.errors import InputError, StrategyUnavailable
from shardmark.base.machine import Machine
from shardmark.base.recipe import Recipe
from shardmark.extras.parameter_server.strategy import AsynchronousServer
from shardmark.ranks.strategies import (
    SHARED_OPTIONS,
    STRATEGIES,
    build_strategy,
    fixed_options,
    option_names,
)
from shardmark.ranks.strategies.base import common_settings

CPU = Machine(device_type="cpu", device_count=0, cores=8)
GPUS = Machine(device_type="cuda", device_count=4, cores=8)
OLD_GPUS = Machine(device_type="cuda", device_count=8, cores=8, has_bf16=False)
NAMES = tuple(STRATEGIES)
SERVED = ("ps-sync", "ps-async", "ps-bounded")
ZEROS = ("zero-0", "zero-1", "zero-2", "zero-3")
LOCAL = ("local-sgd", "diloco")
WHOLE_STATE = ("single", "dp", "ddp", "zro", "fsdp1", *LOCAL)
FUSED_FP16 = {"precision": "fp16", "optimizer": {"name": "sgd", "implementation": "fused"}}
SHARDING = ("fsdp", "fsdp-grad-op", "fsdp-hybrid", "zero-1", "zero-2", "zero-3")


def recipe(**changes: Any) -> Recipe:
    return Recipe.model_validate({"global_batch": 8, "steps": 2, **changes})


def ranks(name: str) -> int:
    return 1 if name == "single" else 4


@pytest.fixture(autouse=True)
def tools(monkeypatch: pytest.MonkeyPatch) -> dict[str, str | None]:
    """DeepSpeed as if it were installed; a test takes it away."""
    found: dict[str, str | None] = {"deepspeed": "x"}
    monkeypatch.setattr(importlib.util, "find_spec", found.get)
    return found


def test_names_fix_options() -> None:
    assert fixed_options("zero-2") == {"name": "zero-2", "stage": 2}
    assert option_names("ddp")[:3] == ("bucket_mb", "static_graph", "find_unused_parameters")
    assert "stage" not in option_names("zero-1")
    assert build_strategy("zero-3", {}) != replace(build_strategy("zero-2", {}), name="zero-3")
    for name in NAMES:
        shared = {"name", *SHARED_OPTIONS, *fixed_options(name)}
        assert not shared.intersection(option_names(name))


@pytest.mark.parametrize(
    ("name", "options", "texts"),
    [
        ("fdsp", {}, ["no strategy 'fdsp'", "did you mean 'fsdp'?", "ps-bounded"]),
        ("ddp", {"bucket": 5}, ["strategy ddp", "'bucket'", "did you mean 'bucket_mb'?"]),
        ("single", {"wrap": "root"}, ["no option 'wrap'", "allowed: none"]),
        ("zero-1", {"stage": 2}, ["no option 'stage'"]),
        ("ddp", {"bucket_mb": 0}, ["option bucket_mb", "found 0", "greater than 0"]),
        ("ddp", {"static_graph": "maybe"}, ["option static_graph", "found 'maybe'"]),
        ("fsdp", {"wrap": "all"}, ["found 'all'", "'blocks', 'layers' or 'root'"]),
        ("fsdp-hybrid", {"shard_group": 1}, ["option shard_group", "found 1"]),
        ("zero-3", {"max_live_parameters": 0.5}, ["found 0.5", "integer"]),
        ("zero-2", {"mixed_precision": "amp"}, ["'autocast' or 'native'"]),
        ("local-sgd", {"fragments": 2}, ["no option 'fragments'", "allowed: period_steps"]),
        ("diloco", {"period_steps": 0}, ["option period_steps", "found 0"]),
        ("diloco", {"outer_momentum": 1.0}, ["option outer_momentum", "found 1.0"]),
        ("ps-bounded", {"staleness": -1}, ["option staleness", "found -1"]),
        ("ps-async", {"wire": "fp8"}, ["option wire", "found 'fp8'"]),
    ],
)
def test_wrong_names_and_options_are_refused(
    name: str, options: dict[str, Any], texts: list[str]
) -> None:
    with pytest.raises(InputError) as caught:
        build_strategy(name, options)
    assert [text for text in texts if text not in str(caught.value)] == []


FUSED_SGD = {"name": "sgd", "implementation": "fused"}
SELECTIVE = {"activation_checkpointing": "selective"}
COMPILED_SELECTIVE = {"compile": "blocks"} | SELECTIVE
CHECKPOINTED_WHOLE = {"compile": "model", "activation_checkpointing": True}
NO_SYNC_BATCH_NORM = (
    *("dp", "local-sgd", "diloco", "tp", "fsdp-tp", "pp", "ddp-pp", "fsdp-pp", "fsdp-tp-pp"),
    *("ulysses", "fsdp-ulysses"),
)
OFFLOADED_BF16 = {"weights": "bf16", "cpu_offload": True}
PIPELINES = ("pp", "ddp-pp", "fsdp-pp", "fsdp-tp-pp")
REFUSED: list[tuple[Iterable[str], Machine, dict[str, Any], dict[str, Any], list[str]]] = [
    (ZEROS, CPU, {"mixed_precision": "native"}, {"precision": "fp16"}, ["to autocast"]),
    (("zero-0",), GPUS, {"mixed_precision": "native"}, {"precision": "bf16"}, ["to autocast"]),
    (SHARDING, CPU, {}, {"cpu_offload": True}, ["CUDA device to offload from"]),
    (WHOLE_STATE, GPUS, {}, {"cpu_offload": True}, ["fsdp or zero-2"]),
    (("fsdp1",), CPU, {}, {"compile": "blocks"}, ["second FSDP", "use fsdp"]),
    (("fsdp1",), CPU, {}, FUSED_FP16, ["overflows on its own rank", "foreach or default"]),
    (LOCAL, CPU, {"period_steps": 3}, {}, ["2 steps end before", "after 3", "at most 2"]),
    (("diloco",), CPU, {"period_steps": 2, "fragments": 3}, {}, ["3 fragments", "2 steps a round"]),
    (("zero-0",), GPUS, {}, {"cpu_offload": True}, ["stage 0", "zero-1, zero-2 or zero-3"]),
    (ZEROS, GPUS, {"cpu_adam": True}, {}, ["nothing is", "cpu_offload to true"]),
    (ZEROS, GPUS, {"cpu_adam": True}, {"cpu_offload": True}, ["optimizer is sgd", "adamw"]),
    (("dp",), CPU, {}, {}, ["device here is the CPU", "use ddp"]),
    (("dp",), GPUS, {}, {"activation_checkpointing": True}, ["activation_checkpointing"]),
    (("dp",), GPUS, {}, {"compile": "blocks"}, ["recipe.compile to none, or use ddp"]),
    (("fsdp", "fsdp-hybrid"), CPU, {}, {"compile": "model"}, ["recipe.compile to blocks or none"]),
    (("fsdp", "fsdp-grad-op"), CPU, {}, {"optimizer": FUSED_SGD}, ["foreach or default, or use"]),
    (("fsdp",), CPU, {"wrap": "layers"}, {"compile": "blocks"}, ["set wrap to blocks or root"]),
    (("ddp",), CPU, {"compress": "powersgd"}, {"channels_last": True}, ["or compress: bf16"]),
    (("ddp", "zro"), CPU, {"powersgd_rank": 4}, {}, ["compress is none", "no powersgd_rank"]),
    (("ddp",), CPU, {"bucket_mb": 0.5}, {"compile": "model"}, ["bucket_mb to at least 1"]),
    (("zero-3",), CPU, {}, {"compile": "blocks"}, ["use fsdp or zero-2"]),
    (("ulysses",), CPU, {}, {"compile": "blocks"}, ["recipe.compile to none"]),
    (("single", "ddp"), CPU, {}, CHECKPOINTED_WHOLE, ["recipe.compile to blocks or none"]),
    (("zero-3",), CPU, {}, SELECTIVE, ["updates are then wrong", "use fsdp or zero-2"]),
    (("fsdp",), CPU, {"wrap": "layers"}, SELECTIVE, ["set wrap to blocks"]),
    (("ddp",), CPU, {}, COMPILED_SELECTIVE, ["recipe.activation_checkpointing to true"]),
    (SERVED, CPU, {}, {"precision": "fp16"}, ["one loss scale"]),
    (SERVED, GPUS, {}, {"precision": "fp16"}, ["one loss scale"]),
    (SERVED, GPUS, {}, {"cpu_offload": True}, ["server_device: cpu"]),
    (
        NO_SYNC_BATCH_NORM,
        GPUS,
        {},
        {"sync_batch_norm": True},
        ["sync_batch_norm to false", "use ddp"],
    ),
    (SERVED, CPU, {}, {"sync_batch_norm": True}, ["sync_batch_norm to false", "use ddp"]),
    (SERVED, CPU, {"server_device": "cuda"}, {}, ["the workers are on the CPU"]),
    (SERVED, GPUS, {"server_device": "cuda"}, {}, ["needs 5 CUDA devices", "offers 4"]),
    (NAMES, OLD_GPUS, {}, {"precision": "bf16"}, ["no bf16 in hardware", "precision: fp16"]),
    (("ddp", "fsdp"), OLD_GPUS, {}, {"weights": "bf16"}, ["no bf16 in hardware"]),
    (SERVED, CPU, {}, {"weights": "bf16"}, ["its servers", "recipe.weights to fp32, or use ddp"]),
    (PIPELINES, CPU, {}, {"weights": "bf16"}, ["a stage", "recipe.weights to fp32"]),
    (("dp",), GPUS, {}, {"weights": "bf16"}, ["recipe.weights to fp32, or use ddp"]),
    (("zero-0",), GPUS, {}, {"weights": "bf16"}, ["stage 0", "recipe.weights to fp32"]),
    (("zero-2",), GPUS, {}, OFFLOADED_BF16, ["offloads fp32", "use ddp or fsdp"]),
    (("ddp",), CPU, {"compress": "powersgd"}, {"weights": "bf16"}, ["set compress to none"]),
]


@pytest.mark.parametrize(("names", "machine", "options", "changes", "texts"), REFUSED)
def test_refusals_have_a_reason_and_a_remedy(
    names: Iterable[str], machine: Machine, options: Any, changes: Any, texts: list[str]
) -> None:
    for name in names:
        with pytest.raises(StrategyUnavailable) as caught:
            build_strategy(name, options).check(ranks(name), machine, recipe(**changes))
        assert caught.value.reason
        assert caught.value.remedy
        assert [text for text in texts if text not in str(caught.value)] == []


def test_too_few_devices_are_refused() -> None:
    for name in set(NAMES) - {"single"}:
        with pytest.raises(StrategyUnavailable, match=r"needs 8 .* offers 4; use at most 4 ranks"):
            build_strategy(name, {}).check(8, GPUS, recipe())


def test_zero_says_that_deepspeed_is_not_installed(tools: dict[str, str | None]) -> None:
    tools["deepspeed"] = None
    with pytest.raises(StrategyUnavailable, match=r"DeepSpeed.*pip install 'shardmark"):
        build_strategy("zero-2", {}).check(4, CPU, recipe())


@pytest.mark.parametrize(
    ("name", "options", "unsupported", "supported"),
    [
        ("single", {}, (2, 3), (1,)),
        *((name, {}, (1,), (2, 3)) for name in ("dp", "ddp", "fsdp", "fsdp-grad-op", "zero-1")),
        ("fsdp-hybrid", {"shard_group": 2}, (1, 2, 3, 5), (4, 6, 8)),
        ("fsdp-hybrid", {"shard_group": 3}, (3, 4), (6, 9)),
        ("ulysses", {}, (1,), (2, 3)),
        ("ulysses", {"mesh": {"data": 2, "sequence": 2}}, (2, 8), (4,)),
        ("ps-async", {}, (), (1, 2)),
    ],
)
def test_supported_numbers_of_ranks(
    name: str, options: dict[str, Any], unsupported: tuple[int, ...], supported: tuple[int, ...]
) -> None:
    strategy = build_strategy(name, options)
    assert [size for size in supported if strategy.unsupported_reason(size)] == []
    assert [size for size in unsupported if not strategy.unsupported_reason(size)] == []


@pytest.mark.parametrize(
    ("name", "options", "bound", "guarantee"),
    [
        ("ps-sync", {}, 0, None),
        ("ps-bounded", {"staleness": 0}, 0, None),
        ("ps-bounded", {"staleness": 2}, 2, "no worker over 2 steps ahead"),
        ("ps-async", {}, None, "every gradient is applied once"),
    ],
)
def test_only_synchronous_servers_claim_equivalence(
    name: str, options: dict[str, Any], bound: int | None, guarantee: str | None
) -> None:
    strategy = build_strategy(name, options)
    settings = strategy.settings(recipe())
    assert (settings["staleness_bound"], settings["wire_precision"]) == (bound, "fp32")
    assert (guarantee or "") in (strategy.guarantee() or "")
    assert (strategy.guarantee() is None) is (guarantee is None)


@pytest.mark.parametrize("name", NAMES)
def test_every_strategy_records_the_same_mathematics(name: str) -> None:
    asked = recipe(precision="bf16", gradient_clipping=1.0, steps=100)
    strategy = build_strategy(name, {})
    strategy.check(ranks(name), CPU if name != "dp" else GPUS, asked)
    settings, common = strategy.settings(asked), common_settings(asked)
    assert (common["gradient_clipping"], common["compute_precision"]) == (1.0, "bf16")
    different = {key for key, value in common.items() if settings[key] != value}
    per_worker = {"gradient_reduction"}
    alone = dict.fromkeys(("ps-async", "ps-bounded", *LOCAL), per_worker)
    own = {"dp": {"batch_norm"}, **alone}
    casts = {"mixed_precision"} if name in (*SHARDING, "fsdp-ulysses") else set()
    assert different == own.get(name, casts)


@pytest.mark.parametrize(
    ("device_type", "offloads", "backend"),
    [("cuda", True, "cpu:gloo,cuda:nccl"), ("cuda", False, "nccl"), ("cpu", False, "gloo")],
)
def test_offloaded_shards_meet_on_the_cpu(device_type: str, offloads: bool, backend: str) -> None:
    """Clipping, the loss scale and checksums reduce them there: pytorch/pytorch#148532."""
    hybrid = build_strategy("fsdp-hybrid", {})
    assert hybrid.backend(device_type, recipe(cpu_offload=offloads)) == backend


@pytest.mark.parametrize("name", ["ps-async", "ps-bounded"])
def test_a_shared_rate_is_divided_by_the_workers(name: str) -> None:
    full, shared = build_strategy(name, {}), build_strategy(name, {"rate": "shared"})
    assert isinstance(full, AsynchronousServer)
    assert isinstance(shared, AsynchronousServer)
    assert (full.rate_factor(4), shared.rate_factor(4)) == (1.0, 0.25)
    with pytest.raises(InputError, match="rate"):
        build_strategy("ps-sync", {"rate": "shared"})


def test_a_shared_rate_needs_pushes_of_one_worker() -> None:
    waiting = build_strategy("ps-bounded", {"rate": "shared", "staleness": 0})
    with pytest.raises(StrategyUnavailable, match="raise staleness"):
        waiting.check(2, CPU, recipe())
