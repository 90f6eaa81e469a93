"""Metrics that were sampled from outside, in the measured windows: network, processes, devices."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean

from shardmark.analysis.trial.over_ranks import (
    ON_CPU,
    Result,
    Value,
    over_all,
    over_ranks,
    trial_value,
)
from shardmark.analysis.trial.raw_files import (
    Line,
    at_seconds,
    by_node,
    mapping,
    number,
    objects,
)
from shardmark.measure.network.interfaces import NVLINK
from shardmark.results.schema import RankRecord

Point = tuple[float, float]
"""Unix time, and a value read then; in order of time."""

_COUNTERS = ("cpu_seconds", "context_switches")
"""Of a process, since it began."""
Reduce = Callable[[list[float]], float]
_OF_DEVICE: dict[str, tuple[str, Reduce | None]] = {
    "device_used_bytes": ("memory_used_bytes", max),
    "temperature_celsius": ("temperature_celsius", max),
    "gpu_utilization": ("utilization_percent", fmean),
    "power_watts": ("power_watts", fmean),
    "energy_joules": ("energy_joules", None),
}
"""Metric -> field of a sample, and how the values in the windows become one; None of a counter."""


@dataclass(frozen=True, slots=True)
class Windows:
    """Spans of Unix time in which the slowest rank's steps were measured."""

    spans: tuple[tuple[float, float], ...]

    @property
    def seconds(self) -> float:
        return sum(end - start for start, end in self.spans)

    def hold(self, time: float) -> bool:
        return any(start <= time <= end for start, end in self.spans)


def counter_increase(points: Sequence[Point], windows: Windows) -> float | str:
    """How much a cumulative counter rose in the windows, interpolated linearly; or why not known.

    Samples must lie before each window's start and after its end.
    """
    if not points:
        return "no sample was taken"
    if not windows.spans:
        return "no window was measured"
    if points[0][0] > windows.spans[0][0]:
        return "no sample was taken before the first window"
    if points[-1][0] < windows.spans[-1][1]:
        return "no sample was taken after the last window"
    rises = (value_at(points, end) - value_at(points, start) for start, end in windows.spans)
    return max(sum(rises), 0.0)


def value_at(points: Sequence[Point], time: float) -> float:
    """Interpolated linearly; the first or last value outside of the points."""
    after = bisect_left(points, time, key=lambda point: point[0])
    if after in (0, len(points)):
        return points[min(after, len(points) - 1)][1]
    (early, low), (late, high) = points[after - 1 : after + 1]
    return low + (high - low) * (time - early) / (late - early)


def levels(points: Sequence[Point], windows: Windows) -> list[float]:
    """Values sampled in the windows; for a window without any, those right before and after it."""
    times = [time for time, _ in points]
    values: list[float] = []
    for start, end in windows.spans:
        first, last = bisect_left(times, start), bisect_right(times, end)
        if first == last:
            first, last = max(first - 1, 0), min(last + 1, len(times))
        values.extend(value for _, value in points[first:last])
    return values


def network_metrics(samples: Sequence[Line], windows: Windows) -> dict[str, Result]:
    """Bytes that all interfaces of all nodes carried in the windows, and bytes per second."""
    sent = _over_nodes(samples, "bytes_sent", windows)
    rate = sent if isinstance(sent, str) else sent / windows.seconds
    return {
        "network_sent_bytes": trial_value(sent),
        "network_received_bytes": trial_value(_over_nodes(samples, "bytes_received", windows)),
        "network_bytes_per_second": trial_value(rate),
    }


def _over_nodes(samples: Sequence[Line], field: str, windows: Windows) -> Value:
    nodes = by_node(samples) or {0: []}
    total = 0.0
    for node, own in nodes.items():
        increase = counter_increase(network_points(own, field), windows)
        if isinstance(increase, str):
            return f"node {node}: {increase}" if len(nodes) > 1 else increase
        total += increase
    return total


def process_metrics(
    samples: Sequence[Line], ranks: Sequence[RankRecord], windows: Windows
) -> dict[str, Result]:
    """Of each rank's process and its descendants."""

    def increase(rank: RankRecord, field: str, scale: float = 1.0) -> Value:
        rise = counter_increase(process_points(samples, rank, field), windows)
        return f"rank {rank.rank}: {rise}" if isinstance(rise, str) else scale * rise

    def highest(rank: RankRecord, field: str) -> Value:
        values = levels(process_points(samples, rank, field), windows)
        return max(values) if values else f"rank {rank.rank}: no sample was taken"

    return over_ranks(
        ranks,
        cpu_percent=partial(increase, field="cpu_seconds", scale=100 / windows.seconds),
        context_switches=partial(increase, field="context_switches"),
        peak_rss_bytes=partial(highest, field="rss_bytes"),
        **{name: partial(highest, field=name) for name in ("threads", "processes", "open_files")},
    )


def device_metrics(
    samples: Sequence[Line], windows: Windows, device_type: str
) -> dict[str, Result]:
    """Of each CUDA device in use."""
    uuids = device_uuids(samples)
    if device_type != "cuda" or not uuids:
        reason = "NVML gave no sample of a device" if device_type == "cuda" else ON_CPU
        return dict.fromkeys(_OF_DEVICE, reason)

    def of_device(uuid: str, field: str, reduce: Reduce | None) -> Value:
        points = device_points(samples, uuid, field)
        if not points:
            return f"the device does not report {field}"
        return reduce(levels(points, windows)) if reduce else counter_increase(points, windows)

    return {
        name: over_all(name, [of_device(uuid, *how) for uuid in uuids])
        for name, how in _OF_DEVICE.items()
    }


def device_uuids(samples: Iterable[Line]) -> tuple[str, ...]:
    """Every CUDA device that was sampled."""
    return tuple(sorted({str(gpu["uuid"]) for line in samples for gpu in objects(line, "gpus")}))


def network_points(samples: Sequence[Line], field: str) -> list[Point]:
    """What a node carried over those interfaces that are in every sample.

    NVLink is counted from when the ranks' devices are known.
    """
    names = mapping(samples[0].get("network")) if samples else {}
    each = [interface_points(samples, name, field) for name in names if name != NVLINK]
    steady = [points for points in each if len(points) == len(samples)]
    if nvlink := interface_points(samples, NVLINK, field):
        steady.append(
            [(at_seconds(sample), value_at(nvlink, at_seconds(sample))) for sample in samples]
        )
    return [
        (points[0][0], sum(value for _, value in points)) for points in zip(*steady, strict=True)
    ]


def interface_points(samples: Sequence[Line], name: str, field: str) -> list[Point]:
    """The cumulative counter of one interface, in order of time."""
    counts = (mapping(mapping(sample.get("network")).get(name)).get(field) for sample in samples)
    pairs = zip(samples, map(number, counts), strict=True)
    return [(at_seconds(sample), count) for sample, count in pairs if count is not None]


def process_points(samples: Iterable[Line], rank: RankRecord, field: str) -> list[Point]:
    """Return when each value of the rank's process was sampled, and the value."""
    return [
        (at_seconds(sample), value)
        for sample in samples
        for process in objects(sample, "ranks")
        if (process.get("rank"), process.get("pid")) == (rank.rank, rank.pid)
        and (value := number(process.get(field))) is not None
    ]


def device_points(samples: Iterable[Line], uuid: str, field: str) -> list[Point]:
    return [
        (at_seconds(sample), value)
        for sample in samples
        for gpu in objects(sample, "gpus")
        if gpu.get("uuid") == uuid and (value := number(gpu.get(field))) is not None
    ]
