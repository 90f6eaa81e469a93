"""Traffic over each network interface of each node during the training of a row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal, NamedTuple

from shardmark.base.results.schema import TrialResult
from shardmark.base.results.store import RunFolder
from shardmark.base.statistics.intervals import Estimate, estimate_mean
from shardmark.bench.analysis.compare.rows import Row
from shardmark.bench.analysis.compare.series import OverTime, rates_between, smoothed
from shardmark.bench.analysis.trial.rank_metrics import (
    measured_steps,
    slowest,
    windows_of,
    workers_of,
)
from shardmark.bench.analysis.trial.raw_files import Line, mapping, samples_by_node
from shardmark.bench.analysis.trial.sampled_metrics import (
    Windows,
    counter_increase,
    interface_points,
)

MIN_READINGS = 10
"""Minimum number of samples in a repeat's windows for a peak rate."""
IDLE_SHARE = 1e-3
"""Interfaces with less than this fraction of the busiest one's traffic are not shown."""
Way = Literal["bytes_sent", "bytes_received", "errors"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OneWay:
    """Traffic over an interface in one direction, as means over the repeats."""

    step_bytes: Estimate | None
    """Bytes of all the node's ranks in a step; None if `missing` has a reason."""
    mean_bytes_per_second: float | None
    """Mean rate in the measured windows."""
    peak_bytes_per_second: float | None
    """Largest rate between two samples in the windows, over repeats with enough samples."""
    over_time: OverTime
    """Bytes per second of the first repeat, by seconds since the first step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interface:
    """A network interface of a node."""

    node: int
    name: str
    sent: OneWay
    received: OneWay
    errors: OneWay
    """Packets that were lost or dropped in both directions, in place of bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficOfRow:
    """The traffic of a row."""

    row: Row
    interfaces: tuple[Interface, ...] = ()
    """Interfaces that are not idle."""
    missing: Mapping[str, str]
    """Reasons for missing values, under `interfaces` and `peaks`."""


class _Node(NamedTuple):
    """Samples of a trial on a node.  The clocks of nodes can differ."""

    samples: Sequence[Line]
    windows: Windows
    """Windows of the node's slowest worker, or of the trial's if the node has no worker."""
    first_step_at_seconds: float
    steps: float
    """Mean number of steps of a worker in its windows."""


def traffic_of(row: Row, *, repeats: int | None = None) -> TrafficOfRow:
    """Return the traffic from the samples of the row's trials, or of the first `repeats` trials."""
    trials = [nodes for trial in row.ok_trials[:repeats] if (nodes := _read(row, trial))]
    if not trials:
        return TrafficOfRow(row=row, missing={"interfaces": "no samples were stored"})
    missing: dict[str, str] = {}
    places = {
        (number, str(name))
        for nodes in trials
        for number, node in nodes.items()
        for sample in node.samples
        for name in mapping(sample.get("network"))
    }
    rates: dict[Interface, float] = {}
    for number, name in sorted(places):
        repeated = [nodes[number] for nodes in trials if number in nodes]
        sent = _one_way(repeated, name, "bytes_sent", missing)
        received = _one_way(repeated, name, "bytes_received", missing)
        errors = _one_way(repeated, name, "errors", {})
        one = Interface(node=number, name=name, sent=sent, received=received, errors=errors)
        rates[one] = max(way.mean_bytes_per_second or 0.0 for way in (sent, received))
    least = IDLE_SHARE * max(rates.values(), default=0.0)
    shown = tuple(interface for interface, rate in rates.items() if rate > least)
    return TrafficOfRow(row=row, interfaces=shown, missing=missing)


def _read(row: Row, result: TrialResult) -> dict[int, _Node]:
    """Return the samples by node; empty if there are no samples or no measured steps."""
    workers = workers_of(result)
    steps = sum(map(measured_steps, workers))
    if row.folder is None or not steps:
        return {}
    samples = samples_by_node(RunFolder(row.folder).trial_folder(result.id))
    nodes = {}
    for number in {*samples, *(rank.node for rank in result.ranks)} if samples else ():
        local_workers = [rank for rank in workers if rank.node == number] or workers
        windows = windows_of(slowest(local_workers))
        start = min((rank.first_step_at_seconds or 0.0 for rank in local_workers), default=0.0)
        if not windows.spans or not start:
            return {}
        nodes[number] = _Node(samples.get(number, ()), windows, start, steps / len(workers))
    return nodes


def _one_way(nodes: Sequence[_Node], name: str, way: Way, missing: dict[str, str]) -> OneWay:
    """Return the traffic of an interface of a node in one direction."""
    points = [interface_points(node.samples, name, way) for node in nodes]
    step_bytes: list[float] = []
    means: list[float] = []
    peaks: list[float] = []
    most_readings = 0
    for node, read in zip(nodes, points, strict=True):
        increase = counter_increase(read, node.windows)
        if isinstance(increase, str):
            missing["interfaces"] = increase
        else:
            step_bytes.append(increase / node.steps)
            means.append(increase / node.windows.seconds)
        within = [speed for middle, speed in rates_between(read) if node.windows.contain(middle)]
        most_readings = max(most_readings, len(within))
        if len(within) >= MIN_READINGS:
            peaks.append(max(within))
    if not peaks:
        missing["peaks"] = (
            f"at most {most_readings} samples in the windows of a repeat, and a peak needs"
            f" {MIN_READINGS}: train longer, or shorten measure.sample_seconds"
        )
    # Up to the end of the last window, including evaluations.
    start, stop = nodes[0].first_step_at_seconds, nodes[0].windows.spans[-1][1]
    rates = [(at - start, speed) for at, speed in rates_between(points[0]) if start <= at <= stop]
    return OneWay(
        step_bytes=estimate_mean(step_bytes) if len(step_bytes) == len(nodes) else None,
        mean_bytes_per_second=fmean(means) if means else None,
        peak_bytes_per_second=max(peaks, default=None),
        over_time=smoothed(rates),
    )
