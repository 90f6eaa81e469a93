"""Holds the reference itself against one process that takes the whole batch in one piece."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from shardmark.core.shares import Shard
from shardmark.core.text import one_line
from shardmark.equivalence.capture import Array, arrays
from shardmark.equivalence.compare import Tolerances, equal, norm, worst_of
from shardmark.equivalence.lockstep import generator_states, same_states
from shardmark.equivalence.reference import Reference, ReferenceRuns
from shardmark.results.verification import Cause, Check
from shardmark.train.exchanged_group import one_rank, world_of
from shardmark.workloads.base import Batch, Workload

if TYPE_CHECKING:
    from torch import nn

NAME = "whole batch in one piece"

NOT_A_SUM = Cause(
    text="the loss of a batch is not the sum of its parts' losses",
    evidence="the reference too, which adds up shares, differs from one process on the whole batch",
    setting="the task's loss: return (sum, weight); declare loss_adds_up = False only if it "
    "compares the samples of a batch with each other on purpose",
    first_deviation=NAME,
)

NOT_GATHERED = Cause(
    text="the task communicates by itself, and its ranks do not train what one process trains",
    evidence="the reference, whose ranks communicate as the task asks, differs from one process on "
    "the whole batch",
    setting="the task's loss: if it uses what it gathers, gather with gradients and let every rank "
    "return the loss of the whole batch; else return (sum, weight)",
    first_deviation=NAME,
)

MOST_SHOWN = 200
"""Characters of an error."""


class WholeBatch(NamedTuple):
    """The reference held against one process on the whole batch."""

    check: Check
    cause: Cause
    """The fault of the task, if the check does not hold."""


Gradients = dict[str, Array]


def whole_batch_check(
    runs: ReferenceRuns, tolerances: Tolerances, *, stateful: bool = False
) -> WholeBatch:
    """Compare the reference's gradients, without dropout, with those of batches in one piece.

    All verified batches are compared, at the initial weights.  In one piece the loss is divided by
    the weight that it returns itself.  What fails here and trained in the reference's runs is not
    compared.  In fp32 whatever the precision: losses add up or do not.  A `stateful` task is not
    compared: the whole batch would change what its parts find.
    """
    declared = runs.workload.not_additive_declared
    try:
        compared = "the model or the loss keeps state" if stateful else _gradients(runs, tolerances)
    except torch.OutOfMemoryError:
        compared = "the whole batch is too large for one device"
    except Exception as error:  # the user's model, in a size that nobody asked for
        message = one_line(f"{type(error).__name__}: {error}")[:MOST_SHOWN]
        compared = f"one process on the whole batch fails: {message}"
    count = runs.shares * runs.trial.recipe.gradient_accumulation
    scaled = (
        not isinstance(compared, str)
        and count > 1
        and all(_is_scaled(parts, whole, 1 / count) for parts, whole in compared)
    )
    if declared and not scaled:
        compared = str(runs.workload.not_additive)
    if isinstance(compared, str):
        text = f"not compared: {compared}"
        return WholeBatch(equal(NAME, text, text), NOT_A_SUM)
    checks = [
        _compared(parts, whole, tolerances, where=f"batch {number}")
        for number, (parts, whole) in enumerate(compared, start=1)
    ]
    worst = max(checks, key=lambda check: check.in_tolerances or 0.0)
    if runs.communicates and not scaled:
        return WholeBatch(worst, NOT_GATHERED)
    if not scaled:
        return WholeBatch(worst, NOT_A_SUM)
    return WholeBatch(worst, _too_small(count, len(compared), gathers=runs.communicates))


def _gradients(
    runs: ReferenceRuns, tolerances: Tolerances
) -> list[tuple[Gradients, Gradients]] | str:
    """Return the gradients of each batch, in parts and in one piece; or why they need not agree."""
    workload, device = runs.workload, runs.device
    recipe = runs.trial.recipe.model_copy(update={"precision": "fp32"})
    reference = Reference(
        workload,
        recipe,
        shares=runs.shares,
        plan=runs.plan,
        total_steps=1,
        device=device,
        communicates=runs.communicates,
    )
    reason = _blocker(workload, reference, tolerances)
    if reason is not None:
        return reason
    for model in reference.models:
        _stop_dropout(model)
    made = []
    for batch in islice(workload.batches(runs.plan, Shard(index=0, count=1)), runs.steps):
        with one_rank():
            whole = _gradient_in_one_piece(workload, reference.model, batch.to(device), device)
        if whole is None:
            return "the loss draws random numbers, other than dropout's"
        for model in reference.models:
            model.train(reference.model.training)
        with world_of(reference.players):
            reference.pass_shares()
        made.append((arrays(reference.gradients), whole))
    return made


def _compared(parts: Gradients, whole: Gradients, tolerances: Tolerances, where: str) -> Check:
    expected = replace(tolerances.reference, tensors={"gradient": whole})
    return worst_of(
        NAME,
        {f"{where}, {name}": ("tensors", "gradient", name) for name in whole},
        replace(expected, tensors={"gradient": parts}),
        replace(tolerances, reference=expected),
    )


def _is_scaled(parts: Gradients, whole: Gradients, factor: float) -> bool:
    """Return whether the parts' gradient is the whole's times the factor, to a thousandth."""
    off = sum(norm(parts.get(name, 0.0) - factor * array) ** 2 for name, array in whole.items())
    size = sum(norm(factor * array) ** 2 for array in whole.values())
    return size > 0 and off <= 1e-6 * size


def _too_small(count: int, batches: int, *, gathers: bool) -> Cause:
    also = "; or it gathers values of other ranks without their gradients" if gathers else ""
    return Cause(
        text=f"the gradient is {count} times too small: the loss is a sum or is divided by a "
        f"constant, not by the samples that it is given{also}",
        evidence=f"added up over {count} parts it is 1/{count} of that of one process on the whole "
        f"batch, in each of {batches} batches",
        setting="the task's loss: return (sum, weight), or the mean over the samples of the batch",
        first_deviation=NAME,
    )


def _blocker(workload: Workload, reference: Reference, tolerances: Tolerances) -> str | None:
    """Why the parts need not make the whole."""
    recipe = reference.recipe
    cut = "micro-batch" if recipe.gradient_accumulation > 1 else "share"
    couples = any(isinstance(module, _BatchNorm) for module in reference.model.modules())
    if couples and not (recipe.sync_batch_norm and cut == "share"):
        return f"batch norm takes its statistics of each {cut}"
    if workload.not_additive is not None and not workload.not_additive_declared:
        return workload.not_additive
    return "this model amplifies rounding" if tolerances.exact_forward else None


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
        if not same_states(before, generator_states(device)):
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
