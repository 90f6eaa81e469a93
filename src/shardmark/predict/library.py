"""Predicts the time of libraries' own code on a CPU that also computes the model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from shardmark.predict.hardware.catalogue import Card
from shardmark.ranks.costs.base import Cell, Costs

_TEXT = Path(__file__).with_name("library.yaml").read_text(encoding="utf-8")
OPERATIONS: Mapping[str, float] = yaml.safe_load(_TEXT)
"""Time of each count of `library_work`, in small operations; `loop` is a step of ours.

Fitted in `benchmarks/results/2026-11-24-library-work.md`: two models on two ranks, torch 2.15,
DeepSpeed 0.19.
"""


def library_work(costs: Costs[Any], cell: Cell) -> Mapping[str, float]:
    """Number of the library's operations in a step, with those of the training loop."""
    passes = cell.recipe.gradient_accumulation
    return {"loop": 1.0, "pass": passes, **costs.library_work(cell)}


def small_operations(work: Mapping[str, float], *, updates: bool = True) -> float:
    """Number of small operations that take as long as the library's own code.

    Without `updates`, those of torch's optimizers on each tensor do not count.
    """
    left_out = () if updates else ("adam tensor", "sgd tensor")
    counted = (name for name in work if name not in left_out)
    return sum(work[name] * OPERATIONS.get(name, 0.0) for name in counted)


def library_seconds(costs: Costs[Any], cell: Cell, card: Card) -> float:
    """Time of a rank that runs alone.

    It is 0 on a GPU, since the CPU runs ahead of it, and if the card has no measured time.
    """
    if card.device_type != "cpu" or card.operation_seconds is None:
        return 0.0
    return card.operation_seconds * small_operations(library_work(costs, cell))
