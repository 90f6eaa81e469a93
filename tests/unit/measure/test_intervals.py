"""Interval arithmetic against the same on sets of single nanoseconds."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from shardmark.measure.step.intervals import Interval, outside_nanoseconds, union

INTERVALS = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 12)).map(lambda p: (p[0], p[0] + p[1])),
    max_size=12,
)


def instants(intervals: list[Interval]) -> set[int]:
    return {instant for start, end in intervals for instant in range(start, end)}


@settings(deadline=None)
@given(INTERVALS)
def test_union_is_the_same_set_disjoint_and_ascending(intervals: list[Interval]) -> None:
    merged = union(intervals)
    assert instants(merged) == instants(intervals)
    assert all(start < end for start, end in merged)
    assert all(left[1] < right[0] for left, right in pairwise(merged))


@settings(deadline=None)
@given(INTERVALS, INTERVALS)
def test_outside_is_the_size_of_the_difference(
    intervals: list[Interval], cover: list[Interval]
) -> None:
    expected = len(instants(intervals) - instants(cover))
    assert outside_nanoseconds(intervals, cover) == expected


def test_by_hand() -> None:
    assert union([(5, 9), (0, 3), (3, 4), (6, 7), (8, 8)]) == [(0, 4), (5, 9)]
    assert outside_nanoseconds([(0, 10), (20, 30)], [(2, 4), (8, 22), (29, 40)]) == 2 + 4 + 7
    assert outside_nanoseconds([], [(0, 1)]) == 0
    assert outside_nanoseconds([(0, 5)], []) == 5
