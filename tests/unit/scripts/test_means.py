"""The graph of a loss shows the mean that it is, and the number that multiplies it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from shardmark.scripts.observer import ends_of, mean_of
from shardmark.scripts.record import LossCall
from tests import present

TARGETS = torch.linspace(-1.0, 2.0, 12).view(4, 3)
SHARES = torch.softmax(TARGETS * torch.arange(1.0, 5).view(4, 1), 1)
MASK = torch.tensor([[1.0, 1, 1], [1, 0, 0], [1, 1, 0], [1, 0, 0]])


def outputs() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(4, 5, generator=generator) @ torch.randn(
        5, 3, generator=generator, requires_grad=True
    )


def factor(loss: Tensor, gradient: Tensor | None = None) -> tuple[float, LossCall] | None:
    first = torch.ones_like(loss) if gradient is None else gradient
    for mean in mean_of(loss, first, [*ends_of(loss, first)]):
        return float(loss.detach() * first) / mean.value, mean
    return None


LOSSES: dict[str, tuple[Callable[[Tensor], Tensor], float | None, float]] = {
    "mean of squares": (lambda y: ((y - TARGETS) ** 2).mean(), 1, 12),
    "sum, divided": (lambda y: ((y - TARGETS) ** 2).sum() / 12, 1, 12),
    "mean of absolute values": (lambda y: (y - TARGETS).abs().mean(), 1, 12),
    "divided": (lambda y: ((y - TARGETS) ** 2).mean() / 4, 0.25, 12),
    "divided inside": (lambda y: ((y - TARGETS) ** 2 / 4).mean(), 0.25, 12),
    "divided inside of absolute values": (lambda y: ((y - TARGETS) / 4).abs().mean(), 0.25, 12),
    "divided in place": (lambda y: ((y - TARGETS) ** 2).mean().div_(4), 0.25, 12),
    "weighted": (lambda y: 0.5 * ((y - TARGETS) ** 2).mean(), 0.5, 12),
    "sum": (lambda y: ((y - TARGETS) ** 2).sum(), 12, 12),
    "sum over columns": (lambda y: ((y - TARGETS) ** 2).sum(1).mean(), 3, 12),
    "preferences": (
        lambda y: (
            -functional.logsigmoid(0.1 * (y[:, 0] - y[:, 1])) * (1 - 0.0)
            - functional.logsigmoid(-0.1 * (y[:, 0] - y[:, 1])) * 0.0
        ).mean(),
        1,
        4,
    ),
    "tokens by hand": (
        lambda y: (-y.log_softmax(1).gather(1, torch.tensor([[0], [2], [1], [1]]))).mean(), 1, 4,
    ),
    "shares of classes": (lambda y: -(SHARES * y.log_softmax(1)).sum(1).mean(), 1, 4),
    "shares that weigh rows": (lambda y: -(TARGETS.abs() * y.log_softmax(1)).mean(), None, 0),
    "masked": (lambda y: ((y - TARGETS) ** 2 * MASK).sum() / MASK.sum(), 1, 7),
    "torch's, without reduction": (
        lambda y: (functional.mse_loss(y, TARGETS, reduction="none") * MASK).sum() / MASK.sum(),
        1, 7,
    ),
    "another type": (lambda y: ((y - TARGETS) ** 2).double().mean(), 1, 12),
    "a constant beside it": (lambda y: 0.0 + ((y - TARGETS) ** 2).mean() + 3.0, 1, 12),
    "one number": (lambda y: functional.mse_loss(y, TARGETS), None, 0),
    "multiplied and divided": (lambda y: 4 * ((y - TARGETS) ** 2).mean() / 4, None, 0),
    "multiplied inside": (lambda y: (4 * (y - TARGETS) ** 2).mean() / 4, None, 0),
    "two terms": (lambda y: ((y**2).mean() + (y - TARGETS).abs().mean()) / 2, None, 0),
    "two terms of one function": (lambda y: _halves(y.log_softmax(1)), None, 0),
    "a learned weight": (lambda y: (y**2).mean() * y.sum().exp(), None, 0),
    "several weights": (lambda y: ((y - TARGETS) ** 2 * (1 + TARGETS.abs())).mean(), None, 0),
    "scaled, as by a GradScaler": (lambda y: ((y - TARGETS) ** 2).mean() * 65536.0, None, 0),
    "constant": (lambda y: (0 * y).mean(), None, 0),
}  # fmt: skip


def _halves(logs: Tensor) -> Tensor:
    return (logs[:, 0].mean() + logs[:, 1].mean()) / 2


@pytest.mark.parametrize("name", LOSSES)
def test_the_factor_of_a_mean_is_read_from_its_graph(name: str) -> None:
    loss_of, expected, elements = LOSSES[name]
    loss = loss_of(outputs())
    found = factor(loss)
    if expected is None:
        assert found is None
        return
    value, mean = present(found)
    assert value == pytest.approx(expected)
    assert mean.weight == elements
    torch.autograd.backward(loss)  # the graph is as before


def test_the_gradient_of_backward_divides_a_loss() -> None:
    value, _ = present(factor((outputs() ** 2).mean(), torch.tensor(0.25)))
    assert value == pytest.approx(0.25)


def test_the_targets_of_rows_are_counted() -> None:
    _, mean = present(factor(((outputs() ** 2) * MASK).sum() / MASK.sum()))
    assert present(mean.counted).tolist() == [3, 1, 2, 1]


def test_numbers_that_torch_multiplies_by_itself_are_factors() -> None:
    """Label smoothing is two terms, with a number each that is no tensor."""
    loss = functional.cross_entropy(outputs(), torch.tensor([0, 2, 1, 1]), label_smoothing=0.1)
    terms = [term for term, *_ in ends_of(loss, torch.ones_like(loss))]
    products = [torch.tensor(term.factors).prod() for term in terms]
    assert sorted(map(float, products)) == pytest.approx([0.1 / 12, 0.9])
