"""What passes between ranks inside of a model's layers, counted without a rank."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from shardmark.strategies.blocks import checkpoint_blocks
from shardmark.strategies.layers.divided import counting_divided
from shardmark.strategies.layers.sequences import counting_exchanged
from shardmark.workloads.base import SequencePlan, TensorPlan

if TYPE_CHECKING:
    from collections import Counter

    from torch import nn

    from shardmark.core.recipe import Recipe
    from shardmark.workloads.base import Workload


def counted_passing(
    workload: Workload, model: nn.Module, recipe: Recipe, plan: TensorPlan | SequencePlan
) -> dict[str, Any]:
    """`divided` and `divided_again` of `ModelSize`; the model is used up."""

    def once() -> dict[str, int]:
        counting: AbstractContextManager[Counter[str]] = (
            counting_divided(model, plan)
            if isinstance(plan, TensorPlan)
            else counting_exchanged(plan)
        )
        with counting as counted:
            workload.sample_input_flops(model)
        return dict(counted)

    divided, again = once(), dict[str, int]()
    if recipe.activation_checkpointing:
        checkpoint_blocks(model, workload.blocks(model))
        again = {side: count - divided[side] for side, count in once().items()}
    return {"divided": divided, "divided_again": again}
