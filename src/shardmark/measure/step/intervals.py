"""Arithmetic on sets of time intervals.  Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable

Interval = tuple[int, int]
"""Start and end in nanoseconds; the end is outside."""


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same set as disjoint intervals in ascending order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        elif end > start:
            merged.append((start, end))
    return merged


def outside_nanoseconds(intervals: Iterable[Interval], cover: Iterable[Interval]) -> int:
    """How long some of `intervals` lasts while nothing of `cover` does."""
    covering = union(cover)
    total = 0
    first = 0
    for start, end in union(intervals):
        while first < len(covering) and covering[first][1] <= start:
            first += 1
        position, index = start, first
        while index < len(covering) and covering[index][0] < end:
            total += max(0, covering[index][0] - position)
            position = max(position, covering[index][1])
            index += 1
        total += max(0, end - position)
    return total
