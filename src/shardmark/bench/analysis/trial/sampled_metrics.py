"""Metrics from samples in the measured windows: network, processes, devices."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean

from shardmark.base.files.run_files import NVLINK
from shardmark.base.results.schema import RankRecord
from shardmark.bench.analysis.trial.over_ranks import (
    ON_CPU,
    Result,
    Value,
    over_all,
    over_ranks,
    trial_value,
)
from shardmark.bench.analysis.trial.raw_files import (
    Line,
    at_seconds,
    by_node,
    mapping,
    number,
    objects,
)

Point = tuple[float, float]
"""Unix time and the value at that time."""

Reduce = Callable[[list[float]], float]
_DEVICE_FIELDS: dict[str, tuple[str, Reduce | None]] = {
    "device_used_bytes": ("memory_used_bytes", max),
    "temperature_celsius": ("temperature_celsius", max),
    "gpu_utilization": ("utilization_percent", fmean),
    "power_watts": ("power_watts", fmean),
    "energy_joules": ("energy_joules", None),
}
"""Field of a sample and the aggregation over the windows, by metric; None for a counter."""


@dataclass(frozen=True, slots=True)
class Windows:
    """Intervals of Unix time in which the steps of the slowest rank were measured."""

    spans: tuple[tuple[float, float], ...]

    @property
    def seconds(self) -> float:
        return sum(end - start for start, end in self.spans)

    def contain(self, time: float) -> bool:
        return any(start <= time <= end for start, end in self.spans)


def counter_increase(points: Sequence[Point], windows: Windows) -> float | str:
    """Return the linearly interpolated increase of a counter in the windows, or a reason.

    There must be samples before the start of the first window and after the end of the last one.
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
    """Interpolate linearly; outside of the points, return the first or last value."""
    after = bisect_left(points, time, key=lambda point: point[0])
    if after in (0, len(points)):
        return points[min(after, len(points) - 1)][1]
    (early, low), (late, high) = points[after - 1 : after + 1]
    return low + (high - low) * (time - early) / (late - early)


def levels(points: Sequence[Point], windows: Windows) -> list[float]:
    """Return the values in the windows; for an empty window, the values just around it."""
    times = [time for time, _ in points]
    values: list[float] = []
    for start, end in windows.spans:
        first, last = bisect_left(times, start), bisect_right(times, end)
        if first == last:
            first, last = max(first - 1, 0), min(last + 1, len(times))
        values.extend(value for _, value in points[first:last])
    return values


def network_metrics(samples: Sequence[Line], windows: Windows) -> dict[str, Result]:
    """Bytes over all interfaces of all nodes in the windows, in total and per second."""
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
    for node, lines in nodes.items():
        increase = counter_increase(network_points(lines, field), windows)
        if isinstance(increase, str):
            return f"node {node}: {increase}" if len(nodes) > 1 else increase
        total += increase
    return total


def process_metrics(
    samples: Sequence[Line], ranks: Sequence[RankRecord], windows: Windows
) -> dict[str, Result]:
    """Metrics of the ranks' processes and their descendants."""

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
    """Metrics of the CUDA devices in use."""
    uuids = device_uuids(samples)
    if device_type != "cuda" or not uuids:
        reason = "NVML gave no sample of a device" if device_type == "cuda" else ON_CPU
        return dict.fromkeys(_DEVICE_FIELDS, reason)

    def of_device(uuid: str, field: str, reduce: Reduce | None) -> Value:
        points = device_points(samples, uuid, field)
        if not points:
            return f"the device does not report {field}"
        return reduce(levels(points, windows)) if reduce else counter_increase(points, windows)

    return {
        name: over_all(name, [of_device(uuid, field, reduce) for uuid in uuids])
        for name, (field, reduce) in _DEVICE_FIELDS.items()
    }


def device_uuids(samples: Iterable[Line]) -> tuple[str, ...]:
    """Return the UUIDs of all sampled CUDA devices."""
    return tuple(sorted({str(gpu["uuid"]) for line in samples for gpu in objects(line, "gpus")}))


def network_points(samples: Sequence[Line], field: str) -> list[Point]:
    """Return the sum of a node's interfaces that are in every sample.

    NVLink counts from the first sample that has the ranks' devices.
    """
    names = mapping(samples[0].get("network")) if samples else {}
    interfaces = [interface_points(samples, name, field) for name in names if name != NVLINK]
    complete = [points for points in interfaces if len(points) == len(samples)]
    if nvlink := interface_points(samples, NVLINK, field):
        complete.append(
            [(at_seconds(sample), value_at(nvlink, at_seconds(sample))) for sample in samples]
        )
    return [
        (points[0][0], sum(value for _, value in points)) for points in zip(*complete, strict=True)
    ]


def interface_points(samples: Sequence[Line], name: str, field: str) -> list[Point]:
    """Return the cumulative counter of an interface, in order of time."""
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
