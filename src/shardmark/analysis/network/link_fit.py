"""Latency and bandwidth of links from timed operations: the alpha-beta model.  Plain Python.

An operation of so many messages one after the other, in which a rank sends so many bytes in all,
takes `messages * latency + bytes / bandwidth`.  Source: Hockney, Parallel Computing 20 (1994),
389-398; for the collectives, Thakur, Rabenseifner and Gropp, Int. J. High Performance Computing
Applications 19 (2005), 49-66.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from shardmark.analysis.statistics.intervals import t_quantile
from shardmark.results.network import (
    Bounds,
    LinkFit,
    MeasuredOperation,
    NetworkRecord,
    Operation,
)

LEAST_SIZES = 3
ITERATIONS = 200
CONVERGED = 1e-10
NEGLIGIBLE = 1e-10
"""Sum of squared shares of the timings: 1 where one timing is all latency, or all bandwidth."""
LARGEST_LOG_ERROR = 20.0
"""An interval wider than a factor of e to this bounds nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What one operation costs each of n ranks in a ring (two, point to point)."""

    messages: Callable[[int], int]
    """One after the other."""
    share: Callable[[int], float]
    """Bytes that a rank sends, of each byte of the payload."""
    model: str


COSTS: Mapping[Operation, Cost] = {
    "point_to_point": Cost(messages=lambda _: 1, share=lambda _: 1.0, model="a + m / b"),
    "all_reduce": Cost(
        messages=lambda n: 2 * (n - 1),
        share=lambda n: 2 * (n - 1) / n,
        model="2 (n - 1) a + 2 (n - 1) / n m / b",
    ),
    "all_gather": Cost(
        messages=lambda n: n - 1,
        share=lambda n: (n - 1) / n,
        model="(n - 1) a + (n - 1) / n m / b",
    ),
    "reduce_scatter": Cost(
        messages=lambda n: n - 1,
        share=lambda n: (n - 1) / n,
        model="(n - 1) a + (n - 1) / n m / b",
    ),
}
"""`a` is the latency of a message, `b` the bandwidth of one link one way, `m` the payload."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """One size of an operation."""

    messages: float
    sent_bytes: float
    seconds: float


def with_fits(record: NetworkRecord) -> NetworkRecord:
    """The record with each operation's fit, or the reason why there is none."""
    operations = tuple(_fitted(operation) for operation in record.operations)
    return record.model_copy(update={"operations": operations})


def predicted_seconds(operation: MeasuredOperation, payload_bytes: float) -> float | None:
    """What the operation's fit says of one call among the same ranks; None without a fit."""
    if operation.fit is None:
        return None
    cost, ranks = COSTS[operation.operation], len(operation.ranks)
    return (
        cost.messages(ranks) * operation.fit.latency_seconds.value
        + cost.share(ranks) * payload_bytes / operation.fit.bytes_per_second.value
    )


def link_summary(record: NetworkRecord) -> str:
    """One line: what a message between ranks costs, over the farthest reach that was measured."""
    start = f"links between {record.world_size} ranks, {record.backend}"
    messages = [one for one in record.operations if one.operation == "point_to_point" and one.fit]
    for reach, words in (("between_hosts", "between hosts"), ("same_host", "on one host")):
        for one in messages:
            if one.reach == reach and one.fit is not None:
                latency = _words(one.fit.latency_seconds, 1e6, "us")
                speed = _words(one.fit.bytes_per_second, 1e-6, "MB/s")
                return f"{start}: {latency} and {speed} {words}"
    return f"{start}: no fit"


def _words(found: Bounds, scale: float, unit: str) -> str:
    """The value with its 95 % interval."""
    value = f"{found.value * scale:.0f} {unit}"
    if found.low is None or found.high is None:
        return f"{value} (no bounds)"
    return f"{value} ({found.low * scale:.0f} to {found.high * scale:.0f})"


def _fitted(operation: MeasuredOperation) -> MeasuredOperation:
    cost, ranks = COSTS[operation.operation], len(operation.ranks)
    timings = [
        Timing(
            messages=cost.messages(ranks),
            sent_bytes=cost.share(ranks) * size.payload_bytes,
            seconds=median(size.seconds),
        )
        for size in operation.sizes
        if size.seconds
    ]
    found = fit_link(timings)
    if isinstance(found, str):
        return operation.model_copy(update={"fit": None, "reason": found})
    return operation.model_copy(update={"fit": found, "reason": None})


