"""What libraries' own code takes on a rank's processor, where that is what computes."""

from __future__ import annotations

from collections.abc import Mapping

from shardmark.core.recipe import Recipe
from shardmark.core.wire import ModelSize
from shardmark.predict.hardware.catalogue import Card
from shardmark.strategies.base import Strategy

OPERATIONS: Mapping[str, float] = {
    "1f1b pass": 174,
    "adam tensor": 8,
    "ddp": 296,
    "fsdp": 367,
    "fsdp gather": 230,
    "fsdp tensor": 32,
    "fsdp unit": 252,
    "fsdp1": 251,
    "fsdp1 gather": 340,
    "gpipe pass": 414,
    "interleaved pass": 326,
    "loop": 183,
    "meeting": 357,
    "meeting tensor": 1,
    "outer tensor": 6,
    "powersgd": 712,
    "pp": 347,
    "pp tensor": 6,
    "ps": 26,
    "ps tensor": 5,
    "ps-async worker": 577,
    "ps-sync worker": 352,
    "sgd tensor": 3,
    "tp call": 393,
    "tp sequence call": 659,
    "ulysses call": 153,
    "zero tensor": 9,
    "zero-0": 526,
    "zero-1": 800,
    "zero-2": 873,
    "zero-3": 0,
    "zero-3 tensor": 155,
    "zero-bubble pass": 461,
    "zero-bubble tensor": 15,
    "zro": 282,
}
"""In the time of one small operation, by what strategies name in `library_work`; `loop` is a step
of ours.  Fitted by `benchmarks/library_work.py`: two models on two ranks, torch 2.15, DeepSpeed
0.19."""


def library_work(
    strategy: Strategy, size: ModelSize, recipe: Recipe, world_size: int, nodes: int = 1
) -> Mapping[str, float]:
    """How often what happens in a step, the loop included."""
    return {"loop": 1.0, **strategy.library_work(size, recipe, world_size, nodes)}


def library_seconds(
    strategy: Strategy,
    size: ModelSize,
    recipe: Recipe,
    world_size: int,
    card: Card,
    *,
    nodes: int = 1,
) -> float:
    """Of one rank alone on its processor; 0 on a GPU, ahead of which a processor runs, and where
    nothing was measured."""
    if card.device_type != "cpu" or card.operation_seconds is None:
        return 0.0
    work = library_work(strategy, size, recipe, world_size, nodes)
    return card.operation_seconds * sum(
        count * OPERATIONS.get(name, 0.0) for name, count in work.items()
    )
