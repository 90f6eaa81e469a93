"""Compares the reference with one process that computes the full batch at once."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, islice
from math import isclose
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from shardmark.base.evidence.captures import Array, Tolerances, equal, norm, worst_of
from shardmark.base.evidence.checks import Check
from shardmark.base.layout import Shard
from shardmark.base.results.verification import Cause
from shardmark.base.text import one_line
from shardmark.bench.reference.capture import arrays
from shardmark.bench.reference.lockstep import generator_states, same_states
from shardmark.bench.reference.reference import Reference, ReferenceRuns, put_buffers
from shardmark.ranks.strategies.base import first_names
from shardmark.ranks.train.exchanged_group import world_of
from shardmark.ranks.train.one_rank import one_rank
from shardmark.ranks.workloads.base import Batch, Workload

NAME = "whole batch in one piece"

NOT_A_SUM = Cause(
    text="the loss of a batch is not the sum of its parts' losses",
    evidence="the reference, which sums over shares, also differs from one process on the "
    "full batch",
    setting="the task's loss: return (sum, weight); declare loss_adds_up = False only if it "
    "compares the samples of a batch with each other on purpose",
    first_deviation=NAME,
)

NOT_GATHERED = Cause(
    text="the task communicates by itself, and its ranks do not train what one process trains",
    evidence="the reference, whose ranks communicate as the task asks, differs from one process on "
    "the full batch",
    setting="the task's loss: if it uses gathered values, gather with gradients and let every rank "
    "return the loss of the full batch; else return (sum, weight)",
    first_deviation=NAME,
)

MAX_ERROR_CHARACTERS = 200

SAME_LOSS = 1e-5
"""Relative difference of losses that add up."""


class WholeBatch(NamedTuple):
    """Result of comparing the reference with one process on the full batch."""

    check: Check
    cause: Cause
    """Fault of the task; valid only if the check does not hold."""


Gradients = dict[str, Array]


class Passes(NamedTuple):
    """Results of a batch, in parts and at once."""

    parts: Gradients
    full: Gradients
    losses: tuple[float, float]
    statistics: tuple[str, ...]
    """Buffers that each forward pass sets from its samples, in evaluation mode too."""


def whole_batch_check(
    runs: ReferenceRuns, tolerances: Tolerances, *, stateful: bool = False
) -> WholeBatch:
    """Compare the reference's gradients, without dropout, with those of the full batch.

    All verified batches are compared, at the initial weights and in fp32.  The loss of the full
    batch is divided by the weight that it returns.  Errors only lead to a check that compares
    nothing, since the reference itself ran.  A `stateful` task is not compared: passing the full
    batch would change the results of its parts.
    """
    declared = runs.workload.not_additive_declared
    try:
        compared = "the model or the loss keeps state" if stateful else _gradients(runs, tolerances)
    except torch.OutOfMemoryError:
        compared = "the full batch is too large for one device"
    except Exception as error:  # any error of the user's model with an unusual batch size
        message = one_line(f"{type(error).__name__}: {error}")[:MAX_ERROR_CHARACTERS]
        compared = f"one process on the full batch fails: {message}"
    count = runs.shares * runs.trial.recipe.gradient_accumulation
    scaled = (
        not isinstance(compared, str)
        and count > 1
        and all(_is_scaled(passes.parts, passes.full, 1 / count) for passes in compared)
    )
    if declared and not scaled:
        compared = str(runs.workload.not_additive)
    if isinstance(compared, str):
        text = f"not compared: {compared}"
        return WholeBatch(equal(NAME, text, text), NOT_A_SUM)
    checks = [
        _compared(passes, tolerances, location=f"batch {number}")
        for number, passes in enumerate(compared, start=1)
    ]
    worst = max(checks, key=lambda check: check.in_tolerances or 0.0)
    if worst.holds:
        return WholeBatch(worst, NOT_A_SUM)
    if runs.communicates and not scaled:
        return WholeBatch(worst, NOT_GATHERED)
    if not scaled:
        return WholeBatch(worst, _not_a_sum(runs, tolerances, compared))
    return WholeBatch(worst, _too_small(count, len(compared), gathers=runs.communicates))


def _not_a_sum(runs: ReferenceRuns, tolerances: Tolerances, compared: list[Passes]) -> Cause:
    """Return the cause if neither the ranks' communication nor a divisor is it."""
    statistics = dict.fromkeys(name for passes in compared for name in passes.statistics)
    if statistics:
        return Cause(
            text="the model's own statistics are those of each rank's samples",
            evidence=f"every forward pass sets {first_names([*statistics])} from its samples, and"
            " one process on the full batch gets others",
            setting="the model: compute them over all ranks, or freeze them (observers: "
            "torch.ao.quantization.disable_observer)",
            first_deviation=NAME,
        )
    model = runs.workload.build_model()
    hooked = [*_hooks(model)]
    if hooked:
        without = _gradients(runs, tolerances, hooks=False)
        if not isinstance(without, str) and all(
            _compared(passes, tolerances, location="").holds for passes in without
        ):
            return Cause(
                text="the gradient of a batch is not the sum of its parts' gradients: hooks change "
                "gradients not in proportion",
                evidence=f"without the hooks of {first_names(hooked)} the gradients add up",
                setting="the model: leave out these hooks; recipe.gradient_clipping clips the "
                "gradient of the step",
                first_deviation=NAME,
            )
    tolerance = max(SAME_LOSS, tolerances.floor)
    pairs = [passes.losses for passes in compared]
    if all(one and isclose(one, other, rel_tol=tolerance) for one, other in pairs):
        return NOT_A_SUM.model_copy(
            update={
                "text": "the gradient of a batch is not the sum of its parts' gradients, although "
                "their losses add up"
            }
        )
    return NOT_A_SUM


