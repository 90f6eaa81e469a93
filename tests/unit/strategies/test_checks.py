"""What a strategy refuses, and the mathematics that it writes down.  Without torch."""

from __future__ import annotations

import importlib.util
import shutil
from dataclasses import dataclass
from typing import Any, cast

import pytest

from shardmark.core.errors import StrategyUnavailable
from shardmark.core.machine import Machine
from shardmark.core.recipe import Recipe
from shardmark.strategies import STRATEGIES, build_strategy
from shardmark.strategies.base import RankContext
from shardmark.strategies.deepspeed.strategy import Zero
from shardmark.strategies.settings import common_settings

CPU = Machine(device_type="cpu", device_count=0, cores=8)
GPUS = Machine(device_type="cuda", device_count=4, cores=8)
ON_CPU = tuple(sorted(set(STRATEGIES) - {"dp"}))
SHARDING = ("fsdp", "fsdp-grad-op", "fsdp-hybrid", "zero-1", "zero-2", "zero-3")
NOT_SHARDING = ("single", "dp", "ddp")
REDUCTION = {"gradient_reduction"}
SERVED = ("ps-sync", "ps-async", "ps-bounded")


def recipe(**changes: Any) -> Recipe:
    return Recipe.model_validate({"global_batch": 8, "steps": 2, **changes})


def ranks(name: str) -> int:
    return 1 if name == "single" else 4


def refusal(name: str, machine: Machine, world_size: int | None = None, **changes: Any) -> str:
    with pytest.raises(StrategyUnavailable) as caught:
        build_strategy(name, {}).check(world_size or ranks(name), machine, recipe(**changes))
    assert caught.value.reason
    assert caught.value.remedy
    return str(caught.value)


@pytest.fixture(autouse=True)
def tools(monkeypatch: pytest.MonkeyPatch) -> dict[str, str | None]:
    """DeepSpeed and its compiler as if they were installed; a test takes one away."""
    found: dict[str, str | None] = {"ninja": "/bin/ninja", "g++": "/bin/g++", "deepspeed": "x"}
    monkeypatch.setattr(shutil, "which", lambda tool, path=None: found.get(tool))  # noqa: ARG005
    monkeypatch.setattr(importlib.util, "find_spec", found.get)
    return found


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ON_CPU)
def test_runs_on_the_cpu(name: str, precision: str) -> None:
    build_strategy(name, {}).check(ranks(name), CPU, recipe(precision=precision))


@pytest.mark.parametrize("name", sorted(set(STRATEGIES) - set(SERVED)))
def test_runs_on_enough_devices_in_fp16(name: str) -> None:
    build_strategy(name, {}).check(ranks(name), GPUS, recipe(precision="fp16"))


@pytest.mark.parametrize("name", sorted(set(STRATEGIES) - {"single"}))
def test_too_few_devices(name: str) -> None:
    assert refusal(name, GPUS, 8) == (
        f"cannot run {name!r} here: it needs 8 CUDA devices and this machine offers 4; "
        "use at most 4 ranks, or set device: cpu"
    )


@pytest.mark.parametrize("name", sorted(set(ON_CPU) - set(SERVED)))
def test_fp16_on_the_cpu(name: str) -> None:
    assert refusal(name, CPU, precision="fp16") == (
        f"cannot run {name!r} here: fp16 with loss scaling needs a CUDA device; "
        "set recipe.precision to bf16 or fp32"
    )


@pytest.mark.parametrize("name", SHARDING)
def test_offload_needs_a_device_to_offload_from(name: str) -> None:
    assert refusal(name, CPU, cpu_offload=True) == (
        f"cannot run {name!r} here: CPU offload needs a CUDA device to offload from; "
        "set recipe.cpu_offload to false"
    )
    build_strategy(name, {}).check(4, GPUS, recipe(cpu_offload=True))


@pytest.mark.parametrize("name", NOT_SHARDING)
def test_offload_of_a_whole_replica(name: str) -> None:
    assert refusal(name, GPUS, cpu_offload=True) == (
        f"cannot run {name!r} here: it has no CPU offload: parameters and optimizer state stay "
        "on the device; set recipe.cpu_offload to false, or use fsdp or zero-2"
    )


def test_stage_0_has_nothing_to_offload() -> None:
    assert refusal("zero-0", GPUS, cpu_offload=True) == (
        "cannot run 'zero-0' here: stage 0 shards nothing that could be offloaded; "
        "use zero-1, zero-2 or zero-3"
    )


def test_dp_on_the_cpu() -> None:
    assert refusal("dp", CPU) == (
        "cannot run 'dp' here: DataParallel copies the model over CUDA devices, and the device "
        "here is the CPU; use ddp, which also runs on the CPU"
    )


def test_zero_without_deepspeed(tools: dict[str, str | None]) -> None:
    tools["deepspeed"] = None
    expected = "DeepSpeed is not installed; pip install deepspeed"
    assert refusal("zero-1", CPU) == f"cannot run 'zero-1' here: {expected}"
    assert refusal("zero-1", GPUS) == f"cannot run 'zero-1' here: {expected}"


