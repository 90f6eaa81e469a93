"""Computation with 16-bit parameters, and models that refuse it."""

from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from shardmark.base.errors import StrategyUnavailable
from shardmark.base.numerics import ONE_DEVICE
from shardmark.extras.detection.options import DetectionOptions
from shardmark.ranks.measure.step.recorder import NoSpans
from shardmark.ranks.strategies import STRATEGIES, build_strategy, option_names
from shardmark.ranks.strategies.casting import (
    allow_mixed_dtype_batch_norm,
    cast_inputs,
    widen_outputs,
)
from shardmark.ranks.strategies.execution import build_on
from shardmark.ranks.strategies.step import EagerWorker
from shardmark.ranks.workloads.vision.options import ClassificationOptions
from tests import present
from tests.unit.ranks.train.toy import CPU, ToyWorkload, normed, plain, recipe

CASTING = [name for name in STRATEGIES if "mixed_precision" in option_names(name)]


class Mixing(nn.Module):
    """Adds a tensor in fp32 to what a layer of another type takes."""

    def __init__(self) -> None:
        super().__init__()
        self.network = plain()
        self.offset = torch.ones(4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.network(inputs + self.offset)  # type: ignore[no-any-return]


def worker(model: nn.Module) -> EagerWorker:
    cast_inputs(model.bfloat16(), torch.bfloat16)
    asked = recipe(precision="bf16")
    return EagerWorker(
        model, workload=ToyWorkload(), recipe=asked, device=CPU, shares=1, casts_of="fsdp"
    )


def test_batch_norm_keeps_its_statistics_in_fp32() -> None:
    features = (5 + 3 * torch.randn(64, 4)).bfloat16()
    exact, mixed = nn.BatchNorm1d(4), nn.Sequential(nn.BatchNorm1d(4))
    expected = exact(features.float())
    for parameter in mixed.parameters():
        parameter.data = parameter.data.bfloat16()
    allow_mixed_dtype_batch_norm(mixed)
    widen_outputs(mixed)
    returned = mixed(features)
    assert returned.dtype == torch.float32
    torch.testing.assert_close(returned, expected, rtol=0.01, atol=0.01)
    (norm,) = mixed
    assert isinstance(norm, nn.BatchNorm1d)
    torch.testing.assert_close(present(norm.running_mean), exact.running_mean)
    torch.testing.assert_close(present(norm.running_var), exact.running_var)
    returned.sum().backward()
    assert present(norm.bias.grad).dtype == torch.bfloat16, "its parameter is the one that trains"


def test_model_that_fails_on_bf16_parameters_names_the_option() -> None:
    batch = ToyWorkload().batch(range(8))
    with pytest.raises(StrategyUnavailable, match=r"fsdp.*bf16 parameters.*to autocast"):
        worker(Mixing()).step(batch, NoSpans())
    narrow = nn.Linear(3, 2)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        worker(narrow).step(batch, NoSpans())


def test_bf16_weights_train_in_bf16_beside_fp32_buffers() -> None:
    asked, workload = recipe(weights="bf16"), ToyWorkload(normed)
    trained = EagerWorker(
        build_on(CPU, workload, asked), workload=workload, recipe=asked, device=CPU, shares=1
    )
    batch = workload.batch(range(8))
    trained.step(batch, NoSpans())
    state = trained.held_state()
    assert {tensor.dtype for tensor in state.parameters} == {torch.bfloat16}
    averages = {tensor.dtype for tensor in state.optimizer_state if tensor.dim()}
    assert averages == {torch.bfloat16}
    assert {tensor.dtype for tensor in trained.buffers().values()} == {torch.float32, torch.int64}
    assert {tensor.dtype for tensor in trained.full_parameters().values()} == {torch.float32}
    assert trained.module(batch.inputs).dtype == torch.float32
    assert asked.precision == "bf16"
    with pytest.raises(ValidationError, match=r"bf16 and precision is fp16.*loss scale"):
        recipe(weights="bf16", precision="fp16")


def test_model_that_fails_with_bf16_weights_names_the_key() -> None:
    asked, workload = recipe(weights="bf16"), ToyWorkload(Mixing)
    trained = EagerWorker(
        build_on(CPU, workload, asked), workload=workload, recipe=asked, device=CPU, shares=1
    )
    with pytest.raises(StrategyUnavailable, match=r"weights: bf16.*set weights: fp32"):
        trained.step(workload.batch(range(8)), NoSpans())


@pytest.mark.parametrize("name", CASTING)
def test_nothing_is_cast_where_weights_are_bf16(name: str) -> None:
    asked, strategy = recipe(weights="bf16"), build_strategy(name, {"mixed_precision": "native"})
    assert strategy.numerics(asked) == ONE_DEVICE
    settings = strategy.settings(asked)
    assert settings["mixed_precision"] == "none"
    assert settings["master_weights_precision"] == "bf16"
    assert settings["gradient_reduction_precision"] == "bf16"


@pytest.mark.parametrize("name", CASTING)
def test_default_casting_follows_precision_and_workload(name: str) -> None:
    left_open = build_strategy(name, {})
    detection, pictures = DetectionOptions(), ClassificationOptions()
    chosen = [
        strategy.settings(recipe(precision=precision))["mixed_precision"]
        for strategy in (left_open.for_workload(pictures), left_open.for_workload(detection))
        for precision in ("fp32", "bf16", "fp16")
    ]
    native = "autocast" if name == "zero-0" else "native"
    assert chosen == ["none", native, "autocast", "none", "autocast", "autocast"]
    asked = build_strategy(name, {"mixed_precision": "native"}).for_workload(detection)
    assert asked.settings(recipe(precision="fp16"))["mixed_precision"] == "native"
    for precision in ("fp32", "bf16", "fp16"):
        casts = asked.numerics(recipe(precision=precision)).casts
        assert (casts.precision if casts else "fp32") == precision
