"""torch's PowerSGD as `ddp` sets it, beside the definition, and what cannot work with it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardmark.base.errors import StrategyUnavailable
from shardmark.base.machine import Machine
from shardmark.base.numerics import PowerSGD
from shardmark.bench.reference.power_sgd import ReferencePowerSGD
from shardmark.ranks.measure.step.recorder import NoSpans
from shardmark.ranks.strategies import build_strategy
from shardmark.ranks.strategies.base import Server
from tests.unit.ranks.train.toy import ALONE, ToyWorkload, recipe

CPU = Machine(device_type="cpu", device_count=0, cores=2)


def matrices() -> nn.Module:
    """Between the layers one that each rank compresses, (30, 30); the last one is too small."""
    layers = nn.Linear(4, 30), nn.Tanh(), nn.Linear(30, 30), nn.Tanh(), nn.Linear(30, 2)
    return nn.Sequential(*layers)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = matrices(), nn.Parameter(torch.ones(()))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.scale * self.inner(inputs)
        return outputs


def powersgd(**options: Any) -> Any:
    return build_strategy("ddp", {"compress": "powersgd", **options})


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_reductions_equal_the_definition_of_powersgd(rank: int) -> None:
    """Gradient by gradient, of the same weights: two whole, then a loss, then errors' turn."""
    asked = recipe()
    workload = ToyWorkload(matrices)
    strategy = powersgd(powersgd_rank=rank)
    worker = strategy.start(workload, asked, ALONE)
    assert not isinstance(worker, Server)
    played = ReferencePowerSGD(strategy.numerics(asked).power_sgd)
    model = workload.build_model()
    distances = []
    for step in range(6):
        batch = workload.batch(range(4 * step, 4 * step + 4))
        worker._forward_backward(batch, NoSpans())
        model.zero_grad()
        workload.mean_loss(model, batch).backward()  # type: ignore[no-untyped-call]
        whole = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        reduced = {name: gradient.clone() for name, gradient in whole.items()}
        played.reduce(reduced)
        mine = worker.full_gradients()
        assert mine.keys() == reduced.keys()
        for name, gradient in reduced.items():
            torch.testing.assert_close(mine[name], gradient, rtol=1e-4, atol=1e-6)
        distances.append(float((mine["2.weight"] - whole["2.weight"]).norm()))
        torch.testing.assert_close(mine["4.weight"], whole["4.weight"])
        worker._optimizer.zero_grad(set_to_none=True)
    assert distances[:2] == [0.0, 0.0]
    assert min(distances[2:]) > 0.0, "else nothing is compressed"


def test_gradient_of_low_rank_is_reduced_exactly() -> None:
    """P spans its columns, whatever Q is drawn; nothing is left to the next step."""
    played = ReferencePowerSGD(PowerSGD(rank=1, start_step=0, seed=3, min_compression_rate=2))
    gradient = torch.outer(torch.arange(1.0, 9.0), torch.arange(1.0, 13.0))
    for _ in range(2):
        reduced = {"weight": gradient.clone()}
        played.reduce(reduced)
        torch.testing.assert_close(reduced["weight"], gradient)


@pytest.mark.parametrize(
    ("options", "changes", "told"),
    [
        ({}, {"precision": "fp16"}, "overflows fp16"),
        ({"find_unused_parameters": True}, {}, "norm of a gradient, which is 0"),
    ],
)
def test_recipes_that_powersgd_cannot_train_are_refused(
    options: dict[str, Any], changes: dict[str, Any], told: str
) -> None:
    with pytest.raises(StrategyUnavailable, match=told):
        powersgd(**options).check(2, CPU, recipe(**changes))


@pytest.mark.usefixtures("alone")
def test_scalar_parameter_is_refused() -> None:
    with pytest.raises(StrategyUnavailable, match=r"such as scale; give .* set compress: bf16"):
        powersgd().start(ToyWorkload(Scaled), recipe(), ALONE)


@pytest.mark.usefixtures("alone")
def test_gpus_that_a_rank_of_the_cpu_sees_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(StrategyUnavailable, match="hide the GPUs"):
        powersgd().start(ToyWorkload(matrices), recipe(), ALONE)
