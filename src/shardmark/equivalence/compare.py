"""Compares what a strategy's ranks captured with the reference, quantity by quantity."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from shardmark.core.metrics import METRICS
from shardmark.equivalence.capture import PARTS, Array, Capture
from shardmark.results.verification import LARGEST, Check
from shardmark.strategies.step import WEIGHT_TOLERANCE

Quantity = tuple[str | int, ...]
"""Where a capture has it: ("tensors", "gradient", "conv1.weight"), ("losses", share, step), ..."""

MARGIN = 8.0
"""Tolerance over the largest deviation among the reference's disturbed runs."""

BLIND = 0.25
"""A tolerance beyond this part of the gradient's norm could not tell half a gradient from it."""

TINY = 1e-45

SKIPPED = "skipped steps"

GIVEN = {"initial weights", "sample ids", "sample weights", "random draws", "learning rate"}
"""Checks on what a step is given, which come before what it computes."""

NAMES = {
    "gradient": "gradients of the first update",
    "parameters after the first update": "parameters after the first update",
    "parameters": "parameters after the last step",
    "optimizer state": "optimizer state after the last step",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerances:
    """What is expected, and how far rounding alone takes a training from it."""

    reference: Capture
    undisturbed: Capture
    """The definition's run; a hypothesis has another reference and the same spread."""
    disturbed: Sequence[Capture]
    floor: float
    """Relative difference that one rounding of a result makes."""
    exact_forward: bool = False
    """The first losses must be equal to the last bit: errors in a forward pass would hide all."""
    _spreads: dict[Quantity, float] = field(default_factory=dict, init=False, repr=False)
    """What `of` computed: norms of all tensors of a large model take seconds."""

    @property
    def hide_errors(self) -> bool:
        """Whether a gradient that is wrong by a factor of two could pass."""
        part = self.reference.tensors["gradient"]
        allowed = sum(self.of("tensors", "gradient", name) ** 2 for name in part)
        return allowed > BLIND**2 * sum(norm(tensor) ** 2 for tensor in part.values())

    @property
    def rounding_skips(self) -> bool:
        """Whether rounding alone decides which steps overflow."""
        return any(run.skipped != self.undisturbed.skipped for run in self.disturbed)

    def of(self, *quantity: str | int) -> float:
        """The largest difference, of a tensor in the 2-norm, that counts as equal.

        A share, as accuracy is, may differ by the one sample that a tie turns.  A metric of the
        user's own is taken for one where it is between 0 and 1 and no disturbance moves it: what is
        no count changes in its last digits.
        """
        kind, name = quantity[0], quantity[-1]
        if self.exact_forward and kind == "losses" and name == 0:
            return 0.0
        if quantity not in self._spreads:
            alike = [run for run in self.disturbed if run.skipped == self.undisturbed.skipped]
            spreads = (difference(run, self.undisturbed, quantity) for run in alike)
            self._spreads[quantity] = max(spreads, default=0.0)
        spread, size = self._spreads[quantity], norm(value_of(self.reference, quantity))
        known = METRICS.get(str(name))
        share = known.unit == "fraction" if known else spread == 0 and 0 <= size <= 1
        if kind == "quality" and share:
            return MARGIN * spread + 1 / max(1, self.reference.samples_evaluated)
        return MARGIN * spread + self.floor * size


def norm(values: Array | float | None) -> float:
    """The 2-norm; 0 for what is missing."""
    return 0.0 if values is None else float(np.linalg.norm(np.asarray(values, np.float64)))


def value_of(capture: Capture, quantity: Quantity) -> Any:
    """A tensor or a number; None where the capture has no such."""
    value: Any = getattr(capture, str(quantity[0]))
    for key in quantity[1:]:
        value = (value or {}).get(key) if isinstance(value, Mapping | None) else value[key]
    return value


def difference(capture: Capture, expected: Capture, quantity: Quantity) -> float:
    """The norm of the difference; what the capture lacks counts as zeros."""
    mine, wanted = value_of(capture, quantity), value_of(expected, quantity)
    fits = mine is not None and np.shape(mine) == np.shape(wanted)
    return norm(mine - wanted if fits and wanted is not None else wanted)


def nonfinite_step(capture: Capture) -> tuple[int, int, float] | None:
    """First step, from 0 on, whose loss is not finite; its rank, and the loss.

    Ranks of asynchronous strategies take different numbers of steps.
    """
    bad = [
        (step, rank, loss)
        for rank, losses in enumerate(capture.losses)
        for step, loss in enumerate(losses)
        if not math.isfinite(loss)
    ]
    return min(bad, default=None, key=lambda found: found[:2])


def checks_of(capture: Capture, tolerances: Tolerances) -> tuple[Check, ...]:
    """Every check, in the order in which a training makes the quantities."""
    expected = tolerances.reference
    hashes = ", ".join(sorted({sha[:12] for sha in capture.initial_sha256}))
    buffers = {
        f"rank {rank}, {name}": ("buffers", rank, name)
        for rank in range(len(capture.buffers))
        for name in expected.buffers[rank]
    }
    return (
        equal("initial weights", hashes, expected.initial_sha256[0][:12]),
        *_given_checks(capture, expected),
        _loss_check(capture, tolerances, range(len(expected.learning_rates))),
        _skip_check(capture, expected),
        *(
            worst_of(
                NAMES[part],
                {name: ("tensors", part, name) for name in expected.tensors[part]},
                capture,
                tolerances,
            )
            for part in PARTS
        ),
        worst_of("buffers", buffers, capture, tolerances),
        *_quality_checks(capture, tolerances),
    )


def equal(name: str, found: str, expected: str, where: str | None = None) -> Check:
    """A check that only equality passes."""
    return Check(
        name=name,
        holds=found == expected,
        found=found,
        expected=expected,
        tolerance=None,
        where=where,
    )


def unequal(name: str, found: str, expected: str, where: str) -> Check:
    """A check that has failed, though what is told of both may read alike."""
    return equal(name, found, expected, where).model_copy(update={"holds": False})


def first_deviation(capture: Capture, checks: Sequence[Check], tolerances: Tolerances) -> Check:
    """The check that fails first in the order of the training, narrowed to the step it does so.

    The first loss comes before the first gradient, and later losses after the first update.
    """
    failing = [check for check in checks if not check.holds]
    others = [check for check in failing if check.name != "losses"]
    if len(others) == len(failing):
        return failing[0]
    steps = range(len(tolerances.reference.learning_rates))
    by_step = (_loss_check(capture, tolerances, [step]) for step in steps)
    first_loss = next(check for check in by_step if not check.holds)
    earlier = set(GIVEN)
    if first_loss.where is not None and not first_loss.where.endswith("step 1"):
        earlier |= {SKIPPED, NAMES["gradient"], NAMES["parameters after the first update"]}
    return next((check for check in others if check.name in earlier), first_loss)


def _given_checks(capture: Capture, expected: Capture) -> Iterator[Check]:
    """What each rank was given in each step: the first that is other than the reference's."""
    steps = f"equal in {len(expected.learning_rates)} steps"
    close = partial(math.isclose, rel_tol=WEIGHT_TOLERANCE if capture.weights_told else 1e-9)
    drawn = sum(len(draws) for rank in expected.draws for draws in rank)
    mine, wanted = (
        {
            "sample ids": given.sample_ids,
            "sample weights": given.weights,
            "random draws": given.draws,
            "learning rate": (given.learning_rates,),
        }
        for given in (capture, expected)
    )
    for name, ranks in wanted.items():
        weights = name == "sample weights"
        other = _first_other(mine[name], ranks, close if weights else operator.eq)
        if other is not None:
            yield unequal(name, *other)
        elif name != "random draws":
            told = f"{steps}: {capture.weights_told}" if weights and capture.weights_told else steps
            yield equal(name, told, told)
        elif drawn:  # else the model alone draws, as dropout does: the losses show it
            draws = f"{drawn} draws are equal"
            yield equal(name, draws, draws)


def _first_other(
    captured: Sequence[Sequence[Any]],
    expected: Sequence[Sequence[Any]],
    same: Callable[[Any, Any], bool],
) -> tuple[str, str, str] | None:
    """Both entries where the first by rank and step differs, and where."""
    for rank, (mine, wanted) in enumerate(zip(captured, expected, strict=True)):
        for step, (entry, wanted_entry) in enumerate(zip(mine, wanted, strict=True)):
            if not same(entry, wanted_entry):
                return *_told(entry, wanted_entry), f"rank {rank}, step {step + 1}"
    return None


def _told(entry: Any, wanted: Any) -> tuple[str, str]:
    """Both as text: numbers, the ids that the other has not, or how many draws are other."""
    if not isinstance(entry, tuple):
        return repr(entry), repr(wanted)
    new, lacking = (
        [each for each in mine if each not in other] or [*mine]
        for mine, other in ((entry, wanted), (wanted, entry))
    )
    if any(isinstance(draw, str) for draw in (*entry, *wanted)):
        return f"{len(new)} of {len(entry)} draws are other", f"{len(wanted)} draws"
    mine, theirs = (
        ", ".join(map(str, ids[:8])) + (", ..." if len(ids) > 8 else "") for ids in (new, lacking)
    )
    return mine, theirs


def _skip_check(capture: Capture, expected: Capture) -> Check:
    """The first rank that skips other steps than the reference."""
    pairs = zip(capture.skipped, expected.skipped, strict=True)
    other = ((f"rank {rank}", *pair) for rank, pair in enumerate(pairs) if pair[0] != pair[1])
    where, mine, wanted = next(other, (None, expected.skipped[0], expected.skipped[0]))
    return equal(SKIPPED, steps_told(mine), steps_told(wanted), where)


def steps_told(steps: Sequence[int]) -> str:
    """Their numbers, from 1 on."""
    return ", ".join(str(step + 1) for step in steps) or "none"


def _loss_check(capture: Capture, tolerances: Tolerances, steps: Sequence[int]) -> Check:
    losses = {
        f"rank {rank}, step {step + 1}": ("losses", rank, step)
        for rank in range(len(capture.losses))
        for step in steps
    }
    return worst_of("losses", losses, capture, tolerances)


def worst_of(
    name: str, quantities: Mapping[str, Quantity], capture: Capture, tolerances: Tolerances
) -> Check:
    """The check on that quantity which is off by most tolerances."""
    where, off, allowed, units = "nothing to compare", 0.0, 0.0, 0.0
    for place, quantity in quantities.items():
        differs = difference(capture, tolerances.reference, quantity)
        tolerance = tolerances.of(*quantity)
        ratio = 0.0 if differs == 0 else differs / max(tolerance, TINY)
        if not np.isfinite(ratio):
            ratio = LARGEST
        if ratio >= units:
            where, off, allowed, units = place, differs, tolerance, ratio
    return Check(
        name=name,
        holds=units <= 1,
        found=off if np.isfinite(off) else LARGEST,
        expected=0.0,
        tolerance=allowed if np.isfinite(allowed) else LARGEST,
        where=where,
        in_tolerances=units,
    )


def _quality_checks(capture: Capture, tolerances: Tolerances) -> Iterator[Check]:
    for name, expected in tolerances.reference.quality.items():
        mine = capture.quality.get(name)
        if mine is None or expected is None or not np.isfinite([mine, expected]).all():
            yield equal(f"evaluation: {name}", str(mine), str(expected))
            continue
        tolerance = tolerances.of("quality", name)
        units = abs(mine - expected) / max(tolerance, TINY)
        yield Check(
            name=f"evaluation: {name}",
            holds=units <= 1,
            found=mine,
            expected=expected,
            tolerance=tolerance,
            in_tolerances=units,
        )
