"""Models that a strategy refuses, before a library fails without a word that helps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardmark.base.errors import StrategyUnavailable
from shardmark.ranks.strategies import build_strategy
from shardmark.ranks.strategies.parameters import check_parameters
from shardmark.ranks.strategies.sharded_calls import END, ReadsOutside, equal_calls, refusal_of
from tests.unit.ranks.train.toy import ToyWorkload


class Bags(nn.Module):
    """Sparse gradients, of which one table has none, and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(9, 4, sparse=True) for _ in range(5))
        self.frozen = nn.Embedding(9, 4, sparse=True).requires_grad_(False)
        self.temperature = nn.Parameter(torch.ones(()))


NEITHER = ("fsdp", "fsdp-grad-op", "fsdp-hybrid", "fsdp1", "zero-1", "zero-2", "zero-3")


@pytest.mark.parametrize("name", [*NEITHER, "zro"])
def test_sharding_refuses_scalars_and_sparse_gradients_by_name(name: str) -> None:
    strategy, workload = build_strategy(name, {}), ToyWorkload(Bags)
    with pytest.raises(StrategyUnavailable) as refused:
        strategy.check_model(workload, Bags(), 4)
    sparse = "bags.0, bags.1, bags.2 and 2 more" in refused.value.reason
    assert sparse == (name == "zro")
    expected = "sparse=False" if sparse else "give temperature the shape (1,)"
    assert expected in refused.value.remedy


@pytest.mark.parametrize("name", ["single", "ddp", "ps-sync", "local-sgd"])
def test_replicas_accept_scalars_and_sparse_gradients(name: str) -> None:
    build_strategy(name, {}).check_model(ToyWorkload(Bags), Bags(), 2)


class Mixed(nn.Module):
    """A double head on a frozen 16-bit base, and parameters without elements."""

    def __init__(self, *, empty: bool = False) -> None:
        super().__init__()
        self.base = nn.Linear(4, 4).to(torch.bfloat16).requires_grad_(False)
        self.middle = nn.Linear(4, 4)
        self.head = nn.Linear(4, 2).to(torch.float32 if empty else torch.float64)
        self.prefix = nn.Parameter(torch.zeros(0, 4)) if empty else None


@pytest.mark.parametrize(
    ("name", "which"),
    [
        ("fsdp", "head.weight (float64), head.bias (float64)"),
        ("zro", "head.weight (float64)"),
        ("zero-2", "head.weight (float64)"),
        ("ps-sync", "head.weight (float64)"),
        ("fsdp1", "base.weight (bfloat16), base.bias (bfloat16), head.weight (float64) and 1 more"),
    ],
)
def test_types_that_a_library_does_not_take_are_named(name: str, which: str) -> None:
    with pytest.raises(StrategyUnavailable) as refused:
        build_strategy(name, {}).check_model(ToyWorkload(Mixed), Mixed(), 2)
    assert which in refused.value.reason


@pytest.mark.parametrize("name", ["fsdp", "zero-3"])
def test_parameters_without_elements_are_named(name: str) -> None:
    made = Mixed(empty=True)
    with pytest.raises(StrategyUnavailable, match="without elements, such as prefix"):
        build_strategy(name, {}).check_model(ToyWorkload(Mixed), made, 2)


def test_a_frozen_table_has_no_sparse_gradient() -> None:
    check_parameters(
        "fsdp", nn.Embedding(9, 4, sparse=True).requires_grad_(False), "FSDP2", "sparse"
    )


class Calls(nn.Module):
    """Calls layers of these numbers, in this order."""

    def __init__(self, *numbers: int) -> None:
        super().__init__()
        self.numbers, self.layers = numbers, nn.ModuleList(nn.Linear(2, 2) for _ in range(3))

    def forward(self, inputs: Tensor) -> Tensor:
        for number in self.numbers:
            inputs = self.layers[number](inputs)
        return inputs


def called(model: Calls, gather: Callable[[object], list[object]]) -> None:
    units = {f"layers.{index}": layer for index, layer in enumerate(model.layers)}
    with equal_calls("fsdp", model, units, gather):
        model(torch.ones(1, 2))
    model(torch.ones(1, 2))  # nothing is exchanged any more


@pytest.mark.parametrize(
    ("numbers", "there", "found"),
    [
        ((0, 1), "layers.2", "after the start, rank 0 calls layers.0, rank 1 calls layers.2"),
        ((), "layers.2", f"rank 0 calls {END}, rank 1 calls layers.2"),
    ],
)
def test_ranks_that_call_other_parts_are_named(
    numbers: tuple[int, ...], there: str, found: str
) -> None:
    with pytest.raises(StrategyUnavailable, match=found) as refused:
        called(Calls(*numbers), lambda name: [name, there])
    assert "multiplied by zero" in refused.value.remedy


def test_each_call_is_compared_but_those_of_a_backward_pass() -> None:
    exchanged: list[object] = []

    def gather(name: object) -> list[object]:
        exchanged.append(name)
        return [name, name]

    model = Calls(0, 2, 0)
    called(model, gather)
    assert exchanged == ["layers.0", "layers.2", "layers.0", END]
    exchanged.clear()
    units = {"layers.0": model.layers[0]}
    with equal_calls("fsdp", model, units, gather):
        model(torch.ones(1, 2))
        model.layers[0](torch.ones(1, 2))  # as activation checkpointing does
    assert exchanged == ["layers.0", "layers.0", END]


