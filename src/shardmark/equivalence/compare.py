"""Compares what a strategy's ranks captured with the reference, quantity by quantity."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from shardmark.core.metrics import METRICS
from shardmark.equivalence.capture import PARTS, Array, Capture
from shardmark.results.verification import LARGEST, Check

Entry = TypeVar("Entry", tuple[int, ...], tuple[str, ...])

MARGIN = 8.0
"""Tolerance over the largest deviation among the reference's disturbed runs."""

BLIND = 0.25
"""A tolerance beyond this part of the gradient's norm could not tell half a gradient from it."""

TINY = 1e-45

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

    reference: Capture
    disturbed: Sequence[Capture]
    floor: float
    """Relative difference that one rounding of a result makes."""
    exact_forward: bool = False
    """The first losses must be equal to the last bit: errors in a forward pass would hide all."""
    _allowed: dict[tuple[str, str], float] = field(default_factory=dict, init=False, repr=False)
    """What `array` computed: norms of all tensors of a large model take seconds."""

    @property
    def hide_errors(self) -> bool:
        """Whether a gradient that is wrong by a factor of two could pass."""
        part = self.reference.tensors["gradient"]
        allowed = sum(self.array("gradient", name) ** 2 for name in part)
        return allowed > BLIND**2 * sum(norm(tensor) ** 2 for tensor in part.values())

    def array(self, part: str, name: str) -> float:
        """Largest allowed 2-norm of the difference of one tensor."""
        if (part, name) not in self._allowed:
            self._allowed[part, name] = self._of_array(lambda run: run.tensors[part][name])
        return self._allowed[part, name]

    def buffer(self, rank: int, name: str) -> float:
        return self._of_array(lambda run: run.buffers[rank][name])

    def _of_array(self, array_of: Callable[[Capture], Array]) -> float:
        expected = array_of(self.reference)
        spread = max(norm(array_of(run) - expected) for run in self.disturbed)
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


def checks_of(capture: Capture, tolerances: Tolerances) -> tuple[Check, ...]:
    """Every check, in the order in which a training makes the quantities."""
    expected = tolerances.reference
    hashes = ", ".join(sorted({sha[:12] for sha in capture.initial_sha256}))
    return (
        equal("initial weights", hashes, expected.initial_sha256[0][:12]),
        _sample_check(capture, expected),
        _draw_check(capture, expected),
        _rate_check(capture, expected),
        _loss_check(capture, tolerances),
        *(_tensor_check(part, capture, tolerances) for part in PARTS),
        _buffer_check(capture, tolerances),
        *_quality_checks(capture, tolerances),
        equal("optimizer steps", str(capture.optimizer_steps), str(expected.optimizer_steps)),
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


def first_deviation(capture: Capture, checks: Sequence[Check], tolerances: Tolerances) -> Check:
    """The check that fails first in the order of the training, narrowed to the step it does so.

    The first loss comes before the first gradient, and later losses after the first update.
    """
    failing = [check for check in checks if not check.holds]
    others = [check for check in failing if check.name != "losses"]
    if len(others) == len(failing):
        return failing[0]
    steps = range(len(tolerances.reference.learning_rates))
    by_step = (_loss_check(capture, tolerances, steps=[step]) for step in steps)
    first_loss = next(check for check in by_step if not check.holds)
    earlier = set(GIVEN)
    if first_loss.where is not None and not first_loss.where.endswith("step 1"):
        earlier |= {NAMES["gradient"], NAMES["parameters after step 1"]}
    return next((check for check in others if check.name in earlier), first_loss)


def _sample_check(capture: Capture, expected: Capture) -> Check:
    """The first step of any rank with other samples than the reference's."""
    other = _first_other(capture.sample_ids, expected.sample_ids)
    if other is not None:
        where, ids, wanted_ids = other
        return equal("sample ids", _few(ids), _few(wanted_ids), where)
    told = f"equal in {len(expected.learning_rates)} steps"
    return equal("sample ids", told, told)


def _draw_check(capture: Capture, expected: Capture) -> Check:
    """The first step of any rank with other random numbers than the reference's."""
    other = _first_other(capture.draws, expected.draws)
    if other is not None:
        where, drawn, wanted_draws = other
        new = [draw for draw in drawn if draw not in wanted_draws]
        told = f"{len(new)} other than expected" if new else f"{len(drawn)} draws"
        return equal("random draws", told, f"{len(wanted_draws)} draws", where)
    count = sum(len(drawn) for rank in expected.draws for drawn in rank)
    told = f"{count} draws are equal" if count else "the workload draws none of its own"
    return equal("random draws", told, told)


def _first_other(
    captured: Sequence[Sequence[Entry]], expected: Sequence[Sequence[Entry]]
) -> tuple[str, Entry, Entry] | None:
    """Where the first entry by rank and step differs, and both entries."""
    for rank, (mine, wanted) in enumerate(zip(captured, expected, strict=True)):
        for step, (entry, wanted_entry) in enumerate(zip(mine, wanted, strict=True)):
            if entry != wanted_entry:
                return f"rank {rank}, step {step + 1}", entry, wanted_entry
    return None


def _few(ids: Sequence[int]) -> str:
    return ", ".join(map(str, ids[:8])) + (", ..." if len(ids) > 8 else "")


def _rate_check(capture: Capture, expected: Capture) -> Check:
    """The first step with another learning rate than the reference's."""
    pairs = list(zip(capture.learning_rates, expected.learning_rates, strict=True))
    step = next((i for i, (mine, wanted) in enumerate(pairs) if mine != wanted), 0)
    mine, wanted = pairs[step]
    return equal("learning rate", repr(mine), repr(wanted), f"step {step + 1}")


def _worst(name: str, measured: Iterable[tuple[str, float, float]]) -> Check:
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


def _loss_check(
    capture: Capture, tolerances: Tolerances, *, steps: Sequence[int] | None = None
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
            for rank, losses in enumerate(capture.losses)
            for step, loss in enumerate(losses)
            if steps is None or step in steps
        ),
    )


def _tensor_check(part: str, capture: Capture, tolerances: Tolerances) -> Check:
    """A tensor that the strategy does not have counts as zeros."""
    mine, expected = capture.tensors.get(part, {}), tolerances.reference.tensors[part]
    return _worst(
        NAMES[part],
        (
            (name, _distance(mine.get(name), tensor), tolerances.array(part, name))
            for name, tensor in expected.items()
        ),
    )


def _buffer_check(capture: Capture, tolerances: Tolerances) -> Check:
    expected = tolerances.reference.buffers
    return _worst(
        "buffers",
        (
            (
                f"rank {rank}, {name}",
                _distance(buffers.get(name), wanted),
                tolerances.buffer(rank, name),
            )
            for rank, buffers in enumerate(capture.buffers)
            for name, wanted in expected[rank].items()
        ),
    )


def _distance(array: Array | None, expected: Array) -> float:
    fits = array is not None and array.shape == expected.shape
    return norm(array - expected if array is not None and fits else -expected)


def _quality_checks(capture: Capture, tolerances: Tolerances) -> Iterator[Check]:
    for name, expected in tolerances.reference.quality.items():
        mine = capture.quality.get(name)
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
