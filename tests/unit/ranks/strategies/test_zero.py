"""DeepSpeed's worker without DeepSpeed: a fake engine says what is asked of the real one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor, nn

from shardmark.base.errors import StrategyUnavailable
from shardmark.ranks.measure.step.recorder import NoSpans
from shardmark.ranks.strategies import build_strategy
from shardmark.ranks.strategies.base import LOSS_SCALE
from shardmark.ranks.strategies.deepspeed.strategy import Zero
from shardmark.ranks.strategies.step import build_optimizer, loss_scaler
from shardmark.ranks.workloads.base import ParameterGroup
from tests.unit.ranks.train.toy import CPU, ToyWorkload, plain, recipe

STUBS = ("deepspeed", "deepspeed.utils", "shardmark.ranks.strategies.deepspeed.preload")
"""Importing the real ones takes seconds, and minutes where an operator has to be compiled."""


@pytest.fixture(scope="module")
def zero() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        for name in STUBS:
            patch.setitem(sys.modules, name, MagicMock())
        patch.delitem(sys.modules, "shardmark.ranks.strategies.deepspeed.worker", raising=False)
        from shardmark.ranks.strategies.deepspeed import worker as _zero

        yield _zero
        patch.delitem(sys.modules, "shardmark.ranks.strategies.deepspeed.worker")


class Engine:
    """DeepSpeed's engine at stage 0 without other ranks."""

    def __init__(self, module: nn.Module, asked: Any) -> None:
        self.module = module
        self.optimizer: Any = build_optimizer(dict(module.named_parameters()), asked)
        self.updates = 1

    def __call__(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.module(inputs)
        return out

    def backward(self, loss: Tensor, *, scale_wrt_gas: bool) -> None:
        assert not scale_wrt_gas, "the worker has divided already"
        loss.backward()  # type: ignore[no-untyped-call]  # torch's

    def step(self) -> None:
        for _ in range(self.updates):
            self.optimizer.step()

    def zero_optimization(self) -> bool:
        return False


def worker_of(zero: Any) -> tuple[Any, Engine, ToyWorkload]:
    workload, asked = ToyWorkload(), recipe()
    engine = Engine(workload.build_model(), asked)
    worker = zero.ZeroWorker(
        engine.module, wrapped_model=engine, workload=workload, recipe=asked, device=CPU, shares=1
    )
    return worker, engine, workload


def test_parameter_groups_that_deepspeed_mixes_up_are_refused(
    zero: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepSpeed makes Adagrad anew, and mixes its groups up."""
    names = dict(plain().named_parameters())
    groups = [ParameterGroup(names=frozenset({name}), options={}) for name in names]
    monkeypatch.setattr(ToyWorkload, "parameter_groups", groups)
    engine = SimpleNamespace(optimizer=SimpleNamespace(param_groups=[{}]))
    zero.deepspeed.initialize.return_value = (engine,)
    config = {"zero_optimization": {"stage": 1}}
    with pytest.raises(StrategyUnavailable, match="SGD anew, without its parameter groups"):
        zero.start_engine(
            ToyWorkload(),
            recipe(),
            SimpleNamespace(device=CPU),
            config=config,
            check=nn.Module.modules,
        )


def test_skipped_steps_are_those_without_an_update(zero: Any) -> None:
    """Stage 3 updates once for each of its sub-groups: still one step."""
    worker, engine, workload = worker_of(zero)
    for engine.updates in (1, 0, 2):
        worker.step(workload.batch(range(8)), NoSpans())
    assert worker.skipped_steps() == 1


def test_held_state_lists_tensors_of_deepspeed(zero: Any) -> None:
    """Some stages have them in attributes, nested in mappings, lists and buckets."""
    worker, engine, _ = worker_of(zero)
    master = nn.Parameter(torch.ones(5))
    master.grad = torch.ones(5)
    engine.optimizer = SimpleNamespace(
        optimizer=engine.optimizer,
        bit16_groups_flat=[torch.ones(7)],
        averaged_gradients={0: [torch.ones(3), None]},
        ipg_buckets={torch.float32: SimpleNamespace(buffer=[torch.ones(2), None])},
        single_partition_of_fp32_groups=[master],
        other=torch.ones(100),
    )
    state = worker.held_state()
    assert sum(tensor.numel() for tensor in state.parameters) == 58 + 7
    assert sum(tensor.numel() for tensor in state.gradients) == 5 + 3 + 2
    assert sum(tensor.numel() for tensor in state.optimizer_state) == 5


def written(stage: int, device: str = "cpu", options: Any = None, **changes: Any) -> Any:
    zero = build_strategy(f"zero-{stage}", options or {})
    assert isinstance(zero, Zero)
    return zero.config(recipe(**changes), device)


OTHER_KEYS = (
    *("sub_group_size", "zero_hpz_partition_size", "memory_efficient_linear"),
    *(f"zero_quantized_{what}" for what in ("weights", "nontrainable_weights", "gradients")),
)


def test_settings_record_what_the_configuration_says() -> None:
    options = {"max_reuse_distance": 5, "max_live_parameters": 7, "persistence_threshold": 0}
    config = written(3, options=options)["zero_optimization"]
    assert config["stage3_max_reuse_distance"] == 5
    settings = build_strategy("zero-3", options).settings(recipe())
    keys = {key for key in config if key.startswith("stage3_")} | set(OTHER_KEYS)
    assert {key: settings[key] for key in keys} == {key: config[key] for key in keys}
    assert not keys & {*written(2), *build_strategy("zero-2", {}).settings(recipe())}


def test_defaults_of_the_engine_are_written_out() -> None:
    config = written(1)
    assert config["gradient_clipping"] == 0.0
    assert config["communication_data_type"] == "fp32"
    assert config["prescale_gradients"] is False
    assert config["zero_optimization"]["reduce_bucket_size"] == 25 * 2**20 // 4
    assert not {"torch_autocast", "bf16", "fp16"} & config.keys()
    changes: dict[str, Any] = {"gradient_clipping": 0.5, "gradient_accumulation": 4}
    config = written(3, options={"bucket_mb": 1.0}, **changes)
    assert (config["gradient_clipping"], config["gradient_accumulation_steps"]) == (0.5, 4)
    zero = config["zero_optimization"]
    assert (zero["reduce_bucket_size"], zero["allgather_bucket_size"]) == (2**18, 2**18)


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", "bfloat16"), ("fp16", "float16")])
def test_configuration_has_autocast_unless_native(precision: str, dtype: str) -> None:
    config = written(2, options={"mixed_precision": "autocast"}, precision=precision)
    expected = {"enabled": True, "dtype": dtype, "lower_precision_safe_modules": []}
    assert config["torch_autocast"] == expected
    assert not {"bf16", "fp16"} & config.keys()
    native = written(2, options={"mixed_precision": "native"}, precision=precision)
    assert native[precision]["enabled"] is True
    assert "torch_autocast" not in native
    assert native["data_types"] == {"grad_accum_dtype": precision}
    left_open = written(2, precision=precision)
    assert left_open == (native if precision == "bf16" else config)
    if precision == "fp16":
        scale = native["fp16"]
        assert (scale["loss_scale"], scale["initial_scale_power"]) == (0.0, 16)
        assert scale["loss_scale_window"] == 2000


def test_offloads_what_the_stage_shards_and_overlaps_on_streams() -> None:
    place = {"device": "cpu", "pin_memory": True}
    second = written(2, "cuda", cpu_offload=True)["zero_optimization"]
    assert (second["offload_optimizer"], "offload_param" in second) == (place, False)
    third = written(3, "cuda", cpu_offload=True)["zero_optimization"]
    assert (third["offload_optimizer"], third["offload_param"]) == (place, place)
    off = {"overlap_communication": False}
    overlaps = [written(1, *how)["zero_optimization"]["overlap_comm"]
                for how in (("cuda",), ("cpu",), ("cuda", off))]  # fmt: skip
    assert overlaps == [True, False, False]


ADAM_ARGUMENTS = {
    *("lr", "bias_correction", "betas", "eps", "weight_decay"),
    *("amsgrad", "adamw_mode", "fp32_optimizer_states"),
}
"""Arguments of `DeepSpeedCPUAdam`; a canary compares them with DeepSpeed's source."""
ADAM = {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.2}


@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_deepspeed_s_own_adam_leaves_nothing_to_its_defaults(
    zero: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    asked, workload = recipe(optimizer={"name": name, **ADAM}), ToyWorkload()
    settings = build_strategy("zero-2", {"cpu_adam": True}).settings(asked)
    adam = MagicMock(return_value=SimpleNamespace(defaults={}, param_groups=[]))
    engine = SimpleNamespace(optimizer=SimpleNamespace(param_groups=[{}]))
    zero.deepspeed.initialize.return_value = (engine,)
    monkeypatch.setitem(sys.modules, "deepspeed.ops.adam", SimpleNamespace(DeepSpeedCPUAdam=adam))
    config = {"zero_optimization": {"stage": 2}}
    with pytest.raises(StrategyUnavailable, match="anew"):  # the engine's groups are other ones
        zero.start_engine(
            workload,
            asked,
            SimpleNamespace(device=CPU),
            config=config,
            check=nn.Module.modules,
            cpu_adam=settings["cpu_adam"],
        )
    (groups,), given = adam.call_args
    assert [p.shape for p in groups[0]["params"]] == [p.shape for p in plain().parameters()]
    assert given.keys() == ADAM_ARGUMENTS
    assert given.items() >= ADAM.items()
    assert given["adamw_mode"] is (name == "adamw")

    adam.side_effect = RuntimeError("no op")
    adam.side_effect.__cause__ = OSError("there is no ninja")
    with pytest.raises(StrategyUnavailable, match="there is no ninja") as caught:
        zero.made_cpu_adam([], asked.optimizer)
    assert "C++ compiler" in caught.value.remedy


def test_the_throughput_timer_is_off() -> None:
    """It waits for the device twice in each micro-batch, and is on unless told otherwise."""
    assert written(1)["timers"] == {"throughput": {"enabled": False}}


def test_the_loss_scale_is_torch_s(zero: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LOSS_SCALE, "growth_interval", 3)
    torchs, mine = loss_scaler(recipe(precision="fp16"), CPU), zero.LossScale()
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    for overflows in map(int, "1000010001101000000"):
        scaled = torchs.scale(torch.ones(()))
        assert mine.scale_loss(torch.ones(())) == scaled
        weight.grad = torch.full((1,), torch.inf if overflows else 1.0)
        torchs.step(optimizer)
        torchs.update()
        mine.update_scale(bool(overflows))
        assert mine.loss_scale <= scaled, "DeepSpeed divides by it after the update"
    assert mine.scale_loss(torch.ones(())) == torchs.get_scale()


def test_state_of_an_optimizer_that_has_never_stepped_is_empty(zero: Any) -> None:
    """DeepSpeed has no state where every step overflowed."""
    worker, engine, workload = worker_of(zero)
    engine.updates = 0
    worker.step(workload.batch(range(8)), NoSpans())
    assert set(worker.full_optimizer_state()) == set(worker.full_parameters())
    assert not any(worker.full_optimizer_state().values())