def _hooks(model: nn.Module) -> dict[str, list[dict[int, Any]]]:
    """Hooks on gradients, by the name of their parameter or module."""
    keys = ("_backward_hooks", "_backward_pre_hooks")
    owners = (*model.named_parameters(), *model.named_modules())
    hooks = {name: [h for key in keys if (h := getattr(o, key, None))] for name, o in owners}
    return {name or "the model": of_owner for name, of_owner in hooks.items() if of_owner}


def _gradients(
    runs: ReferenceRuns, tolerances: Tolerances, *, hooks: bool = True
) -> list[Passes] | str:
    """Gradients of each batch, in parts and at once, or the reason why these may differ."""
    workload, device = runs.workload, runs.device
    recipe = runs.trial.recipe.model_copy(update={"precision": "fp32", "weights": "fp32"})
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
        for registered in () if hooks else chain.from_iterable(_hooks(model).values()):
            registered.clear()
    passes: list[Passes] = []
    for batch in islice(workload.batches(runs.plan, Shard(index=0, count=1)), runs.steps):
        with one_rank():
            full = _full_pass(workload, reference.model, batch.to(device), device)
            if full is None:
                return "the loss draws random numbers, other than dropout's"
        for model in reference.models:
            model.train(reference.model.training)
        with world_of(reference.players):
            losses = reference.compute_gradients()
        gradients, loss, set_buffers = full
        statistics = (
            name
            for name, buffer in set_buffers.items()
            if any(not torch.equal(buffer, of_rank[name]) for of_rank in reference.all_buffers)
        )
        passes.append(
            Passes(
                parts=arrays(reference.gradients),
                full=gradients,
                losses=(float(sum(losses)) / len(losses), loss),
                statistics=tuple(statistics),
            )
        )
    return passes


def _compared(passes: Passes, tolerances: Tolerances, location: str) -> Check:
    expected = replace(tolerances.reference, tensors={"gradient": passes.full})
    return worst_of(
        NAME,
        {f"{location}, {name}": ("tensors", "gradient", name) for name in passes.full},
        replace(expected, tensors={"gradient": passes.parts}),
        replace(tolerances, reference=expected),
    )


def _is_scaled(parts: Gradients, full: Gradients, factor: float) -> bool:
    """True if the parts' gradient is the full one times the factor, to a relative 1e-3."""
    error = sum(norm(parts.get(name, 0.0) - factor * array) ** 2 for name, array in full.items())
    size = sum(norm(factor * array) ** 2 for array in full.values())
    return size > 0 and error <= 1e-6 * size


def _too_small(count: int, batches: int, *, gathers: bool) -> Cause:
    gathering = "; or it gathers values of other ranks without their gradients" if gathers else ""
    return Cause(
        text=f"the gradient is {count} times too small: the loss is a sum or is divided by a "
        f"constant, not by the number of its samples{gathering}",
        evidence=f"summed over {count} parts it is 1/{count} of that of one process on the full "
        f"batch, in each of {batches} batches",
        setting="the task's loss: return (sum, weight), or the mean over the samples of the batch",
        first_deviation=NAME,
    )


def _blocker(workload: Workload, reference: Reference, tolerances: Tolerances) -> str | None:
    """The reason why the parts' gradients may differ from the full batch's, or None."""
    recipe = reference.recipe
    cut = "micro-batch" if recipe.gradient_accumulation > 1 else "share"
    couples = any(isinstance(module, _BatchNorm) for module in reference.model.modules())
    if couples and not (recipe.sync_batch_norm and cut == "share"):
        return f"batch norm computes its statistics for each {cut}"
    if workload.not_additive is not None and not workload.not_additive_declared:
        return workload.not_additive
    return "this model amplifies rounding" if tolerances.exact_forward else None


def _stop_dropout(model: nn.Module) -> None:
    """Set the dropout rates of all modules to 0, by the usual names of their attributes.

    Evaluation mode would change more: cuDNN's recurrent layers have no backward pass in it, and
    some models return other values.
    """
    for module in model.modules():
        drops = any(part in type(module).__name__ for part in ("Drop", "StochasticDepth"))
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and ("drop" in name or (drops and name == "p")):
                setattr(module, name, 0.0)


def _full_pass(
    workload: Workload, model: nn.Module, batch: Batch, device: torch.device
) -> tuple[Gradients, float, dict[str, Tensor]] | None:
    """Gradient and loss of the full batch in training mode, or in evaluation mode if training draws
    random numbers or changes buffers, and buffers that it changes anyway; None if both modes draw.

    Buffers of batch norm may change, since training does not read them.  The model stays in the
    mode that was used.
    """
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm)]
    tracked = {id(buffer) for norm in norms for buffer in norm.buffers()}
    buffers = {n: b.clone() for n, b in model.named_buffers() if id(b) not in tracked}
    for training in (True, False):
        model.train(training)
        before = generator_states(device)
        loss = workload.loss(model, batch)
        if not same_states(before, generator_states(device)):
            continue
        changed = {
            n: b.clone()
            for n, b in model.named_buffers()
            if n in buffers and not torch.equal(b, buffers[n])
        }
        if training and changed:
            put_buffers(model, {**dict(model.named_buffers()), **buffers})
            continue
        (loss.total / loss.weight).backward()  # type: ignore[no-untyped-call]  # torch's
        gradients = arrays({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
        model.zero_grad(set_to_none=True)
        return gradients, float((loss.total / loss.weight).detach()), changed
    return None
