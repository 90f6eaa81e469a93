"""What samples taken from outside say about the measured windows of a trial."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

Point = tuple[float, float]
"""Unix time, and a value read then; in order of time."""


@dataclass(frozen=True, slots=True)
class Windows:
    """Spans of Unix time in which the slowest rank's steps were measured."""

    spans: tuple[tuple[float, float], ...]

    @property
    def seconds(self) -> float:
        return sum(end - start for start, end in self.spans)


def counter_increase(points: Sequence[Point], windows: Windows) -> float | str:
    """How much a cumulative counter rose in the windows, interpolated linearly; or why not known.

    Samples must lie before each window's start and after its end.
    """
    if not points:
        return "no sample was taken"
    if not windows.spans:
        return "no window was measured"
    times = [time for time, _ in points]
    values = [value for _, value in points]
    total = 0.0
    for start, end in windows.spans:
        if times[0] > start:
            return "no sample was taken before the first window"
        if times[-1] < end:
            return "no sample was taken after the last window"
        total += _at(end, times, values) - _at(start, times, values)
    return max(total, 0.0)


def _at(time: float, times: Sequence[float], values: Sequence[float]) -> float:
    """The value then, on the line between its two neighbours; time lies within the times."""
    after = bisect_left(times, time)
    if times[after] == time:
        return values[after]
    share = (time - times[after - 1]) / (times[after] - times[after - 1])
    return values[after - 1] + share * (values[after] - values[after - 1])


def levels(points: Sequence[Point], windows: Windows) -> list[float]:
    """Values sampled in the windows; for a window without any, those right before and after it."""
    times = [time for time, _ in points]
    found: list[float] = []
    for start, end in windows.spans:
        first, last = bisect_left(times, start), bisect_right(times, end)
        if first == last:
            first, last = max(first - 1, 0), min(last + 1, len(times))
        found.extend(value for _, value in points[first:last])
    return found
