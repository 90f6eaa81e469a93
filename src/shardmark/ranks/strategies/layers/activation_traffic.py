"""Activations that ranks exchange inside a model's layers, counted without any rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardmark.ranks.strategies.blocks import checkpoint_blocks
from shardmark.ranks.workloads.base import SequencePlan, TensorPlan

if TYPE_CHECKING:
    from torch import nn

    from shardmark.base.recipe import Recipe
    from shardmark.ranks.workloads.base import Workload


def count_activation_traffic(
    workload: Workload, model: nn.Module, recipe: Recipe, plan: TensorPlan | SequencePlan
) -> dict[str, Any]:
    """Count `divided` and `divided_again` of `ModelSize`.  The model cannot be used afterwards."""
    divided, again = count_sample(workload, model, plan)[1] or {}, dict[str, int]()
    if recipe.activation_checkpointing:
        checkpoint_blocks(model, recipe.activation_checkpointing, workload.blocks(model))
        twice = count_sample(workload, model, plan)[1] or {}
        again = {side: count - divided[side] for side, count in twice.items()}
    return {"divided": divided, "divided_again": again}


def count_sample(
    workload: Workload, model: nn.Module, plan: object
) -> tuple[int | None, dict[str, int] | None]:
    """Count the operations of a sample, and the elements that the plan's ranks exchange."""
    if isinstance(plan, TensorPlan):
        from shardmark.ranks.strategies.layers.divided import counting_divided

        counting = counting_divided(model, plan)
    elif isinstance(plan, SequencePlan):
        from shardmark.ranks.strategies.layers.sequences import counting_exchanged

        counting = counting_exchanged(plan)
    else:
        return workload.sample_input_flops(model), None
    with counting as counted:
        flops = workload.sample_input_flops(model)
    return flops, None if flops is None else dict(counted)
