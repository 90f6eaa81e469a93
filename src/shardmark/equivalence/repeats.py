"""Tells whether a task gives the same values when it is run again, and what differs if not."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch
import torch.utils._pytree as pytree  # torch has no public one

from shardmark.core.shares import Shard
from shardmark.equivalence.compare import BLIND, nonfinite_step
from shardmark.equivalence.reference import Reference
from shardmark.results.verification import Cause
from shardmark.train.exchanged_group import world_of

if TYPE_CHECKING:
    from shardmark.equivalence.compare import Tolerances
    from shardmark.equivalence.reference import ReferenceRuns

SAME_ON_CPU = 1e-6
"""Relative difference of two equal runs on a CPU, whose kernels add in a fixed order, at most."""
LATER_STEPS = 1000.0
"""Factor of the floor for later steps: training amplifies sums that kernels add in any order."""


def unrepeatable_cause(runs: ReferenceRuns, tolerances: Tolerances) -> Cause | None:
    """Return why nothing can be told of a task that differs from itself; None if it repeats.

    Compares the losses of two undisturbed runs of the reference.
    """
    first, again = tolerances.undisturbed, tolerances.disturbed[0]
    if nonfinite_step(first) is not None:
        return None
    for step in range(len(first.learning_rates)):
        first_floor = SAME_ON_CPU if runs.device.type == "cpu" else tolerances.floor
        allowed = min(first_floor * (1.0 if step == 0 else LATER_STEPS), BLIND)
        for mine, theirs in zip(first.losses, again.losses, strict=True):
            if not abs(mine[step] - theirs[step]) <= allowed * abs(mine[step]):
                return Cause(
                    text="cannot be told: the task gives other values when it is run again",
                    evidence=f"two equal runs in one process have the losses {mine[step]:.6g} and "
                    f"{theirs[step]:.6g} in step {step + 1}; {_origin(runs)}",
                    setting="the task: draw from torch, numpy or random, which are seeded before "
                    "each sample and each step, and keep no state between reads",
                    first_deviation="losses",
                )
    return None


STATEFUL = Cause(
    text="cannot be told: the model or the loss keeps state of its own",
    evidence="passed twice with equal weights, buffers and seeds, a batch has two losses: "
    "what passed before decides, and one process that plays the ranks passes more",
    setting="the task: keep state in buffers; draw from the generators of torch, numpy or random",
    first_deviation="losses",
)


def keeps_state(runs: ReferenceRuns, tolerances: Tolerances) -> bool:
    """Return whether the loss of a batch depends on what was passed before it.

    Parameters, buffers and the seeded generators are the same in both passes: a counter, a queue or
    a random generator of the model's own is not.
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
        reference.begin_again(buffers)
        with world_of(reference.players):
            losses.append([float(loss) for loss in reference.pass_shares()])
    allowed = tolerances.floor
    return any(abs(a - b) > allowed * abs(a) for a, b in zip(*losses, strict=True))


def _origin(runs: ReferenceRuns) -> str:
    """Reads the first batch twice to tell the data set from the model."""
    shard = Shard(index=0, count=1)
    first, again = (_leaves(next(runs.workload.batches(runs.plan, shard))) for _ in range(2))
    if not all(map(_same, first, again)):
        return (
            "samples differ when they are read twice: the data set has a random generator of its "
            "own, or keeps state between reads"
        )
    return (
        "samples are the same when they are read twice: the model or the loss has a random "
        "generator of its own or keeps state, or the data set did so earlier"
    )


def _leaves(batch: Any) -> list[Any]:
    return pytree.tree_leaves({field.name: getattr(batch, field.name) for field in fields(batch)})


def _same(mine: Any, other: Any) -> bool:
    """Return whether two values of a batch are equal; values of unknown types are taken for it."""
    if isinstance(mine, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(mine, other)
    plain = isinstance(mine, int | float | str | bytes)
    return not plain or bool(mine == other)
