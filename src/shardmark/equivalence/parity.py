"""Holds a strategy's evidence against the reference's.  Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from shardmark.core.metrics import METRICS
from shardmark.equivalence.evidence import PARTS, Array, Evidence
from shardmark.equivalence.parity_given import draw_check, equal, rate_check, sample_check
from shardmark.results.verification import Check

MARGIN = 8.0
"""Tolerance over the largest deviation among the reference's disturbed runs."""

BLIND = 0.25
"""A tolerance beyond this part of the gradient's norm could not tell half a gradient from it."""

TINY = 1e-45
LARGEST = 1e300
"""Stands for a difference that is not finite: JSON has no infinity."""

UNIT_ROUNDOFF = {"fp32": 2.0**-24, "bf16": 2.0**-8, "fp16": 2.0**-11}
"""Half of the distance from 1 to the next larger number (IEEE 754; bfloat16 has 8 bits)."""

GIVEN = {"initial weights", "sample ids", "random draws", "learning rate"}
"""Checks on what a step is given, which come before what it computes."""

NAMES = {
    "gradient": "gradients of the first step",
    "parameters after step 1": "parameters after the first step",
    "parameters": "parameters after the last step",
    "optimizer state": "optimizer state after the last step",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerances:
    """The reference and how far rounding alone takes it."""

    reference: Evidence
    disturbed: Sequence[Evidence]
    floor: float
    """Relative difference that one rounding of a result makes."""
    exact_forward: bool = False
    """The first losses must be equal to the last bit: errors in a forward pass would hide all."""

    @property
    def hide_errors(self) -> bool:
        """Whether a gradient that is wrong by a factor of two could pass."""
        part = self.reference.tensors["gradient"]
        allowed = sum(self.array("gradient", name) ** 2 for name in part)
        return allowed > BLIND**2 * sum(norm(tensor) ** 2 for tensor in part.values())

    _allowed: dict[tuple[str, str], float] = field(default_factory=dict, init=False, repr=False)
    """What `array` found: norms of all tensors of a large model take seconds."""

    def array(self, part: str, name: str) -> float:
        """Largest allowed 2-norm of the difference of one tensor."""
        if (part, name) not in self._allowed:
            self._allowed[part, name] = self._array(part, name)
        return self._allowed[part, name]

    def _array(self, part: str, name: str) -> float:
        expected = self.reference.tensors[part][name]
        spread = max(norm(run.tensors[part][name] - expected) for run in self.disturbed)
        return MARGIN * spread + self.floor * norm(expected)

    def buffer(self, rank: int, name: str) -> float:
        expected = self.reference.buffers[rank][name]
        spread = max(norm(run.buffers[rank][name] - expected) for run in self.disturbed)
        return MARGIN * spread + self.floor * norm(expected)

    def loss(self, rank: int, step: int) -> float:
        if self.exact_forward and step == 0:
            return 0.0
        expected = self.reference.losses[rank][step]
        spread = max(abs(run.losses[rank][step] - expected) for run in self.disturbed)
        return MARGIN * spread + self.floor * abs(expected)

    def quality(self, name: str) -> float:
        """A share, as accuracy is, may differ by the one sample that a tie turns."""
        expected = self.reference.quality[name] or 0.0
        spread = max(abs((run.quality[name] or 0.0) - expected) for run in self.disturbed)
        one_sample = 1 / max(1, self.reference.samples_evaluated)
        share = name in METRICS and METRICS[name].unit == "fraction"
        rounding = one_sample if share else self.floor * abs(expected)
        return MARGIN * spread + rounding


def norm(values: Array) -> float:
    return float(np.linalg.norm(values.astype(np.float64)))


def checks_of(found: Evidence, tolerances: Tolerances) -> tuple[Check, ...]:
    """Every check, in the order in which a training makes the quantities."""
    expected = tolerances.reference
    return (
        equal(
            "initial weights",
            ", ".join(sorted({sha[:12] for sha in found.initial_sha256})),
            expected.initial_sha256[0][:12],
        ),
        sample_check(found, expected),
        draw_check(found, expected),
        rate_check(found, expected),
        _loss_check(found, tolerances),
        *(_tensor_check(part, found, tolerances) for part in PARTS),
        _buffer_check(found, tolerances),
        *_quality_checks(found, tolerances),
        equal("optimizer steps", str(found.optimizer_steps), str(expected.optimizer_steps)),
    )


def _worst(name: str, measured: Iterator[tuple[str, float, float]]) -> Check:
    """The check on the largest of (where, difference, tolerance) in units of the tolerance."""
    where, difference, tolerance, units = "nothing to compare", 0.0, 0.0, 0.0
    for place, off, allowed in measured:
        ratio = 0.0 if off == 0 else off / max(allowed, TINY)
        if not np.isfinite(ratio):
            ratio = LARGEST
        if ratio >= units:
            where, difference, tolerance, units = place, off, allowed, ratio
    return Check(
        name=name,
        holds=units <= 1,
        found=difference if np.isfinite(difference) else LARGEST,
        expected=0.0,
        tolerance=tolerance if np.isfinite(tolerance) else LARGEST,
        where=where,
        in_tolerances=units,
    )


def first_deviation(found: Evidence, checks: Sequence[Check], tolerances: Tolerances) -> Check:
    """The check that fails first in the order of the training, narrowed to the step it does so.

    The first loss comes before the first gradient, and later losses after the first update.
    """
    by_name = {check.name: check for check in checks}
    failing = [check for check in checks if not check.holds]
    losses = by_name["losses"]
    if losses.holds:
        return failing[0]
    steps = len(tolerances.reference.learning_rates)
    step = next(
        (s for s in range(steps) if not _loss_check(found, tolerances, steps=[s]).holds), steps - 1
    )
    narrowed = _loss_check(found, tolerances, steps=[step])
    if step == 0:
        given = GIVEN
        return next((c for c in failing if c.name in given), narrowed)
    before = [c for c in failing if c.name != "losses"]
    early = {"gradient", "parameters after step 1"}
    first = {NAMES[part] for part in early} | GIVEN
    return next((c for c in before if c.name in first), narrowed)


def _loss_check(
    found: Evidence, tolerances: Tolerances, *, steps: Sequence[int] | None = None
) -> Check:
    expected = tolerances.reference.losses
    return _worst(
        "losses",
        (
            (
                f"rank {rank}, step {step + 1}",
                abs(loss - expected[rank][step]),
                tolerances.loss(rank, step),
            )
            for rank, losses in enumerate(found.losses)
            for step, loss in enumerate(losses)
            if steps is None or step in steps
        ),
    )


def _tensor_check(part: str, found: Evidence, tolerances: Tolerances) -> Check:
    return _worst(
        NAMES[part],
        (
            (name, norm(difference), tolerances.array(part, name))
            for name, difference in differences(part, found, tolerances.reference)
        ),
    )


def differences(part: str, found: Evidence, expected: Evidence) -> Iterator[tuple[str, Array]]:
    """Each tensor's difference; one that a side does not have counts as zeros there."""
    mine, wanted = found.tensors.get(part, {}), expected.tensors[part]
    for name, tensor in wanted.items():
        fits = name in mine and mine[name].shape == tensor.shape
        yield name, mine[name] - tensor if fits else -tensor


def _buffer_check(found: Evidence, tolerances: Tolerances) -> Check:
    expected: Sequence[Mapping[str, Array]] = tolerances.reference.buffers
    return _worst(
        "buffers",
        (
            (
                f"rank {rank}, {name}",
                norm(buffers[name] - wanted if name in buffers else -wanted),
                tolerances.buffer(rank, name),
            )
            for rank, buffers in enumerate(found.buffers)
            for name, wanted in expected[rank].items()
        ),
    )


def _quality_checks(found: Evidence, tolerances: Tolerances) -> Iterator[Check]:
    for name, expected in tolerances.reference.quality.items():
        mine = found.quality.get(name)
        if mine is None or expected is None or not np.isfinite([mine, expected]).all():
            yield equal(f"evaluation: {name}", str(mine), str(expected))
            continue
        tolerance = tolerances.quality(name)
        units = abs(mine - expected) / max(tolerance, TINY)
        yield Check(
            name=f"evaluation: {name}",
            holds=units <= 1,
            found=mine,
            expected=expected,
            tolerance=tolerance,
            in_tolerances=units,
        )