@pytest.mark.parametrize("tool", ["ninja", "g++"])
def test_zero_without_a_compiler(tools: dict[str, str | None], tool: str) -> None:
    tools[tool] = None
    assert refusal("zero-2", CPU) == (
        f"cannot run 'zero-2' here: DeepSpeed compiles an operator on the CPU and finds no {tool}; "
        "install a C++ compiler and ninja (apt-get install g++; pip install ninja)"
    )
    build_strategy("zero-2", {}).check(4, GPUS, recipe())


def test_dp_refuses_activation_checkpointing() -> None:
    """See `test_blocks.test_checkpointed_block_is_bound_to_its_own_parameters`."""
    assert "activation_checkpointing" in refusal("dp", GPUS, activation_checkpointing=True)


def test_common_settings() -> None:
    settings = common_settings(recipe(gradient_clipping=0.5, precision="fp16", tf32=True))
    assert settings["gradient_clipping"] == 0.5
    assert settings["compute_precision"] == "fp16"
    assert settings["mixed_precision"] == "autocast"
    assert settings["loss_scaling"] == {
        "kind": "dynamic",
        "initial": 65536.0,
        "growth_interval": 2000,
    }
    assert settings["tf32"] is True
    plain = common_settings(recipe())
    assert (plain["mixed_precision"], plain["loss_scaling"]) == ("none", None)
    assert plain["gradient_clipping"] is None


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_records_the_same_mathematics(name: str) -> None:
    asked = recipe(precision="bf16", gradient_clipping=1.0)
    settings = build_strategy(name, {}).settings(asked)
    common = common_settings(asked)
    different = {key for key, value in common.items() if settings[key] != value}
    own = {"dp": {"batch_norm"}, "ps-async": REDUCTION, "ps-bounded": REDUCTION}
    assert different == own.get(name, set())


@pytest.mark.parametrize("name", SHARDING)
def test_native_precision_is_recorded_as_other_mathematics(name: str) -> None:
    strategy = build_strategy(name, {"mixed_precision": "native"})
    assert strategy.settings(recipe(precision="bf16"))["mixed_precision"] == "native"
    assert strategy.settings(recipe())["mixed_precision"] == "none"


@dataclass(frozen=True, slots=True)
class Device:
    type: str


def config(stage: Any = 1, device: str = "cpu", options: Any = None, **changes: Any) -> Any:
    process = RankContext(
        rank=0, world_size=2, local_rank=0, local_world_size=2, device=cast("Any", Device(device))
    )
    return Zero(stage=stage, **(options or {})).config(recipe(**changes), process)


def test_deepspeed_s_defaults_are_written_out() -> None:
    written = config()
    assert written["gradient_clipping"] == 0.0
    assert written["gradient_accumulation_steps"] == 1
    assert written["communication_data_type"] == "fp32"
    assert written["prescale_gradients"] is False
    assert written["zero_optimization"]["stage"] == 1
    assert written["zero_optimization"]["reduce_bucket_size"] == 25 * 2**20 // 4
    assert not {"torch_autocast", "bf16", "fp16"} & written.keys()


def test_deepspeed_takes_clipping_accumulation_and_buckets() -> None:
    written = config(3, options={"bucket_mb": 1.0, "persistence_threshold": 7},
                     gradient_clipping=0.5, gradient_accumulation=4)  # fmt: skip
    assert written["gradient_clipping"] == 0.5
    assert written["gradient_accumulation_steps"] == 4
    zero = written["zero_optimization"]
    assert (zero["reduce_bucket_size"], zero["allgather_bucket_size"]) == (2**18, 2**18)
    assert zero["stage3_param_persistence_threshold"] == 7


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", "bfloat16"), ("fp16", "float16")])
def test_deepspeed_autocasts_and_reduces_in_fp32(precision: str, dtype: str) -> None:
    written = config(2, precision=precision)
    expected = {"enabled": True, "dtype": dtype, "lower_precision_safe_modules": []}
    assert written["torch_autocast"] == expected
    assert not {"bf16", "fp16"} & written.keys()


def test_deepspeed_s_own_precision_is_an_option() -> None:
    native = {"mixed_precision": "native"}
    assert config(options=native, precision="bf16")["bf16"] == {"enabled": True}
    scaled = config(options=native, precision="fp16")["fp16"]
    assert scaled["loss_scale"] == 0.0
    assert 2 ** scaled["initial_scale_power"] == 65536
    assert scaled["loss_scale_window"] == 2000
    assert not {"torch_autocast", "bf16", "fp16"} & config(options=native).keys()


def test_deepspeed_offloads_what_the_stage_shards() -> None:
    place = {"device": "cpu", "pin_memory": True}
    second = config(2, "cuda", cpu_offload=True)["zero_optimization"]
    assert second["offload_optimizer"] == place
    assert "offload_param" not in second
    third = config(3, "cuda", cpu_offload=True)["zero_optimization"]
    assert (third["offload_optimizer"], third["offload_param"]) == (place, place)


def test_overlap_is_for_streams() -> None:
    assert config(device="cuda")["zero_optimization"]["overlap_comm"] is True
    assert config(device="cpu")["zero_optimization"]["overlap_comm"] is False
    off = config(device="cuda", options={"overlap_communication": False})
    assert off["zero_optimization"]["overlap_comm"] is False
