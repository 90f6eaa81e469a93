"""Makes a profile of two traced steps of different numbers of samples."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, get_args

import numpy as np

from shardmark.base.errors import InputError
from shardmark.base.traffic import ModelSize, frozen_element_bytes, matrix_shapes
from shardmark.predict.profile import Amount, Kind, Moment, Operation, Profile, Shapes, Unit
from shardmark.predict.trace.chains import Total, Work
from shardmark.predict.trace.step_trace import StepTrace
from shardmark.predict.trace.unit_trace import Moments, Pass, UnitTrace


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoSteps:
    """Two traced steps, and sizes of their model before layers were removed."""

    samples: tuple[int, int]
    first: StepTrace
    second: StepTrace
    trained_shapes: Shapes
    buffer_bytes: int
    limited: tuple[str, ...]

    def profile(self) -> Profile:
        """Return the profile without its optimizer; every amount is the line through both steps.

        Raises `InputError` if the steps used different units.
        """
        first, second = self.first, self.second
        names, second_names = ([unit.name for unit in step.units] for step in (first, second))
        if names != second_names:
            name = next(a or b for a, b in zip_longest(names, second_names) if a != b)
            message = f"two steps with the same seed use different parts of it: {name}"
            allowed = "draw from torch's, numpy's or random's generators"
            raise InputError("the model", message, allowed)
        line = _Line(*self.samples)
        units = tuple(_unit(a, b, line) for a, b in zip(first.units, second.units, strict=True))
        gathered = {unit.name if unit.block else "" for unit in units if unit.parameters}
        return Profile(
            units=units,
            size=ModelSize(
                parameters=sum(unit.parameters for unit in units),
                trained_parameters=sum(unit.trained_parameters for unit in units),
                trained_matrices=matrix_shapes(
                    shape for shape, _, count in self.trained_shapes for _ in range(count)
                ),
                frozen_element_bytes=frozen_element_bytes(
                    parameter for unit in first.units for parameter in unit.parameters
                ),
                mixed_parameters=_mixed_parameters(units),
                units=max(1, len(gathered)),
            ),
            buffer_bytes=self.buffer_bytes,
            batch_bytes=line(first.batch_bytes, second.batch_bytes),
            trained_shapes=self.trained_shapes,
            unused=tuple(dict.fromkeys(first.block_names) - dict.fromkeys(names).keys()),
            limited=self.limited,
        )


@dataclass(frozen=True, slots=True)
class _Line:
    """The line through a total at two numbers of samples."""

    first_samples: int
    second_samples: int
    operations: dict[tuple[int, int, Pass], tuple[Operation, ...]] = field(default_factory=dict)
    """Operations, and positions of the largest moments, of layers that share their operations."""
    largest: dict[tuple[int, int, Pass], list[int]] = field(default_factory=dict)

    def __call__(self, first: Total, second: Total) -> Amount:
        slope = self._slope(first.total, second.total)
        return Amount(
            fixed=first.total - slope * self.first_samples,
            per_sample=slope,
            replicated_fraction=second.replicated / second.total if second.total else 0.0,
        )

    def values(self, first: Moments, second: Moments) -> Moments:
        """Return the numbers of the amounts for many totals, each with its replicated part."""
        (one, _), (other, replicated) = first.T, second.T
        slope = self._slope(one, other)
        share = np.divide(replicated, other, out=np.zeros_like(other), where=other != 0)
        return np.column_stack([one - slope * self.first_samples, slope, share])

    def _slope(self, one: Any, other: Any) -> Any:
        more = self.second_samples - self.first_samples
        return (other - one) / more if more else one / self.first_samples


def _unit(first: UnitTrace, second: UnitTrace, line: _Line) -> Unit:
    trained = [parameter for parameter in first.parameters if parameter.requires_grad]
    return Unit(
        name=first.name,
        parameters=sum(p.numel() for p in first.parameters),
        trained_parameters=sum(p.numel() for p in trained),
        frozen_element_bytes=frozen_element_bytes(first.parameters),
        replicated_fraction=first.replicated_fraction,
        gradient_bytes=first.gradient_bytes,
        sizes=tuple(p.numel() for p in trained),
        block=first.block,
        forward=_operations(first, second, "forward", line),
        repeated=_operations(first, second, "repeated", line),
        backward=_operations(first, second, "backward", line),
        begun_bytes=line(first.begun_bytes, second.begun_bytes),
        entered_bytes=line(first.entered_bytes, second.entered_bytes),
        reduced_bytes=line(first.reduced_bytes, second.reduced_bytes),
        saved_bytes=line(first.saved_bytes, second.saved_bytes),
        forward_moments=_moments(first, second, "forward", line),
        backward_moments=_moments(first, second, "backward", line),
        gradient_moments=_moments(first, second, "gradient", line),
    )


def _mixed_parameters(units: Iterable[Unit]) -> int:
    """Return the number of parameters in gathered units with any trained parameter.

    Layers between blocks are one unit.
    """
    gathered: dict[str, list[Unit]] = defaultdict(list)
    for unit in units:
        gathered[unit.name if unit.block else ""].append(unit)
    mixed = (part for part in gathered.values() if any(unit.trained_parameters for unit in part))
    return sum(unit.parameters for part in mixed for unit in part)


def _operations(
    first: UnitTrace, second: UnitTrace, in_pass: Pass, line: _Line
) -> tuple[Operation, ...]:
    """Return the operations of a pass; those with the same numbers are one, with their sums.

    If the two steps ran unlike operations, those of a kind are one.
    """
    key = (id(first.operations), id(second.operations), in_pass)
    if key in line.operations:
        return line.operations[key]
    works = [step.operations[in_pass] for step in (first, second)]
    if [work.kind for work in works[0]] != [work.kind for work in works[1]]:
        works = [_sums(of_step) for of_step in works]
    counts = Counter(
        (b.kind, line(a.flops, b.flops), line(a.bytes, b.bytes), max(a.calls, b.calls))
        for a, b in zip(*works, strict=True)
        if a.calls or b.calls
    )
    line.operations[key] = tuple(
        Operation(
            kind=kind, flops=flops.times(count), bytes=moved.times(count), calls=count * calls
        )
        for (kind, flops, moved, calls), count in counts.items()
    )
    return line.operations[key]


def _sums(works: Iterable[Work]) -> list[Work]:
    """Return one record for each kind that a trace has: `in_fp8` makes products in 8 bits."""
    sums = {kind: Work(kind, calls=0) for kind in get_args(Kind) if kind != "fp8_product"}
    for work in works:
        total = sums[work.kind]
        total.flops = total.flops.plus(*work.flops)
        total.bytes = total.bytes.plus(*work.bytes)
        total.calls += work.calls
    return [*sums.values()]


def _moments(first: UnitTrace, second: UnitTrace, in_pass: Pass, line: _Line) -> tuple[Moment, ...]:
    """Return the moments that can have the most live bytes at some number of samples.

    If the two steps ran unlike numbers of operations, it is the largest moment of each.
    """
    one, other = (step.moment_arrays.get(in_pass, np.zeros((0, 3))) for step in (first, second))
    if len(one) != len(other):
        one, other = (
            np.array([max(a.tolist() or b.tolist())]) for a, b in ((one, other), (other, one))
        )
    key = (id(first.operations), id(second.operations), in_pass)
    # Where a fraction is replicated, that of all bytes varies from layer to layer.
    positions = None if other[:, 1].any() else line.largest.get(key)
    if positions is not None:
        one, other = one[positions], other[positions]
    points = np.column_stack([line.values(one[:, :2], other[:, :2]), other[:, 2]])
    if positions is None:
        line.largest[key] = _largest(points)
        points = points[line.largest[key]]
    moments = points.tolist()
    return tuple(
        Moment(
            bytes=Amount(fixed=fixed, per_sample=per_sample, replicated_fraction=replicated),
            gradient_bytes=gradients,
        )
        for fixed, per_sample, replicated, gradients in moments
    )


def _largest(points: Moments) -> list[int]:
    """Return the positions of the points that no other point exceeds or equals in every number."""
    left, positions = points, np.arange(len(points))
    front = []
    while len(left):
        at = left.sum(axis=1).argmax()  # nothing exceeds it
        front.append(int(positions[at]))
        larger = (left > left[at]).any(axis=1)
        left, positions = left[larger], positions[larger]
    return sorted(front)
