"""Computation with 16-bit parameters, and models that refuse it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardmark.core.errors import StrategyUnavailable
from shardmark.measure.step.recorder import NoSpans
from shardmark.strategies import STRATEGIES, build_strategy, option_names
from shardmark.strategies.casting import allow_mixed_dtype_batch_norm, cast_inputs, widen_outputs
from shardmark.strategies.step import EagerWorker
from shardmark.workloads.detection.options import DetectionOptions
from shardmark.workloads.vision.options import ClassificationOptions
from tests.unit.training.toy import CPU, ToyWorkload, plain, recipe

CASTING = [name for name in STRATEGIES if "mixed_precision" in option_names(name)]


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
    assert norm.running_mean is not None
    assert norm.running_var is not None
    torch.testing.assert_close(norm.running_mean, exact.running_mean)
    torch.testing.assert_close(norm.running_var, exact.running_var)
    returned.sum().backward()
    assert norm.bias.grad is not None
    assert norm.bias.grad.dtype == torch.bfloat16, "its parameter is the one that trains"


def test_model_that_fails_on_bf16_parameters_names_the_option() -> None:
    class Mixing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = plain()
            self.offset = torch.ones(4)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.network(inputs + self.offset)  # type: ignore[no-any-return]

    batch = ToyWorkload().batch(range(8))
    with pytest.raises(StrategyUnavailable, match=r"fsdp.*bf16 parameters.*to autocast"):
        worker(Mixing()).step(batch, NoSpans())
    narrow = nn.Linear(3, 2)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        worker(narrow).step(batch, NoSpans())


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
