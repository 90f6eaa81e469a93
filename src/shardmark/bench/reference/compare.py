"""Compares the capture of a strategy's ranks with the reference, quantity by quantity."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from typing import Any

import numpy as np

from shardmark.base.metrics import METRICS
from shardmark.base.results.verification import LARGEST, Check
from shardmark.bench.reference.capture import PARTS, Array, Capture
from shardmark.ranks.strategies.step import WEIGHT_TOLERANCE

Quantity = tuple[str | int, ...]
"""Keys to a value of a capture: ("tensors", "gradient", "conv1.weight"), ("losses", rank, step)."""

MARGIN = 8.0
"""Tolerance divided by the largest deviation among the disturbed runs of the reference."""

BLIND = 0.25
"""Largest tolerance, relative to the gradient's norm, that still detects a factor of two."""

TINY = 1e-45

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
class Tolerances:
    """The expected capture, and the deviations that rounding alone causes."""

    reference: Capture
    undisturbed: Capture
    """The run as defined.  For a hypothesis `reference` is another run, with the same spreads."""
    disturbed: Sequence[Capture]
    floor: float
    """Relative deviation that one rounding of a result causes."""
    exact_forward: bool = False
    """Require bitwise equal first losses: the model amplifies rounding in its forward pass."""
    least: float = 0.0
    """Difference that always counts as equal."""
    _spreads: dict[Quantity, float] = field(default_factory=dict, init=False, repr=False)
    """Cache of `allowed`: norms of all tensors of a large model take seconds."""

    @property
    def hide_errors(self) -> bool:
        """True if a gradient that is wrong by a factor of two could pass."""
        gradient = self.reference.tensors["gradient"]
        allowed = sum(self.allowed("tensors", "gradient", name) ** 2 for name in gradient)
        return allowed > BLIND**2 * sum(norm(tensor) ** 2 for tensor in gradient.values())

    @property
    def rounding_skips(self) -> bool:
        """True if rounding alone decides which steps overflow."""
        return any(run.skipped != self.undisturbed.skipped for run in self.disturbed)

    def allowed(self, *quantity: str | int) -> float:
        """Largest difference, of tensors in the 2-norm, that counts as equal.

        A fraction of samples, such as accuracy, may differ by one sample, for ties.  A user-defined
        metric counts as a fraction if it is between 0 and 1 and no disturbance changes it: other
        metrics change in their last digits.
        """
        kind, name = quantity[0], quantity[-1]
        if self.exact_forward and kind == "losses" and name == 0:
            return 0.0
        if quantity not in self._spreads:
            runs = (run for run in self.disturbed if run.skipped == self.undisturbed.skipped)
            spreads = (difference(run, self.undisturbed, quantity) for run in runs)
            self._spreads[quantity] = max(spreads, default=0.0)
        spread, size = self._spreads[quantity], finite_norm(value_of(self.reference, quantity))
        metric = METRICS.get(str(name))
        fraction = metric.unit == "fraction" if metric else spread == 0 and 0 <= size <= 1
        if kind == "quality" and fraction:
            return MARGIN * spread + 1 / max(1, self.reference.samples_evaluated)
        return MARGIN * spread + self.floor * size + self.least


def norm(values: Array | float | None) -> float:
    """The 2-norm; 0 for a missing value."""
    return 0.0 if values is None else float(np.linalg.norm(np.asarray(values, np.float64)))


def finite_norm(values: Array | float | None) -> float:
    """The 2-norm of the finite elements: infinite ones, as in a mask, would allow any deviation."""
    array = np.asarray(0.0 if values is None else values, np.float64)
    return norm(np.where(np.isfinite(array), array, 0.0))


def deviation(actual: Any, wanted: Any) -> float:
    """The 2-norm of the difference; equal infinite elements differ by zero.

    A missing value, and one of another shape, counts as zero.
    """
    if actual is None or wanted is None or np.shape(actual) != np.shape(wanted):
        return norm(wanted)
    one, other = np.asarray(actual, np.float64), np.asarray(wanted, np.float64)
    same = (one == other) | (np.isnan(one) & np.isnan(other))
    return norm(np.subtract(one, other, out=np.zeros_like(one), where=~same))


def value_of(capture: Capture, quantity: Quantity) -> Any:
    """The tensor or number; None if the capture lacks it."""
    value: Any = getattr(capture, str(quantity[0]))
    for key in quantity[1:]:
        value = (value or {}).get(key) if isinstance(value, Mapping | None) else value[key]
    return value


def difference(capture: Capture, expected: Capture, quantity: Quantity) -> float:
    """Norm of the difference between two captures' values."""
    return deviation(value_of(capture, quantity), value_of(expected, quantity))


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


def equal(name: str, actual: str, expected: str, location: str | None = None) -> Check:
    """A check that holds if both values are equal."""
    return Check(
        name=name,
        holds=actual == expected,
        found=actual,
        expected=expected,
        tolerance=None,
        where=location,
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


def worst_of(
    name: str, quantities: Mapping[str, Quantity], capture: Capture, tolerances: Tolerances
) -> Check:
    """A check on the quantity with the largest deviation in tolerances."""
    worst, deviation, allowed, units = "nothing to compare", 0.0, 0.0, 0.0
    for location, quantity in quantities.items():
        change = difference(capture, tolerances.reference, quantity)
        tolerance = tolerances.allowed(*quantity)
        ratio = 0.0 if change == 0 else change / max(tolerance, TINY)
        if not np.isfinite(ratio):
            ratio = LARGEST
        if ratio >= units:
            worst, deviation, allowed, units = location, change, tolerance, ratio
    return Check(
        name=name,
        holds=units <= 1,
        found=deviation if np.isfinite(deviation) else LARGEST,
        expected=0.0,
        tolerance=allowed if np.isfinite(allowed) else LARGEST,
        where=worst,
        in_tolerances=units,
    )


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
