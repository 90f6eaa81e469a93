"""A copy is tried to find out if a model is a chain of its layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardmark.ranks.workloads.base import CannotShard
from shardmark.ranks.workloads.chain import Order, Part, checked_parts

WORDS = torch.arange(6)[None]


class Model(nn.Module):
    """A model whose layers need values of its forward method, and whose head begins as zeros."""

    def __init__(self, *, skips: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)
        self.layers = nn.ModuleList(nn.Bilinear(4, 4, 4) for _ in range(3))
        self.embedding = nn.Embedding(6, 4)
        self.skips, self.dropout = skips, dropout
        nn.init.zeros_(self.head.weight)

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.embedding(words)
        first, turns = hidden, torch.linspace(0, 1, 4).expand_as(hidden).contiguous()
        for layer in self.layers:
            hidden = layer(hidden + (first if self.skips else 0), turns)
        hidden = nn.functional.dropout(hidden, self.dropout, self.training)
        logits: Tensor = self.head(hidden)
        return logits


class Computed(Part):
    def forward(self, given: Tensor) -> Any:
        words = given if given.dim() == 2 else WORDS
        return self.computed(given, words)


def parts_of(order: Order) -> list[nn.Module]:
    return [
        Computed(order, order.early, order.layers[0]),
        *(Computed(order, [layer], layer) for layer in order.layers),
        Computed(order, order.late),
    ]


def tried(model: Model) -> list[nn.Module] | CannotShard:
    return checked_parts(model, [*model.layers], lambda of: of(WORDS), parts_of)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_parts_have_each_parameter_once(device: str) -> None:
    """Without data, too, as plans are checked."""
    model = Model().to(device)
    parts = tried(model)
    assert isinstance(parts, list)
    held = [id(p) for part in parts for p in part.parameters()]
    assert sorted(held) == sorted(map(id, model.parameters()))


def test_parts_compute_the_output_of_the_model() -> None:
    model = Model()
    nn.init.ones_(model.head.weight)
    parts = tried(model)
    assert isinstance(parts, list)
    torch.testing.assert_close(nn.Sequential(*parts)(WORDS), model(WORDS), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"skips": True}, "pass on more than one tensor"),
        ({"dropout": 0.5}, "come in another order"),
    ],
)
def test_model_that_is_no_chain_is_refused(options: dict[str, Any], told: str) -> None:
    found = tried(Model(**options))
    assert isinstance(found, CannotShard)
    assert told in found.reason
