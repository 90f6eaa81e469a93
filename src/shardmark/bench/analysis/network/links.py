"""Latency and bandwidth of links from timed operations: the alpha-beta model.

An operation of consecutive messages takes `messages * latency + bytes / bandwidth`, where `bytes`
is all that a rank sends.  Source: Hockney, Parallel Computing 20 (1994), 389-398; for the
collectives, Thakur, Rabenseifner and Gropp, Int. J. High Performance Computing Applications 19
(2005), 49-66.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from shardmark.base.results.network import (
    Bounds,
    LinkFit,
    MeasuredOperation,
    NetworkRecord,
    Operation,
)
from shardmark.base.statistics.intervals import t_quantile

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MIN_SIZES = 3
NEGLIGIBLE = 1e-10
"""Sum of squared fractions of the timings below which a parameter has no effect on them."""
MAX_LOG_ERROR = 20.0
"""Half width on the log scale above which an interval is omitted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Cost of an operation for each of n ranks in a ring; two ranks for point to point."""

    messages: Callable[[int], int]
    """Number of consecutive messages."""
    share: Callable[[int], float]
    """Bytes that a rank sends for each byte of the payload."""
    model: str


_HALF_RING = Cost(
    messages=lambda n: n - 1, share=lambda n: (n - 1) / n, model="(n - 1) a + (n - 1) / n m / b"
)
COSTS: Mapping[Operation, Cost] = {
    "point_to_point": Cost(messages=lambda _: 1, share=lambda _: 1.0, model="a + m / b"),
    "all_reduce": Cost(
        messages=lambda n: 2 * (n - 1),
        share=lambda n: 2 * (n - 1) / n,
        model="2 (n - 1) a + 2 (n - 1) / n m / b",
    ),
    "all_gather": _HALF_RING,
    "reduce_scatter": _HALF_RING,
}
"""Costs by operation.  In the models `a` is the latency of a message, `b` the bandwidth of a link
in one direction, `m` the payload."""


class Timing(NamedTuple):
    """The time of an operation for a message size."""

    messages: float
    sent_bytes: float
    seconds: float


def with_fits(record: NetworkRecord) -> NetworkRecord:
    """Return the record with a fit for each operation, or the reason why there is none."""
    operations = tuple(_fitted(operation) for operation in record.operations)
    return record.model_copy(update={"operations": operations})


def link_summary(record: NetworkRecord) -> str:
    """Describe latency and bandwidth of point-to-point messages, between hosts if measured."""
    start = f"links between {record.world_size} ranks, {record.backend}"
    for reach, words in (("between_hosts", "between hosts"), ("same_host", "on one host")):
        for operation in record.operations:
            fit = operation.fit
            if operation.operation == "point_to_point" and operation.reach == reach and fit:
                latency_us = 1e6 * fit.latency_seconds.value
                megabytes_per_second = 1e-6 * fit.bytes_per_second.value
                return f"{start}: {latency_us:.0f} us and {megabytes_per_second:.0f} MB/s {words}"
    return f"{start}: no fit"


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
    fit = fit_link(timings)
    if isinstance(fit, str):
        return operation.model_copy(update={"fit": None, "reason": fit})
    return operation.model_copy(update={"fit": fit, "reason": None})


def fit_link(timings: Sequence[Timing]) -> LinkFit | str:
    """Fit latency and bandwidth with 95 % intervals, or return the reason why it is not possible.

    Least squares of log(measured / model) over the sizes: relative errors count equally for short
    and long messages, and both values stay positive.  `seconds` should be medians, which are robust
    against single disturbed calls.  The intervals (Student's t, two degrees of freedom fewer than
    sizes) include the model's error.
    """
    if len({timing.sent_bytes for timing in timings}) < MIN_SIZES:
        return f"fewer than {MIN_SIZES} sizes were measured"
    if any(timing.seconds <= 0 for timing in timings):
        return "a timing is not above zero"
    import numpy as np
    from scipy.optimize import least_squares

    messages, sent_bytes, seconds = np.array(timings, float).T

    def parts(logs: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the seconds of latency and of transfer, (2, sizes), from the log parameters."""
        return np.stack((messages * np.exp(logs[0]), sent_bytes * np.exp(logs[1])))

    def shares(logs: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the derivative of the logarithm of the model, (sizes, 2)."""
        seconds_by_part = parts(logs)
        return np.asarray((seconds_by_part / seconds_by_part.sum(0)).T)

    def residuals(logs: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.asarray(np.log(parts(logs).sum(0) / seconds))

    first, last = int(sent_bytes.argmin()), int(sent_bytes.argmax())
    start = np.log([seconds[first] / messages[first], seconds[last] / sent_bytes[last]])
    solved = least_squares(
        residuals, start, jac=shares, method="lm", xtol=1e-12, ftol=1e-14, gtol=1e-14
    )
    degrees = len(timings) - 2
    variance = 2 * float(solved.cost) / degrees
    jacobian = shares(solved.x)
    (aa, ab), (_, bb) = (jacobian.T @ jacobian).tolist()
    quantile = t_quantile(degrees)

    def half(diagonal: float, other: float) -> float:
        """Return half an interval's width on the log scale; a negligible parameter is ignored."""
        if diagonal < NEGLIGIBLE:
            return math.inf
        information = diagonal - ab * ab / other if other >= NEGLIGIBLE else diagonal
        return quantile * math.sqrt(variance / information) if information > 0 else math.inf

    return LinkFit(
        latency_seconds=_bounds(float(solved.x[0]), half(aa, bb)),
        bytes_per_second=_bounds(-float(solved.x[1]), half(bb, aa)),
        residual=math.sqrt(variance),
    )


def _bounds(log_value: float, half: float) -> Bounds:
    value = math.exp(log_value)
    if half > MAX_LOG_ERROR:
        return Bounds(value=value, low=None, high=None)
    return Bounds(value=value, low=math.exp(log_value - half), high=math.exp(log_value + half))