def fit_link(timings: Sequence[Timing]) -> LinkFit | str:
    """Latency and bandwidth with 95 % intervals, or why they cannot be told.

    Least squares of log(measured / model) over the sizes: a relative error counts alike for short
    and long messages, and both values stay positive.  `seconds` should be medians, which single
    disturbed calls do not move.  The intervals (Student's t, sizes less two degrees of freedom)
    contain what the model does not explain.
    """
    if len({one.sent_bytes for one in timings}) < LEAST_SIZES:
        return f"fewer than {LEAST_SIZES} sizes were measured"
    if any(one.seconds <= 0 for one in timings):
        return "a timing is not above zero"
    shortest = min(timings, key=lambda one: one.sent_bytes)
    longest = max(timings, key=lambda one: one.sent_bytes)
    # Logarithms of latency and of seconds per byte.
    latency = math.log(shortest.seconds / shortest.messages)
    slowness = math.log(longest.seconds / longest.sent_bytes)
    damping, squares = 1e-3, _squares(timings, latency, slowness)
    for _ in range(ITERATIONS):
        normal, slope = _equations(timings, latency, slowness)
        step = _solved(normal, slope, damping)
        tried = _squares(timings, latency + step[0], slowness + step[1])
        if tried <= squares:
            latency, slowness = latency + step[0], slowness + step[1]
            damping /= 10
            converged = max(map(abs, step)) < CONVERGED or squares - tried < CONVERGED**2
            squares = tried
            if converged:
                break
        elif damping > 1 / CONVERGED:
            break  # no step in any direction is better
        else:
            damping *= 10
    return _with_intervals(timings, latency, slowness, squares)


def _with_intervals(
    timings: Sequence[Timing], latency: float, slowness: float, squares: float
) -> LinkFit:
    """A value that has no part in any timing has no bounds, and does not widen the other's."""
    degrees = len(timings) - 2
    (aa, ab, bb), _ = _equations(timings, latency, slowness)
    variance = squares / degrees
    quantile = t_quantile(degrees)

    def half(own: float, other: float) -> float:
        if own < NEGLIGIBLE:
            return math.inf
        information = own - ab * ab / other if other >= NEGLIGIBLE else own
        return quantile * math.sqrt(variance / information) if information > 0 else math.inf

    return LinkFit(
        latency_seconds=_bounds(latency, half(aa, bb)),
        bytes_per_second=_bounds(-slowness, half(bb, aa)),
        residual=math.sqrt(variance),
    )


def _bounds(log_value: float, half: float) -> Bounds:
    value = math.exp(log_value)
    if half > LARGEST_LOG_ERROR:
        return Bounds(value=value, low=None, high=None)
    return Bounds(value=value, low=math.exp(log_value - half), high=math.exp(log_value + half))


def _parts(one: Timing, latency: float, slowness: float) -> tuple[float, float]:
    return one.messages * math.exp(latency), one.sent_bytes * math.exp(slowness)


def _squares(timings: Sequence[Timing], latency: float, slowness: float) -> float:
    return math.fsum(
        math.log(one.seconds / sum(_parts(one, latency, slowness))) ** 2 for one in timings
    )


def _equations(
    timings: Sequence[Timing], latency: float, slowness: float
) -> tuple[tuple[float, float, float], tuple[float, float]]:
    """J^T J as (aa, ab, bb) and J^T r, for r = log(measured / model)."""
    aa = ab = bb = a = b = 0.0
    for one in timings:
        waiting, sending = _parts(one, latency, slowness)
        total = waiting + sending
        x, y, r = waiting / total, sending / total, math.log(one.seconds / total)
        aa, ab, bb = aa + x * x, ab + x * y, bb + y * y
        a, b = a + x * r, b + y * r
    return (aa, ab, bb), (a, b)


def _solved(
    normal: tuple[float, float, float], slope: tuple[float, float], damping: float
) -> tuple[float, float]:
    """The damped Gauss-Newton step (Marquardt, 1963)."""
    aa, ab, bb = normal
    aa, bb = aa * (1 + damping) + 1e-300, bb * (1 + damping) + 1e-300
    determinant = aa * bb - ab * ab
    a, b = slope
    return (bb * a - ab * b) / determinant, (aa * b - ab * a) / determinant
