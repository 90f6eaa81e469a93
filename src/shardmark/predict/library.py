"""Predicts the time of libraries' own code on a CPU that also computes the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardmark.predict.hardware.catalogue import Card
from shardmark.ranks.costs.base import Cell, Costs

OPERATIONS: Mapping[str, float] = {
    "1f1b pass": 170,
    "adam tensor": 8,
    "ddp": 229,
    "ddp pass": 17,
    "fsdp": 195,
    "fsdp gather": 284,
    "fsdp tensor": 35,
    "fsdp unit": 206,
    "fsdp1": 409,
    "fsdp1 gather": 316,
    "gpipe pass": 415,
    "interleaved pass": 354,
    "loop": 2,
    "meeting": 326,
    "outer tensor": 3,
    "pass": 165,
    "powersgd": 407,
    "pp": 445,
    "pp tensor": 5,
    "ps": 134,
    "ps tensor": 4,
    "ps-async worker": 566,
    "ps-sync worker": 358,
    "sgd tensor": 4,
    "tp call": 381,
    "tp sequence call": 638,
    "ulysses call": 148,
    "zero tensor": 7,
    "zero-0": 638,
    "zero-1": 789,
    "zero-2": 936,
    "zero-3 tensor": 158,
    "zero-bubble pass": 362,
    "zero-bubble tensor": 20,
    "zro": 244,
}
"""Time of each count of `library_work`, in small operations; `loop` is a step of ours.

Fitted in `benchmarks/results/2026-11-24-library-work.md`: two models on two ranks, torch 2.15,
DeepSpeed 0.19.
"""


def library_work(costs: Costs[Any], cell: Cell) -> Mapping[str, float]:
    """Number of the library's operations in a step, with those of the training loop."""
    passes = cell.recipe.gradient_accumulation
    return {"loop": 1.0, "pass": passes, **costs.library_work(cell)}


def library_seconds(costs: Costs[Any], cell: Cell, card: Card) -> float:
    """Time of a rank that runs alone.

    It is 0 on a GPU, since the CPU runs ahead of it, and if the card has no measured time.
    """
    if card.device_type != "cpu" or card.operation_seconds is None:
        return 0.0
    work = library_work(costs, cell)
    return card.operation_seconds * sum(
        count * OPERATIONS.get(name, 0.0) for name, count in work.items()
    )
