"""Optimizers by name, compared with their formulas written out, and the strategies that refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardmark.base.errors import StrategyUnavailable
from shardmark.base.machine import Machine
from shardmark.base.recipe import Optimizer
from shardmark.ranks.strategies import STRATEGIES, build_strategy
from shardmark.ranks.strategies.blocks import hidden_matrices
from shardmark.ranks.strategies.optimizers import HIDDEN_MATRIX
from shardmark.ranks.strategies.step import build_optimizer, create_optimizer, set_learning_rates
from shardmark.ranks.workloads.base import ParameterGroup
from tests.unit.ranks.train.toy import recipe

MACHINE = Machine(device_type="cuda", device_count=8, cores=8, is_predicted=True)
STEPS = 3
LONG = {"global_batch": 64, "steps": 20}
"""Enough for rounds of local steps and for micro-batches of pipelines."""


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(6, 9), nn.Linear(9, 6)
        self.names = nn.Embedding(3, 6)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.names.weight.sum(0) + inputs
        result: Tensor = inputs + self.narrow(torch.tanh(self.wide(hidden)))
        return result


def layered() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), Layer(), Layer(), nn.Linear(6, 2))


def gradients(shape: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator) for _ in range(STEPS)]


@pytest.mark.parametrize("start", [1.0, 0.0])
def test_lamb_is_algorithm_2_of_its_paper(start: float) -> None:
    """A tensor of norm 0 is updated without the factor."""
    spec = Optimizer.model_validate({"name": "lamb", "lr": 0.1, "weight_decay": 0.2})
    found = nn.Parameter(start * torch.ones(3, 5))
    optimizer = create_optimizer([found], spec)
    x = start * torch.ones(3, 5, dtype=torch.float64)
    m, v = torch.zeros_like(x), torch.zeros_like(x)
    for step, gradient in enumerate(gradients((3, 5)), 1):
        found.grad = gradient.clone()
        optimizer.step()
        m = 0.9 * m + 0.1 * gradient.double()
        v = 0.999 * v + 0.001 * gradient.double() ** 2
        r = (m / (1 - 0.9**step)) / ((v / (1 - 0.999**step)).sqrt() + 1e-6)
        change = r + 0.2 * x
        ratio = x.norm() / change.norm() if x.norm() else 1.0
        x = x - 0.1 * ratio * change
        torch.testing.assert_close(found.detach(), x.float())


def muon_by_formula(x: Tensor, drawn: list[Tensor], rates: list[float], decay: float) -> Tensor:
    """Keller Jordan's post, and the factor of Liu et al. (2025) for updates as large as AdamW's."""
    momentum = torch.zeros_like(x)
    for gradient, rate in zip(drawn, rates, strict=True):
        momentum = 0.95 * momentum + 0.05 * gradient
        update = 0.05 * gradient + 0.95 * momentum
        y = update / update.norm()
        for _ in range(5):
            a = y @ y.T
            y = 3.4445 * y + (-4.7750 * a + 2.0315 * a @ a) @ y
        x = x * (1 - rate * decay) - rate * 0.2 * max(x.shape) ** 0.5 * y
    return x


def test_muon_updates_matrices_of_blocks_and_adamw_the_rest() -> None:
    asked = recipe(
        optimizer={"name": "muon", "lr": 0.02, "weight_decay": 0.1, "adamw_lr": 0.005}
    ).optimizer
    model = layered()
    for parameter in hidden_matrices(model):
        setattr(parameter, HIDDEN_MATRIX, True)
    named = dict(model.named_parameters())
    optimizer = build_optimizer(named, recipe(optimizer=asked))
    before = {name: parameter.detach().clone() for name, parameter in named.items()}
    drawn = {name: gradients(tuple(parameter.shape)) for name, parameter in named.items()}
    factors = [0.5**step for step in range(STEPS)]
    for step, factor in enumerate(factors):
        for name, parameter in named.items():
            parameter.grad = drawn[name][step].clone()
        set_learning_rates(optimizer.param_groups, 0.02 * factor)  # the schedule is for both
        optimizer.step()
    matrices = {f"{block}.{layer}.weight" for block in (1, 2) for layer in ("wide", "narrow")}
    assert {n for n, p in named.items() if "momentum_buffer" in optimizer.state[p]} == matrices
    for name, parameter in named.items():
        if name in matrices:
            rates = [0.02 * factor for factor in factors]
            expected = muon_by_formula(before[name], drawn[name], rates, 0.1)
            error = (parameter.detach() - expected).norm()
            assert error < 0.02 * (expected - before[name]).norm(), "bf16 rounds"
            continue
        twin = nn.Parameter(before[name].clone())
        adamw = torch.optim.AdamW([twin], lr=0.005, weight_decay=0.1)
        for gradient, factor in zip(drawn[name], factors, strict=True):
            adamw.param_groups[0]["lr"] = 0.005 * factor
            twin.grad = gradient.clone()
            adamw.step()
        torch.testing.assert_close(parameter.detach(), twin.detach(), msg=name)


def test_groups_of_a_task_apply_to_both_optimizers_of_muon() -> None:
    model = layered()
    for parameter in hidden_matrices(model):
        setattr(parameter, HIDDEN_MATRIX, True)
    named = dict(model.named_parameters())
    spared = frozenset({"1.wide.weight", "1.wide.bias"})
    groups = [
        ParameterGroup(names=frozenset(named) - spared, options={}),
        ParameterGroup(names=spared, options={"weight_decay": 0.0}),
    ]
    spec = {"name": "muon", "weight_decay": 0.1}
    optimizer = build_optimizer(named, recipe(optimizer=spec), groups)
    found = {
        (group[HIDDEN_MATRIX], group["weight_decay"]): len(group["params"])
        for group in optimizer.param_groups
    }
    assert found == {
        (True, 0.1): 3,
        (True, 0.0): 1,
        (False, 0.1): len(named) - 5,
        (False, 0.0): 1,
    }


@pytest.mark.parametrize("name", ["adafactor", "lamb", "muon"])
def test_strategies_that_update_parts_of_tensors_refuse(name: str) -> None:
    refused: dict[str, str] = {}
    for strategy in STRATEGIES:
        built = build_strategy(strategy, {})
        built.check(8, MACHINE, recipe(optimizer={"name": "adamw"}, **LONG))
        try:
            built.check(8, MACHINE, recipe(optimizer={"name": name}, **LONG))
        except StrategyUnavailable as error:
            refused[strategy] = str(error)
    sharded = {"fsdp", "fsdp-grad-op", "fsdp-hybrid", "fsdp1", "zero-1", "zero-2", "zero-3", "tp"}
    meshes = {"fsdp-tp", "fsdp-pp", "fsdp-tp-pp", "fsdp-ulysses"}
    assert {*refused} == sharded | meshes | {"ps-sync", "ps-async", "ps-bounded"}
    for reason in refused.values():
        assert f"{name} needs full tensors" in reason
        assert "use ddp or zro" in reason


@pytest.mark.parametrize(
    ("given", "defaults"),
    [
        ({"name": "muon"}, {"momentum": 0.95, "nesterov": True}),
        ({"name": "muon", "momentum": 0.0, "nesterov": False}, {"momentum": 0.0}),
        ({"name": "lamb"}, {"eps": 1e-6}),
        ({"name": "lamb", "eps": 1e-8}, {"eps": 1e-8}),
    ],
)
def test_defaults_of_a_name_survive_a_file(given: dict[str, Any], defaults: dict[str, Any]) -> None:
    spec = Optimizer.model_validate(given)
    assert defaults.items() <= spec.model_dump().items()
    short = spec.model_dump(exclude_defaults=True)
    assert Optimizer.model_validate(short) == spec
    assert short == given
