"""Compares the capture of a strategy's ranks with the reference, quantity by quantity."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any

import numpy as np

from shardmark.base.evidence.captures import (
    MARGIN,
    PARTS,
    TINY,
    Capture,
    Tolerances,
    equal,
    finite_norm,
    value_of,
    worst_of,
)
from shardmark.base.evidence.checks import Check
from shardmark.base.metrics import METRICS
from shardmark.ranks.strategies.step import WEIGHT_TOLERANCE

SKIPPED = "skipped steps"

DATA_SET = "data set"

INPUT_CHECKS = {
    "initial weights",
    DATA_SET,
    "sample ids",
    "sample weights",
    "random draws",
    "learning rate",
}
"""Checks on the inputs of a step, which come before the checks on its results."""

NAMES = {
    "gradient": "gradients of the first update",
    "parameters after the first update": "parameters after the first update",
    "parameters": "parameters after the last step",
    "optimizer state": "optimizer state after the last step",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class QualityTolerances(Tolerances):
    """Tolerances that know metrics of quality as well."""

    def allowed(self, *quantity: str | int) -> float:
        """Largest difference that counts as equal.

        A fraction of samples, such as accuracy, may differ by one sample, for ties.  A user-defined
        metric counts as a fraction if it is between 0 and 1 and no perturbation changes it: other
        metrics change in their last digits.
        """
        if quantity[0] == "quality":
            spread, metric = self.spread(quantity), METRICS.get(str(quantity[-1]))
            size = finite_norm(value_of(self.reference, quantity))
            if metric.unit == "fraction" if metric else spread == 0 and 0 <= size <= 1:
                return MARGIN * spread + 1 / max(1, self.reference.samples_evaluated)
        return Tolerances.allowed(self, *quantity)  # `super()` does not work with slots


def nonfinite_step(capture: Capture) -> tuple[int, int, float] | None:
    """Find the first step, from 0, with a loss that is not finite; returns step, rank and loss.

    Ranks of asynchronous strategies take different numbers of steps.
    """
    nonfinite = [
        (step, rank, loss)
        for rank, losses in enumerate(capture.losses)
        for step, loss in enumerate(losses)
        if not math.isfinite(loss)
    ]
    return min(nonfinite, default=None, key=itemgetter(0, 1))


def checks_of(capture: Capture, tolerances: Tolerances) -> tuple[Check, ...]:
    """Compute the checks, in the order in which a training computes the quantities."""
    expected = tolerances.reference
    hashes = ", ".join(sorted({sha[:12] for sha in capture.initial_sha256}))
    buffers = {
        f"rank {rank}, {name}": ("buffers", rank, name)
        for rank in range(len(capture.buffers))
        for name in expected.buffers[rank]
    }
    return (
        equal("initial weights", hashes, expected.initial_sha256[0][:12]),
        *_input_checks(capture, expected),
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


def failed(name: str, actual: str, expected: str, location: str) -> Check:
    """A failed check, even if the texts of both values are equal."""
    return equal(name, actual, expected, location).model_copy(update={"holds": False})


def first_deviation(capture: Capture, checks: Sequence[Check], tolerances: Tolerances) -> Check:
    """The check that fails first in the order of the training, for losses narrowed to a step.

    The first loss comes before the first gradient, and later losses come after the first update.
    """
    failing = [check for check in checks if not check.holds]
    others = [check for check in failing if check.name != "losses"]
    if len(others) == len(failing):
        return failing[0]
    steps = range(len(tolerances.reference.learning_rates))
    by_step = (_loss_check(capture, tolerances, [step]) for step in steps)
    first_loss = next(check for check in by_step if not check.holds)
    earlier = set(INPUT_CHECKS)
    if first_loss.where is not None and not first_loss.where.endswith("step 1"):
        earlier |= {SKIPPED, NAMES["gradient"], NAMES["parameters after the first update"]}
    return next((check for check in others if check.name in earlier), first_loss)


def _input_checks(capture: Capture, expected: Capture) -> Iterator[Check]:
    """Check the inputs of each rank and step; a failed check names the first difference."""
    steps = f"equal in {len(expected.learning_rates)} steps"
    close = partial(math.isclose, rel_tol=WEIGHT_TOLERANCE if capture.weight_source else 1e-9)
    for rank, (actual_size, size) in enumerate(
        zip(capture.data_set, expected.data_set, strict=True)
    ):
        if actual_size != size:
            yield failed(DATA_SET, actual_size, size, f"rank {rank}")
            break
    num_draws = sum(len(draws) for rank in expected.draws for draws in rank)
    actual, wanted = (
        {
            "sample ids": source.sample_ids,
            "sample weights": source.weights,
            "random draws": source.draws,
            "learning rate": (source.learning_rates,),
        }
        for source in (capture, expected)
    )
    for name, ranks in wanted.items():
        weights = name == "sample weights"
        deviation = _first_difference(actual[name], ranks, close if weights else operator.eq)
        if deviation is not None:
            yield failed(name, *deviation)
        elif name != "random draws":
            source = f": {capture.weight_source}" if weights and capture.weight_source else ""
            yield equal(name, steps + source, steps + source)
        elif num_draws:  # without recorded draws, such as dropout's, the losses show differences
            draws = f"{num_draws} draws are equal"
            yield equal(name, draws, draws)


def _first_difference(
    captured: Sequence[Sequence[Any]],
    expected: Sequence[Sequence[Any]],
    same: Callable[[Any, Any], bool],
) -> tuple[str, str, str] | None:
    """Text of both entries that differ first by rank and step, and their location."""
    for rank, (entries, wanted_entries) in enumerate(zip(captured, expected, strict=True)):
        for step, (entry, wanted) in enumerate(zip(entries, wanted_entries, strict=True)):
            if not same(entry, wanted):
                return *_described(entry, wanted), f"rank {rank}, step {step + 1}"
    return None


def _described(entry: Any, wanted: Any) -> tuple[str, str]:
    """Describe two different entries: numbers, ids that the other lacks, or numbers of draws."""
    if not isinstance(entry, tuple):
        return repr(entry), repr(wanted)
    unexpected, missing = (
        [item for item in items if item not in others] or [*items]
        for items, others in ((entry, wanted), (wanted, entry))
    )
    if any(isinstance(draw, str) for draw in (*entry, *wanted)):
        return f"{len(unexpected)} of {len(entry)} draws differ", f"{len(wanted)} draws"
    return _first_ids(unexpected), _first_ids(missing)


def _first_ids(ids: Sequence[Any]) -> str:
    return ", ".join(map(str, ids[:8])) + (", ..." if len(ids) > 8 else "")


def _skip_check(capture: Capture, expected: Capture) -> Check:
    """Check that every rank skips the same steps as the reference."""
    for rank, (actual, wanted) in enumerate(zip(capture.skipped, expected.skipped, strict=True)):
        if actual != wanted:
            return equal(SKIPPED, step_numbers(actual), step_numbers(wanted), f"rank {rank}")
    return equal(SKIPPED, *[step_numbers(expected.skipped[0])] * 2)


def step_numbers(steps: Sequence[int]) -> str:
    """Text with the numbers of the steps, from 1."""
    return ", ".join(str(step + 1) for step in steps) or "none"


def _loss_check(capture: Capture, tolerances: Tolerances, steps: Sequence[int]) -> Check:
    losses = {
        f"rank {rank}, step {step + 1}": ("losses", rank, step)
        for rank in range(len(capture.losses))
        for step in steps
    }
    return worst_of("losses", losses, capture, tolerances)


def _quality_checks(capture: Capture, tolerances: Tolerances) -> Iterator[Check]:
    for name, expected in tolerances.reference.quality.items():
        actual = capture.quality.get(name)
        if actual is None or expected is None or not np.isfinite([actual, expected]).all():
            yield equal(f"evaluation: {name}", str(actual), str(expected))
            continue
        tolerance = tolerances.allowed("quality", name)
        units = abs(actual - expected) / max(tolerance, TINY)
        yield Check(
            name=f"evaluation: {name}",
            holds=units <= 1,
            found=actual,
            expected=expected,
            tolerance=tolerance,
            in_tolerances=units,
        )
