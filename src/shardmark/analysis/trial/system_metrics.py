"""Metrics that were sampled from outside: network, processes, devices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from shardmark.analysis.trial.over_ranks import (
    ON_CPU,
    Found,
    Result,
    number,
    over_all,
    over_ranks,
    trial_value,
)
from shardmark.analysis.trial.windows import Point, Windows, counter_increase, levels
from shardmark.results.schema import RankRecord

Sample = Mapping[str, object]

_HIGHEST_OF_PROCESS = {
    "peak_rss_bytes": "rss_bytes",
    "threads": "threads",
    "processes": "processes",
    "open_files": "open_files",
}
_HIGHEST_OF_DEVICE = {
    "device_used_bytes": "memory_used_bytes",
    "temperature_celsius": "temperature_celsius",
}
_MEAN_OF_DEVICE = {"gpu_utilization": "utilization_percent", "power_watts": "power_watts"}
_COUNTERS = ("cpu_seconds", "context_switches")
"""Of a process, since it began."""
_DEVICE_METRICS = (*_HIGHEST_OF_DEVICE, *_MEAN_OF_DEVICE, "energy_joules")


def network_metrics(samples: Sequence[Sample], windows: Windows) -> dict[str, Result]:
    """Over all interfaces of all nodes, loopback included."""
    sent = _over_nodes(samples, "bytes_sent", windows)
    received = _over_nodes(samples, "bytes_received", windows)
    rate = sent if isinstance(sent, str) else sent / windows.seconds
    return {
        "network_sent_bytes": trial_value(sent),
        "network_received_bytes": trial_value(received),
        "network_bytes_per_second": trial_value(rate),
    }


def _over_nodes(samples: Sequence[Sample], field: str, windows: Windows) -> Found:
    """The sum over nodes; a sample of a trial on one node does not name it."""
    by_node: dict[object, list[Sample]] = {}
    for sample in samples:
        by_node.setdefault(sample.get("node", 0), []).append(sample)
    total = 0.0
    for node, own in by_node.items():
        found = counter_increase(_network_points(own, field), windows)
        if isinstance(found, str):
            return f"node {node}: {found}" if len(by_node) > 1 else found
        total += found
    return total if by_node else counter_increase([], windows)


def process_metrics(
    samples: Sequence[Sample], ranks: Sequence[RankRecord], windows: Windows
) -> dict[str, Result]:
    """Of each rank's process and its descendants."""

    def increase(rank: RankRecord, field: str) -> Found:
        found = counter_increase(_process_points(samples, rank, field), windows)
        return f"rank {rank.rank}: {found}" if isinstance(found, str) else found

    def highest(rank: RankRecord, field: str) -> Found:
        values = levels(_process_points(samples, rank, field), windows)
        return max(values) if values else f"rank {rank.rank}: no sample was taken"

    def cpu_percent(rank: RankRecord) -> Found:
        seconds = increase(rank, "cpu_seconds")
        return seconds if isinstance(seconds, str) else 100 * seconds / windows.seconds

    results = {
        name: over_ranks(name, ranks, lambda rank, field=field: highest(rank, field))  # type: ignore[misc]  # mypy cannot infer a lambda's default
        for name, field in _HIGHEST_OF_PROCESS.items()
    }
    results["cpu_percent"] = over_ranks("cpu_percent", ranks, cpu_percent)
    results["context_switches"] = over_ranks(
        "context_switches", ranks, lambda rank: increase(rank, "context_switches")
    )
    return results


def device_metrics(
    samples: Sequence[Sample], windows: Windows, device_type: str
) -> dict[str, Result]:
    """Of each CUDA device in use."""
    if device_type != "cuda":
        return dict.fromkeys(_DEVICE_METRICS, ON_CPU)
    uuids = device_uuids(samples)
    if not uuids:
        return dict.fromkeys(_DEVICE_METRICS, "NVML gave no sample of a device")

    def over_devices(name: str, field: str, reduce: Callable[[list[float]], float]) -> Result:
        return over_all(
            name,
            [
                _reduced(_device_points(samples, uuid, field), windows, field, reduce)
                for uuid in uuids
            ],
        )

    results = {name: over_devices(name, field, max) for name, field in _HIGHEST_OF_DEVICE.items()}
    for name, field in _MEAN_OF_DEVICE.items():
        results[name] = over_devices(name, field, lambda values: sum(values) / len(values))
    results["energy_joules"] = over_all(
        "energy_joules",
        [
            counter_increase(points, windows) if points else _not_reported("energy_joules")
            for points in (_device_points(samples, uuid, "energy_joules") for uuid in uuids)
        ],
    )
    return results


def device_uuids(samples: Iterable[Sample]) -> tuple[str, ...]:
    """Every CUDA device that was sampled."""
    return tuple(
        sorted({str(gpu["uuid"]) for sample in samples for gpu in _objects(sample, "gpus")})
    )


def _reduced(
    points: Sequence[Point],
    windows: Windows,
    field: str,
    reduce: Callable[[list[float]], float],
) -> Found:
    values = levels(points, windows)
    return reduce(values) if values else _not_reported(field)


def _not_reported(field: str) -> str:
    return f"the device does not report {field}"


def _network_points(samples: Sequence[Sample], field: str) -> list[Point]:
    """The sum over interfaces that are in every sample, so that none comes or goes within."""
    by_sample = [_network(sample) for sample in samples]
    steady = set.intersection(*(set(one) for one in by_sample)) if by_sample else set()
    if not steady:
        return []
    return [
        (_at(sample), sum(number(one[name].get(field)) or 0.0 for name in steady))
        for sample, one in zip(samples, by_sample, strict=True)
    ]


def _network(sample: Sample) -> dict[str, Mapping[str, object]]:
    found = sample.get("network")
    if not isinstance(found, Mapping):
        return {}
    return {name: counters for name, counters in found.items() if isinstance(counters, Mapping)}


def _process_points(samples: Iterable[Sample], rank: RankRecord, field: str) -> list[Point]:
    """Of the rank's process, and of those that were the rank before it was restarted."""
    points: list[Point] = []
    pid: object = None
    before = 0.0
    for sample in samples:
        for one in _objects(sample, "ranks"):
            value = number(one.get(field))
            if one.get("rank") != rank.rank or value is None:
                continue
            if one.get("pid") != rank.pid and not rank.resumes:
                continue
            if field in _COUNTERS and pid not in (None, one.get("pid")):
                before = points[-1][1]  # a new process counts from nothing
            pid = one.get("pid")
            points.append((_at(sample), before + value))
    return points if pid == rank.pid else []


def _device_points(samples: Iterable[Sample], uuid: str, field: str) -> list[Point]:
    return [
        (_at(sample), value)
        for sample in samples
        for one in _objects(sample, "gpus")
        if one.get("uuid") == uuid and (value := number(one.get(field))) is not None
    ]


def _objects(sample: Sample, key: str) -> list[Mapping[str, object]]:
    found = sample.get(key)
    return [one for one in found if isinstance(one, Mapping)] if isinstance(found, list) else []


def _at(sample: Sample) -> float:
    at_seconds = number(sample.get("at_seconds"))
    assert at_seconds is not None, "a sample without its time"
    return at_seconds
