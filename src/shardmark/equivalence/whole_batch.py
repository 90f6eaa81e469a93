"""Holds the reference itself against one process that takes the whole batch in one piece."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from shardmark.core.shares import Shard
from shardmark.core.text import one_line
from shardmark.equivalence.capture import Array, arrays
from shardmark.equivalence.compare import Tolerances, equal, worst_of
from shardmark.equivalence.lockstep import generator_states
from shardmark.equivalence.reference import Reference, ReferenceRuns
from shardmark.results.verification import Cause, Check
from shardmark.workloads.base import Batch, Workload

if TYPE_CHECKING:
    from torch import nn

NAME = "whole batch in one piece"

CAUSE = Cause(
    text="the loss of a batch is not the sum of its parts' losses",
    evidence="the reference too, which adds up shares, differs from one process on the whole batch",
    setting="the task's loss: return (sum, weight), or declare loss_adds_up = False",
    first_deviation=NAME,
)

MOST_SHOWN = 200
"""Characters of an error."""


def whole_batch_check(runs: ReferenceRuns, tolerances: Tolerances) -> Check:
    """The reference's first gradient, without dropout, against the same in one piece.

    There the loss is divided by the weight that it returns itself.  What fails here and trained in
    the reference's runs is not compared.  In fp32 whatever the precision: losses add up or do not.
    """
    workload, device = runs.workload, runs.device
    recipe = runs.trial.recipe.model_copy(update={"precision": "fp32"})
    reference = Reference(
        workload, recipe, shares=runs.shares, plan=runs.plan, total_steps=1, device=device
    )
    try:
        reason = _blocker(workload, reference, tolerances)
        if reason is not None:
            return _not_compared(reason)
        for model in reference.models:
            _stop_dropout(model)
        whole = next(workload.batches(runs.plan, Shard(index=0, count=1))).to(device)
        in_one_piece = _gradient_in_one_piece(workload, reference.model, whole, device)
        if in_one_piece is None:
            return _not_compared("the loss draws random numbers, other than dropout's")
        for model in reference.models:
            model.train(reference.model.training)
        reference.pass_shares()
    except torch.OutOfMemoryError:
        return _not_compared("the whole batch is too large for one device")
    except Exception as error:  # the user's model, in a size that nobody asked for
        told = one_line(f"{type(error).__name__}: {error}")[:MOST_SHOWN]
        return _not_compared(f"one process on the whole batch fails: {told}")

    expected = replace(tolerances.reference, tensors={"gradient": in_one_piece})
    in_parts = replace(expected, tensors={"gradient": arrays(reference.gradients)})
    return worst_of(
        NAME,
        {name: ("tensors", "gradient", name) for name in in_one_piece},
        in_parts,
        replace(tolerances, reference=expected),
    )


def _blocker(workload: Workload, reference: Reference, tolerances: Tolerances) -> str | None:
    """Why the parts need not make the whole."""
    recipe = reference.recipe
    cut = "micro-batch" if recipe.gradient_accumulation > 1 else "share"
    couples = any(isinstance(module, _BatchNorm) for module in reference.model.modules())
    if couples and not (recipe.sync_batch_norm and cut == "share"):
        return f"batch norm takes its statistics of each {cut}"
    if workload.not_additive is not None:
        return workload.not_additive
    return "this model amplifies rounding" if tolerances.exact_forward else None


def _not_compared(reason: str) -> Check:
    told = f"not compared: {reason}"
    return equal(NAME, told, told)


def _stop_dropout(model: nn.Module) -> None:
    """Set every module's rates of dropout to 0, by their attributes' usual names.

    Evaluation mode would do more: cuDNN's recurrent layers have no backward pass there, and some
    models return something else.
    """
    for module in model.modules():
        drops = any(part in type(module).__name__ for part in ("Drop", "StochasticDepth"))
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and ("drop" in name or (drops and name == "p")):
                setattr(module, name, 0.0)


def _gradient_in_one_piece(
    workload: Workload, model: nn.Module, whole: Batch, device: torch.device
) -> dict[str, Array] | None:
    """In training mode; in evaluation mode where training draws still, or changes buffers.

    Those of batch norm may change: no step computes with them.  Leaves the model in that mode.
    None where both modes draw.
    """
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm)]
    tracked = {id(buffer) for norm in norms for buffer in norm.buffers()}
    buffers = {n: b.clone() for n, b in model.named_buffers() if id(b) not in tracked}
    for training in (True, False):
        model.train(training)
        before = generator_states(device)
        loss = workload.loss(model, whole)
        if not all(map(torch.equal, before, generator_states(device))):
            continue
        now = {n: b for n, b in model.named_buffers() if n in buffers}
        if training and any(not torch.equal(b, buffers[n]) for n, b in now.items()):
            with torch.no_grad():
                for name, buffer in now.items():
                    buffer.copy_(buffers[name])
            continue
        (loss.total / loss.weight).backward()  # type: ignore[no-untyped-call]  # torch's
        gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        taken = arrays(gradients)
        model.zero_grad(set_to_none=True)
        return taken
    return None