def test_modules_whose_gradients_are_reduced_together_are_called_by_all() -> None:
    model = Calls(0, 2)
    trained = {f"layers.{index}": layer for index, layer in enumerate(model.layers)}

    def gather(value: object) -> list[object]:
        return [value, ["layers.0", "layers.1"] if isinstance(value, list) else value]

    with (
        pytest.raises(StrategyUnavailable, match=r"rank 0 does not call layers\.1"),
        equal_calls("fsdp", model, {}, gather, trained=trained),
    ):
        model(torch.ones(1, 2))


class Shard(nn.Parameter):
    """A stand-in for DeepSpeed's partitioned parameter."""

    ds_numel = 99


def test_a_loss_that_computes_with_shards_is_refused() -> None:
    model = nn.Linear(2, 2)
    model.weight = Shard(torch.ones(2, 2))
    with ReadsOutside("zero-3", model):
        loss = model(torch.ones(1, 2)).sum()
        assert model.weight.numel() == 4, "a shape is no computation"
        with torch.no_grad():
            model.weight.norm()
        model.bias.abs().sum()
        with pytest.raises(StrategyUnavailable, match="outside of the model's forward pass"):
            loss + model.weight.abs().sum()
        with pytest.raises(StrategyUnavailable, match="by mm"):
            torch.mm(model.weight, torch.ones(3, 2))
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            torch.mm(model.bias[None], torch.ones(3, 2))


def hooked(model: nn.Module) -> nn.Module:
    first: Any = next(model.parameters())
    first.register_hook(lambda gradient: gradient.clamp(-1, 1))
    return model


@pytest.mark.parametrize(
    ("name", "model", "reason"),
    [
        ("fsdp", hooked(nn.Linear(4, 2)), "drops the hooks on the gradients of weight"),
        ("fsdp1", hooked(nn.Linear(4, 2)), "drops the hooks on the gradients of weight"),
        ("fsdp", nn.Conv2d(2, 2, 3).to(memory_format=torch.channels_last), "contiguous in memory"),
        ("zero-1", nn.Conv2d(2, 2, 3).to(memory_format=torch.channels_last), "and not weight"),
    ],
)
def test_hooks_and_strides_that_a_library_loses_are_named(
    name: str, model: nn.Module, reason: str
) -> None:
    with pytest.raises(StrategyUnavailable) as refused:
        build_strategy(name, {}).check_model(ToyWorkload(lambda: model), model, 2)
    assert reason in refused.value.reason
    assert "hooks" in reason or "recipe.channels_last: true" in refused.value.remedy


class InductorError(RuntimeError):
    """A stand-in for the compiler's own."""


InductorError.__module__ = "torch._inductor.exc"
STORAGE = RuntimeError("setStorage: sizes [8, 16] are out of bounds for storage of size 0")
NOT_USED = "Tensors appears to not have been used in the graph"
INVALID = "invalid gradient at index 0 - got [0] but expected shape compatible with [32, 64]"
IN_PLACE = "in-place operations that require placement changes are not supported"
FLAT = "mat2 must be a matrix, got 1-D tensor"


class Flat(torch.autograd.Function):
    """A model whose backward pass finds a parameter in one row."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        return torch.mm(gradients[0], torch.ones(2))


def partitioned() -> RuntimeError:
    with pytest.raises(RuntimeError, match=FLAT) as found:
        Flat.apply(torch.ones(2, 2, requires_grad=True)).sum().backward()
    return found.value


@pytest.mark.parametrize(
    ("error", "strategy", "remedy"),
    [
        (STORAGE, "fsdp", "wrap: root"),
        (partitioned(), "zero-3", "a dictionary or a data class"),
        (RuntimeError("size of tensor a (0) must match the size of"), "zero-3", "wrap: root"),
        (RuntimeError(f"One of the differentiated {NOT_USED}"), "fsdp", "use ddp"),
        (RuntimeError(f"AbsBackward0 returned an {INVALID}"), "zero-3", "use ddp"),
        (RuntimeError("aten.mul: got mixed torch.Tensor and DTensor"), "fsdp", "(ddp, zro)"),
        (RuntimeError(f"aten.pow_.Scalar: {IN_PLACE}"), "fsdp", "(ddp, zro)"),
        (RuntimeError(FLAT), "zero-3", None),  # a forward pass of the user's
        (InductorError("Cannot convert\nexpression"), None, "recipe.compile to none"),
        (STORAGE, None, None),
        (IndexError("list index out of range"), "zero-1", None),
        (RuntimeError("shapes cannot be multiplied"), "fsdp", None),
    ],
)
def test_errors_of_libraries_are_refusals_with_a_remedy(
    error: Exception, strategy: str | None, remedy: str | None
) -> None:
    refusal: Any = refusal_of(error, strategy)
    assert (refusal is None) == (remedy is None)
    assert remedy is None or (remedy in refusal.remedy and str(error)[:14] in refusal.reason)
