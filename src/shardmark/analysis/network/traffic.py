"""What passed over each interface of each node while a row trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal, NamedTuple

from shardmark.analysis.compare.rows import Row
from shardmark.analysis.compare.series import OverTime, rates_between, thinned
from shardmark.analysis.statistics.intervals import Estimate, estimate_mean
from shardmark.analysis.trial.rank_metrics import measured_steps, slowest, windows_of, workers_of
from shardmark.analysis.trial.raw_files import Line, mapping, samples_by_node
from shardmark.analysis.trial.sampled_metrics import Windows, counter_increase, interface_points
from shardmark.results.schema import TrialResult
from shardmark.results.store import RunFolder

FEWEST_READINGS = 10
"""In a repeat's windows, for a peak: fewer miss what goes on between them."""
IDLE_SHARE = 1e-3
"""An interface that carried less than this of what the busiest one did is not shown."""
Way = Literal["bytes_sent", "bytes_received"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OneWay:
    """What passed over an interface in one direction; means over the repeats."""

    step_bytes: Estimate | None
    """In the time of a step, of all ranks there; None where the row's `missing` says why."""
    mean_bytes_per_second: float | None
    """In the measured windows."""
    peak_bytes_per_second: float | None
    """Between two samplings in the windows; the largest of the repeats with enough of them."""
    over_time: OverTime
    """Bytes per second over seconds since the first step, of the first repeat."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interface:
    """One interface of one node."""

    node: int
    name: str
    sent: OneWay
    received: OneWay

    @property
    def carried_bytes_per_second(self) -> float:
        """Of the busier direction."""
        return max(way.mean_bytes_per_second or 0.0 for way in (self.sent, self.received))


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficOfRow:
    """One row's interfaces."""

    row: Row
    interfaces: tuple[Interface, ...] = ()
    """Without those that carried next to nothing."""
    missing: Mapping[str, str]
    """`interfaces`, `peaks`: why there are none, or some are not known."""


class _Node(NamedTuple):
    """What one trial left on one node.  Nodes' clocks need not agree."""

    samples: Sequence[Line]
    windows: Windows
    """Of the slowest worker there, by that node's clock; of all where none trains there."""
    first_step_at_seconds: float
    steps: float
    """That a worker took in its windows, mean over all workers."""


def traffic_of(row: Row, *, repeats: int | None = None) -> TrafficOfRow:
    """From the raw samples of the trials that count, or of the first `repeats` of them."""
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
    interfaces = []
    for number, name in sorted(places):
        repeated = [nodes[number] for nodes in trials if number in nodes]
        sent = _one_way(repeated, name, "bytes_sent", missing)
        received = _one_way(repeated, name, "bytes_received", missing)
        interfaces.append(Interface(node=number, name=name, sent=sent, received=received))
    least = IDLE_SHARE * max((each.carried_bytes_per_second for each in interfaces), default=0.0)
    shown = tuple(each for each in interfaces if each.carried_bytes_per_second > least)
    return TrafficOfRow(row=row, interfaces=shown, missing=missing)


def _read(row: Row, result: TrialResult) -> dict[int, _Node]:
    """By number; none where there are no samples, or nothing was measured."""
    workers = workers_of(result)
    steps = sum(map(measured_steps, workers))
    if row.folder is None or not steps:
        return {}
    samples = samples_by_node(RunFolder(row.folder).trial_folder(result.id))
    nodes = {}
    for number in {*samples, *(rank.node for rank in result.ranks)} if samples else ():
        there = [rank for rank in workers if rank.node == number] or workers
        windows = windows_of(slowest(there))
        began = min((rank.first_step_at_seconds or 0.0 for rank in there), default=0.0)
        if not windows.spans or not began:
            return {}
        nodes[number] = _Node(samples.get(number, ()), windows, began, steps / len(workers))
    return nodes


def _one_way(nodes: Sequence[_Node], name: str, way: Way, missing: dict[str, str]) -> OneWay:
    """On one node, over the repeats."""
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
        within = [speed for middle, speed in rates_between(read) if node.windows.hold(middle)]
        most_readings = max(most_readings, len(within))
        if len(within) >= FEWEST_READINGS:
            peaks.append(max(within))
    if not peaks:
        missing["peaks"] = (
            f"at most {most_readings} samples in the windows of a repeat, and a peak needs"
            f" {FEWEST_READINGS}: train longer, or shorten measure.sample_seconds"
        )
    # To the end of the last window, evaluations included.
    start, stop = nodes[0].first_step_at_seconds, nodes[0].windows.spans[-1][1]
    rates = [(at - start, speed) for at, speed in rates_between(points[0]) if start <= at <= stop]
    return OneWay(
        step_bytes=estimate_mean(step_bytes) if len(step_bytes) == len(nodes) else None,
        mean_bytes_per_second=fmean(means) if means else None,
        peak_bytes_per_second=max(peaks, default=None),
        over_time=thinned(rates),
    )
