"""Holds the reference itself against one process that takes the whole batch in one piece."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from shardmark.core.recipe import Recipe
from shardmark.core.shares import Shard
from shardmark.equivalence.capture import Array, arrays
from shardmark.equivalence.compare import Tolerances, equal, worst_of
from shardmark.results.verification import Cause, Check
from shardmark.strategies.step import autocast, share_of_step
from shardmark.workloads.base import Batch, BatchPlan, LossSum, Workload

if TYPE_CHECKING:
    from torch import nn

NAME = "whole batch in one piece"

CAUSE = Cause(
    text="the loss of a batch is not the sum of its parts' losses",
    evidence="the reference too, which adds up shares, differs from one process on the whole batch",
    setting="the task's loss: return (sum, weight), or declare loss_adds_up = False",
    first_deviation=NAME,
)


def whole_batch_check(
    workload: Workload,
    recipe: Recipe,
    *,
    shares: int,
    plan: BatchPlan,
    device: torch.device,
    tolerances: Tolerances,
) -> Check:
    """The first gradient, added up over shares and micro-batches, against the same in one piece.

    There the loss is divided by the weight that it returns itself, not by the step's.  The model is
    in evaluation mode: dropout cannot draw the same in one piece, and nothing else changes with it
    in a model without batch norm.
    """
    model = workload.build_model().to(device)
    reason = _blocker(workload, model, tolerances)
    if reason is not None:
        return _not_compared(reason)
    model.eval()

    def batch(index: int, count: int) -> Batch:
        return next(workload.batches(plan, Shard(index=index, count=count)))

    def loss_of(part: Batch) -> LossSum:
        with autocast(recipe, device):
            return workload.loss(model, part.to(device))

    for index in range(shares):
        for part in batch(index, shares).split(recipe.gradient_accumulation):
            _backward(share_of_step(loss_of(part), part.step_weight, shares=1))
    in_parts = _taken_gradient(model)
    try:
        loss = loss_of(batch(0, 1))
        _backward(loss.total / loss.weight)
    except torch.OutOfMemoryError:
        return _not_compared("the whole batch is too large for one device")
    in_one_piece = _taken_gradient(model)

    expected = replace(tolerances.reference, tensors={"gradient": in_one_piece})
    return worst_of(
        NAME,
        {name: ("tensors", "gradient", name) for name in in_one_piece},
        replace(expected, tensors={"gradient": in_parts}),
        replace(tolerances, reference=expected),
    )


def _blocker(workload: Workload, model: nn.Module, tolerances: Tolerances) -> str | None:
    """Why the parts need not make the whole."""
    if any(isinstance(module, _BatchNorm) for module in model.modules()):
        return "batch norm takes its statistics of each share"
    if workload.not_additive is not None:
        return workload.not_additive
    return "this model amplifies rounding" if tolerances.exact_forward else None


def _not_compared(reason: str) -> Check:
    told = f"not compared: {reason}"
    return equal(NAME, told, told)


def _backward(loss: torch.Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]  # torch's


def _taken_gradient(model: nn.Module) -> dict[str, Array]:
    named = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    taken = arrays(named)
    model.zero_grad(set_to_none=True)
    return taken
