"""A single process performs the collectives of all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardmark.ranks.train.exchanged_group import ExchangedGroup, Players

VALUES = [1.0, 2.0, 3.0]
"""Values of rank 0; rank 1 has twice as much."""


def group_of(rank: int) -> Any:
    def exchange(_name: str, value: list[Tensor]) -> list[list[Tensor]]:
        return [value, [2 * tensor for tensor in value]]

    group = ExchangedGroup(2)
    group.players = Players(2, exchange, lambda: rank)
    return group


@pytest.mark.parametrize(
    ("operation", "result"),
    [
        (dist.ReduceOp.SUM, [3.0, 6.0, 9.0]),
        (dist.ReduceOp.AVG, [1.5, 3.0, 4.5]),
        (dist.ReduceOp.PRODUCT, [2.0, 8.0, 18.0]),
        (dist.ReduceOp.MIN, [1.0, 2.0, 3.0]),
        (dist.ReduceOp.MAX, [2.0, 4.0, 6.0]),
    ],
)
def test_reductions_give_one_value_for_each_element(operation: Any, result: list[float]) -> None:
    options, tensor = dist.AllreduceOptions(), torch.tensor(VALUES)
    options.reduceOp = operation
    group_of(0).allreduce([tensor], options)
    assert tensor.tolist() == result


@pytest.mark.parametrize(("rank", "result"), [(0, VALUES), (1, [3.0, 6.0, 9.0])])
def test_only_the_root_receives_a_reduced_value(rank: int, result: list[float]) -> None:
    options, tensor = dist.ReduceOptions(), torch.tensor(VALUES)
    options.rootRank = 1
    group_of(rank).reduce([tensor], options)
    assert tensor.tolist() == result
