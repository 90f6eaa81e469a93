"""What gradients take of a rank's memory while ZeRO's second stage reduces them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shardmark.strategies.base import UnitSize


@dataclass(frozen=True, slots=True)
class Reduced:
    """Elements that come and go with the gradients of a unit."""

    during: float = 0.0
    """Its backward pass: what it is the first to keep, and a gradient of the unit after it that
    waits."""
    copied: float = 0.0
    """More while a bucket is reduced."""
    kept: float = 0.0
    """From then on until the update."""


def kept_whole(units: Sequence[UnitSize], ranks: int) -> list[int]:
    """Elements of the parameters that each rank has any part of."""
    sizes = [size for unit in units for size in unit.sizes]
    part, held, place = _part(units, ranks), [0] * ranks, 0
    for size in sizes:
        for rank in _ranks(place, place + size, part):
            held[rank] += size
        place += size
    return held


def reduced_in_buckets(
    units: Sequence[UnitSize], bucket: int, ranks: int, *, keeps: bool = True
) -> list[Reduced]:
    """On the fullest rank, as DeepSpeed 0.19 does it (`stage_1_and_2.py`).

    A bucket is reduced when the next gradient has no room in it.  A gradient larger than `bucket`
    elements is one by itself, and waits for the next one like that.  A rank keeps each parameter
    whole that it has any part of, and makes room for all of them with the first; where it `keeps`
    none, its host does.
    """
    part, held = _part(units, ranks), kept_whole(units, ranks)
    begin = end = sum(unit.trained_parameters for unit in units)
    kept, found = 0, list[Reduced]()
    for unit in reversed(units):
        during = end - begin if end - begin > bucket else 0
        before, copied = kept, 0
        for size in reversed(unit.sizes):
            if begin < end and end - begin + size > bucket:
                copied = max(copied, _copied(begin, end, part, bucket))
                kept = max(kept, *(keeps * held[rank] for rank in _ranks(begin, end, part)))
                end = begin
            begin -= size
        more = kept - before  # there is room for it once the copies are gone
        found.append(Reduced(during + more, max(0, copied - more), more))
    return found[::-1]


def _part(units: Sequence[UnitSize], ranks: int) -> int:
    return max(1, math.ceil(sum(unit.trained_parameters for unit in units) / ranks))


def _ranks(begin: int, end: int, part: int) -> range:
    """Those whose parts these elements lie in."""
    return range(begin // part, (end - 1) // part + 1) if end > begin else range(0)


def _copied(begin: int, end: int, part: int, bucket: int) -> int:
    """Parts of several ranks are flattened together, and cut where they fill a bucket."""
    most = 0
    for together in _groups(begin, end, part, bucket):
        if len(together) > 1:
            most = max(most, sum(together))
    return most


def _groups(begin: int, end: int, part: int, bucket: int) -> Iterator[list[int]]:
    together: list[int] = []
    for rank in _ranks(begin, end, part):
        together.append(min(end, (rank + 1) * part) - max(begin, rank * part))
        if sum(together) > bucket:
            yield together
            together = []
    yield together
