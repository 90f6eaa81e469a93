"""What passed over each interface of each node while a row trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

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
    ranks: int
    """That run on the node."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trial:
    """One trial's samples by node.  Nodes' clocks need not agree."""

    result: TrialResult
    steps: float
    """That a worker took in its windows, mean over the workers."""
    nodes: Mapping[int, Sequence[Line]]
    windows: Mapping[int, Windows]
    """Of the slowest worker of each node, by that node's clock; of all where none trains there."""
    first_step_at_seconds: Mapping[int, float]


def traffic_of(row: Row, *, repeats: int | None = None) -> TrafficOfRow:
    """From the raw samples of the trials that count, or of the first `repeats` of them."""
    read = (_read(row, trial) for trial in row.ok_trials[:repeats])
    trials = [trial for trial in read if trial is not None]
    if not trials:
        return TrafficOfRow(row=row, missing={"interfaces": "no samples were stored"})
    missing: dict[str, str] = {}
    places = {
        (node, str(name))
        for trial in trials
        for node, samples in trial.nodes.items()
        for sample in samples
        for name in mapping(sample.get("network"))
    }
    interfaces = [
        Interface(
            node=node,
            name=name,
            ranks=sum(rank.node == node for rank in trials[0].result.ranks),
            sent=_one_way(trials, node, name, "bytes_sent", missing),
            received=_one_way(trials, node, name, "bytes_received", missing),
        )
        for node, name in sorted(places)
    ]
    least = IDLE_SHARE * max((each.carried_bytes_per_second for each in interfaces), default=0.0)
    shown = tuple(each for each in interfaces if each.carried_bytes_per_second > least)
    return TrafficOfRow(row=row, interfaces=shown, missing=missing)


def _read(row: Row, result: TrialResult) -> _Trial | None:
    """None where there are no samples, or nothing was measured."""
    workers = workers_of(result)
    steps = sum(map(measured_steps, workers))
    if row.folder is None or not steps:
        return None
    samples = samples_by_node(RunFolder(row.folder).trial_folder(result.id))
    windows: dict[int, Windows] = {}
    began: dict[int, float] = {}
    for node in {*samples, *(rank.node for rank in result.ranks)}:
        there = [rank for rank in workers if rank.node == node] or workers
        windows[node] = windows_of(slowest(there))
        began[node] = min((rank.first_step_at_seconds or 0.0 for rank in there), default=0.0)
        if not windows[node].spans or not began[node]:
            return None
    if not samples:
        return None
    return _Trial(
        result=result,
        steps=steps / len(workers),
        nodes=samples,
        windows=windows,
        first_step_at_seconds=began,
    )


def _one_way(
    trials: Sequence[_Trial], node: int, name: str, way: Way, missing: dict[str, str]
) -> OneWay:
    points = [interface_points(trial.nodes.get(node, ()), name, way) for trial in trials]
    step_bytes: list[float] = []
    means: list[float] = []
    peaks: list[float] = []
    most_readings = 0
    for trial, read in zip(trials, points, strict=True):
        windows = trial.windows[node]
        increase = counter_increase(read, windows)
        if isinstance(increase, str):
            missing["interfaces"] = increase
        else:
            step_bytes.append(increase / trial.steps)
            means.append(increase / windows.seconds)
        within = [speed for middle, speed in rates_between(read) if windows.hold(middle)]
        most_readings = max(most_readings, len(within))
        if len(within) >= FEWEST_READINGS:
            peaks.append(max(within))
    if not peaks:
        missing["peaks"] = (
            f"at most {most_readings} samples in the windows of a repeat, and a peak needs"
            f" {FEWEST_READINGS}: train longer, or shorten measure.sample_seconds"
        )
    # To the end of the last window, evaluations included.
    start = trials[0].first_step_at_seconds[node]
    stop = trials[0].windows[node].spans[-1][1]
    rates = [(at - start, speed) for at, speed in rates_between(points[0]) if start <= at <= stop]
    return OneWay(
        step_bytes=estimate_mean(step_bytes) if len(step_bytes) == len(trials) else None,
        mean_bytes_per_second=fmean(means) if means else None,
        peak_bytes_per_second=max(peaks, default=None),
        over_time=thinned(rates),
    )
