"""Gradient memory of a rank while ZeRO's second stage reduces gradients in buckets."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shardmark.ranks.costs.base import UnitSize


@dataclass(frozen=True, slots=True)
class BucketState:
    """Gradient elements that a rank allocates with one unit, in the order of the model."""

    during: float = 0.0
    """Elements in the unit's backward pass: those that it is the first to retain, and a gradient
    of the following unit that waits for its reduction."""
    copied: float = 0.0
    """Additional elements while a bucket is reduced."""
    retained: float = 0.0
    """Elements from the end of the unit's backward pass until the update."""


def retained_elements(units: Sequence[UnitSize], ranks: int) -> list[int]:
    """Elements, by rank, of the parameters of which the rank owns any part."""
    sizes = [size for unit in units for size in unit.sizes]
    part, elements, start = _part(units, ranks), [0] * ranks, 0
    for size in sizes:
        for rank in _owners(start, start + size, part):
            elements[rank] += size
        start += size
    return elements


def reduced_in_buckets(
    units: Sequence[UnitSize], bucket: int, ranks: int, *, retains: bool = True
) -> list[BucketState]:
    """Return the state of each unit on the rank with most, as DeepSpeed 0.19 reduces gradients.

    A bucket of `bucket` elements is reduced when the next gradient does not fit.  A larger gradient
    is a bucket by itself, and waits for the next such gradient.  A rank retains every parameter's
    full gradient of which it owns any part, and allocates all of them with the first; without
    `retains` they are in host memory.  Source: `stage_1_and_2.py` of DeepSpeed.
    """
    part, elements = _part(units, ranks), retained_elements(units, ranks)
    begin = end = sum(unit.trained_parameters for unit in units)
    retained, states = 0, list[BucketState]()
    for unit in reversed(units):
        waiting = end - begin if end - begin > bucket else 0
        before, copied = retained, 0
        for size in reversed(unit.sizes):
            if begin < end and end - begin + size > bucket:
                groups = _groups(begin, end, part, bucket)  # flattened together for several ranks
                copied = max(copied, *(sum(group) for group in groups if len(group) > 1), 0)
                owners = _owners(begin, end, part)
                retained = max(retained, *(retains * elements[rank] for rank in owners))
                end = begin
            begin -= size
        more = retained - before  # allocated once the copies are freed
        states.append(BucketState(waiting + more, max(0, copied - more), more))
    return states[::-1]


def _part(units: Sequence[UnitSize], ranks: int) -> int:
    """Elements of all gradients that each rank owns."""
    return max(1, math.ceil(sum(unit.trained_parameters for unit in units) / ranks))


def _owners(begin: int, end: int, part: int) -> range:
    """Ranks that own any of the elements from `begin` to `end`."""
    return range(begin // part, (end - 1) // part + 1) if end > begin else range(0)


def _groups(begin: int, end: int, part: int, bucket: int) -> Iterator[list[int]]:
    """Elements of each rank, in groups that are cut once they fill a bucket."""
    group: list[int] = []
    for rank in _owners(begin, end, part):
        group.append(min(end, (rank + 1) * part) - max(begin, rank * part))
        if sum(group) > bucket:
            yield group
            group = []
    yield group
