"""Checks that a task computes the same values when it is run again."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch
import torch.utils._pytree as pytree  # torch has no public one

from shardmark.base.evidence.captures import BLIND
from shardmark.base.layout import Shard
from shardmark.base.results.verification import Cause
from shardmark.bench.reference.compare import nonfinite_step
from shardmark.bench.reference.reference import Reference
from shardmark.ranks.train.exchanged_group import world_of

if TYPE_CHECKING:
    from shardmark.base.evidence.captures import Tolerances
    from shardmark.bench.reference.reference import ReferenceRuns

COUNTERS = (
    "a loss that depends on the step takes it as loss(model, batch, step); keep other state in a "
    "buffer of the model, which belongs to a rank"
)
"""Remedy for a counter or a hidden state in an attribute of the task or the model."""

SAME_ON_CPU = 1e-6
"""Largest relative difference of equal runs on a CPU, whose kernels add in a fixed order."""
LATER_STEPS = 1000.0
"""Factor on the floor for later steps, since training amplifies differences of rounding."""


def unrepeatable_cause(runs: ReferenceRuns, tolerances: Tolerances) -> Cause | None:
    """Compare the losses of two equal runs; returns a cause if they differ, else None."""
    first, again = tolerances.unperturbed, tolerances.perturbed[0]
    if nonfinite_step(first) is not None:
        return None
    for step in range(len(first.learning_rates)):
        first_floor = SAME_ON_CPU if runs.device.type == "cpu" else tolerances.floor
        allowed = min(first_floor * (1.0 if step == 0 else LATER_STEPS), BLIND)
        for losses, other_losses in zip(first.losses, again.losses, strict=True):
            loss, other = losses[step], other_losses[step]
            if not abs(loss - other) <= allowed * abs(loss):
                return Cause(
                    text="undecided: the task computes other values when it is run again",
                    evidence=f"two equal runs in one process have the losses {loss:.6g} and "
                    f"{other:.6g} in step {step + 1}; {_origin(runs)}",
                    setting="the task: draw from torch, numpy or random, which are seeded before "
                    f"each sample and each step, and keep no state between reads; {COUNTERS}",
                    first_deviation="losses",
                )
    return None


STATEFUL = Cause(
    text="undecided: the model or the loss keeps state outside of buffers",
    evidence="a batch has two losses when it is passed twice with equal weights, buffers and seeds:"
    " the loss depends on the batches before it, and the reference passes others",
    setting=f"the task: {COUNTERS}; draw from the generators of torch, numpy or random",
    first_deviation="losses",
)


def keeps_state(runs: ReferenceRuns, tolerances: Tolerances) -> bool:
    """Pass a batch twice; true if its loss depends on what was passed before it.

    Parameters, buffers and the seeded generators are equal in both passes, but a counter, a queue
    or a random generator of the model is not.
    """
    reference = Reference(
        runs.workload,
        runs.trial.recipe,
        shares=runs.shares,
        plan=runs.plan,
        total_steps=1,
        device=runs.device,
        communicates=runs.communicates,
    )
    buffers = [dict(of_rank) for of_rank in reference.all_buffers]
    losses = []
    for _ in range(2):
        reference.restart(buffers)
        with world_of(reference.players):
            losses.append([float(loss) for loss in reference.compute_gradients()])
    allowed = tolerances.floor
    return any(abs(a - b) > allowed * abs(a) for a, b in zip(*losses, strict=True))


def _origin(runs: ReferenceRuns) -> str:
    """Read the first batch twice to find out if the data set or the model differs."""
    shard = Shard(index=0, count=1)
    first, again = (_leaves(next(runs.workload.batches(runs.plan, shard))) for _ in range(2))
    if not all(map(_same, first, again)):
        return (
            "samples differ when they are read twice: the data set has its own random generator, "
            "or keeps state between reads"
        )
    return (
        "samples are equal when they are read twice: the model or the loss has its own random "
        "generator or keeps state, or the data set did so earlier"
    )


def _leaves(batch: Any) -> list[Any]:
    return pytree.tree_leaves({field.name: getattr(batch, field.name) for field in fields(batch)})


def _same(value: Any, other: Any) -> bool:
    """True if two values of a batch are equal, or of an unknown type."""
    if isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(value, other)
    plain = isinstance(value, int | float | str | bytes)
    return not plain or bool(value == other)
