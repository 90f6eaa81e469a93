"""Time series of a trial, reduced to the number of points that a figure can show."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean, median

from shardmark.base.files.run_files import STEPS_FILE
from shardmark.base.results.schema import RankRecord, TrialResult
from shardmark.base.results.store import RunFolder
from shardmark.bench.analysis.compare.rows import Row
from shardmark.bench.analysis.trial.rank_metrics import measured_steps
from shardmark.bench.analysis.trial.raw_files import (
    Line,
    at_seconds,
    number,
    objects,
    raw_lines,
    samples_by_node,
)
from shardmark.bench.analysis.trial.sampled_metrics import (
    Point,
    device_points,
    network_points,
    process_points,
    value_at,
)

MAX_POINTS = 300
"""Maximum number of points of a series."""
SMOOTHED_READINGS = 9
"""Number of readings of a running median or mean."""
MIN_INTERVAL_SECONDS = 0.1
"""Minimum time between two readings of a counter: CPU time has a resolution of 10 ms."""
NETWORK = "network_bytes"
"""Field of `readings_by_rank` for the network."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OverTime:
    """A series of a trial; empty without readings."""

    x: tuple[float, ...] = ()
    """Seconds since the first training step, or numbers of steps."""
    y: tuple[float, ...] = ()
    smooth: tuple[tuple[float, ...], tuple[float, ...]] | None = None
    """x and y of the running median or mean; None if it was not computed or readings are few."""


def sampled(row: Row) -> dict[str, OverTime]:
    """Return system metrics of the row's first repeat, from its first step to its last window.

    `network_bytes_per_second` is sent over all interfaces of all nodes; `cpu_percent` is that of
    all ranks and their children, 100 for a busy core; `gpu_percent` is the fraction of the time in
    which a kernel ran, mean over the GPUs in use, and `power_watts` their sum.
    """
    if not row.ok_trials or row.folder is None:
        return {}
    trial = row.ok_trials[0]
    start, end = _trained_between(trial)
    nodes = samples_by_node(RunFolder(row.folder).trial_folder(trial.id)).values()
    if start >= end or not nodes:
        return {}

    def series(read: Callable[[Sequence[Line]], list[Point]], scale: float = 1.0) -> OverTime:
        summed = _summed([points for node in nodes if (points := read(node))])
        return smoothed([(at - start, scale * y) for at, y in summed if start <= at <= end])

    with_gpus = sum(bool(_gpu_points(node, "utilization_percent", fmean)) for node in nodes)
    return {
        "network_bytes_per_second": series(
            lambda lines: rates_between(network_points(lines, "bytes_sent"))
        ),
        "cpu_percent": series(lambda lines: rates_between(_cpu_points(lines)), scale=100),
        "gpu_percent": series(
            lambda lines: _gpu_points(lines, "utilization_percent", fmean),
            scale=1 / max(1, with_gpus),
        ),
        "power_watts": series(lambda lines: _gpu_points(lines, "power_watts", math.fsum)),
    }


def _trained_between(trial: TrialResult) -> tuple[float, float]:
    """Return the instants of the first step and of the end of the last epoch.

    The end is not after the start if one of the two was not recorded.
    """
    began = [rank.first_step_at_seconds for rank in trial.ranks]
    ends = [w.started_at_seconds + w.window_seconds for rank in trial.ranks for w in rank.windows]
    start = min((at for at in began if at is not None), default=math.inf)
    return start, max(ends, default=-math.inf)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossCurve:
    """Training loss of a trial by step, time and tokens."""

    by_step: OverTime = OverTime()
    seconds: tuple[float, ...] = ()
    """Time from the start of the first step to the end of each step; empty if not recorded."""
    tokens: tuple[float, ...] = ()
    """Number of tokens of all ranks up to each step; empty for tasks without tokens."""


def loss_curve(row: Row) -> LossCurve:
    """Return the training loss of the row's first repeat, as the mean over all ranks' samples."""
    if not row.ok_trials or row.folder is None:
        return LossCurve()
    trial = row.ok_trials[0]
    sums: dict[int, tuple[float, float]] = {}
    begins: list[float] = []
    ends: dict[int, float] = {}
    folder = RunFolder(row.folder).trial_folder(trial.id)
    for line in raw_lines(folder / STEPS_FILE):
        step, loss = number(line.get("step")), number(line.get("loss"))
        if line.get("epoch", 0) is None:
            continue  # a step after the end of the recipe, added for the measurement
        if step is None or loss is None or not math.isfinite(loss):
            continue
        weight = number(line.get("samples")) or 1.0
        total, samples = sums.get(int(step), (0.0, 0.0))
        sums[int(step)] = (total + loss * weight, samples + weight)
        start = number(line.get("started_at_seconds"))
        duration = number(line.get("step_seconds"))
        if start is not None and duration is not None:
            begins.append(start)
            ends[int(step)] = max(start + duration, ends.get(int(step), start))
    curve = thinned([(step + 1, total / weight) for step, (total, weight) in sorted(sums.items())])
    steps = [int(x) - 1 for x in curve.x]
    measured = max(map(measured_steps, trial.ranks), default=0)
    tokens = sum(rank.tokens or 0 for rank in trial.ranks) / max(1, measured)
    return LossCurve(
        by_step=curve,
        seconds=tuple(ends[s] - min(begins) for s in steps) if ends.keys() >= set(steps) else (),
        tokens=tuple(x * tokens for x in curve.x) if tokens else (),
    )


def thinned(points: Sequence[Point], max_points: int = MAX_POINTS) -> OverTime:
    """Reduce a series to its ends and the extremes of equal parts.

    Unlike a mean or every n-th point, the extremes keep short peaks visible.
    """
    indices: Sequence[int] = range(len(points))
    if len(points) > max_points:
        parts = max_points // 2 - 1
        edges = [1 + (len(points) - 2) * index // parts for index in range(parts + 1)]
        selected = {0, len(points) - 1}
        for part in pairwise(edges):
            selected.add(min(range(*part), key=lambda index: points[index][1]))
            selected.add(max(range(*part), key=lambda index: points[index][1]))
        indices = sorted(selected)
    return OverTime(x=tuple(points[n][0] for n in indices), y=tuple(points[n][1] for n in indices))


def smoothed(points: Sequence[Point], reduce: Callable[[list[float]], float] = fmean) -> OverTime:
    """Return the thinned series with its running mean, or median, of all its points.

    A mean suits the rate of a counter: steps send in bursts, whose median is 0.
    """
    series = thinned(points)
    if len(points) < 2 * SMOOTHED_READINGS:
        return series
    half = SMOOTHED_READINGS // 2
    values = [y for _, y in points]
    reduced = [reduce(values[max(0, at - half) : at + half + 1]) for at in range(len(values))]
    smooth = thinned([(x, y) for (x, _), y in zip(points, reduced, strict=True)])
    return replace(series, smooth=(smooth.x, smooth.y))


def readings_by_rank(row: Row) -> dict[str, dict[int, OverTime]]:
    """Return the readings of the processes of each rank by field, of the row's first repeat.

    A rank's values are those of its process and its children.  `network_bytes` is a rate in bytes a
    second: over the NVLinks of its GPUs, or into sockets and files on a CPU.
    """
    if not row.ok_trials or row.folder is None:
        return {}
    trial = row.ok_trials[0]
    start, end = _trained_between(trial)
    nodes = samples_by_node(RunFolder(row.folder).trial_folder(trial.id)).values()
    samples = [line for lines in nodes for line in lines]

    def readings(rank: RankRecord, name: str) -> OverTime:
        sends = name == NETWORK
        points = _sent_points(samples, rank) if sends else process_points(samples, rank, name)
        measured = [(at - start, value) for at, value in points if start <= at <= end]
        return smoothed(measured, fmean if sends else median)

    return {
        name: {rank.rank: series for rank in trial.ranks if (series := readings(rank, name)).x}
        for name in ("threads", "processes", "rss_bytes", NETWORK)
    }


def _sent_points(samples: Sequence[Line], rank: RankRecord) -> Sequence[Point]:
    if rank.device == "cpu":
        return rates_between(process_points(samples, rank, "written_bytes"))
    counters = (device_points(samples, uuid, "nvlink_sent_bytes") for uuid in rank.device_uuids)
    return _summed([rates_between(points) for points in counters if points])


def rates_between(points: Sequence[Point]) -> list[Point]:
    """Return a counter's rate between readings that are at least the minimum interval apart."""
    rates: list[Point] = []
    before, old = points[0] if points else (0.0, 0.0)
    for at, value in points[1:]:
        if (seconds := at - before) >= MIN_INTERVAL_SECONDS:
            rates.append(((before + at) / 2, max(0.0, value - old) / seconds))
            before, old = at, value
    return rates


def _summed(nodes: Sequence[Sequence[Point]]) -> Sequence[Point]:
    """Return the sum over nodes at the times of the first node, where all nodes have values."""
    if len(nodes) < 2:
        return nodes[0] if nodes else []
    first = max(points[0][0] for points in nodes)
    last = min(points[-1][0] for points in nodes)
    times = [at for at, _ in nodes[0] if first <= at <= last]
    return [(at, sum(value_at(points, at) for points in nodes)) for at in times]


def _cpu_points(samples: Sequence[Line]) -> list[Point]:
    """Return the CPU seconds of all processes that are in two consecutive samples."""
    points: list[Point] = []
    before: dict[object, float] = {}
    total = 0.0
    for sample in samples:
        used: dict[object, float] = {
            (process.get("rank"), process.get("pid")): seconds
            for process in objects(sample, "ranks")
            if (seconds := number(process.get("cpu_seconds"))) is not None
        }
        if used:
            total += sum(max(0.0, used[key] - before[key]) for key in used.keys() & before.keys())
            points.append((at_seconds(sample), total))
            before = used
    return points


def _gpu_points(
    samples: Sequence[Line], field: str, combine: Callable[[list[float]], float]
) -> list[Point]:
    """Return a combined value of a node's GPUs for each sample."""
    points: list[Point] = []
    for sample in samples:
        readings = [number(gpu.get(field)) for gpu in objects(sample, "gpus")]
        if values := [value for value in readings if value is not None]:
            points.append((at_seconds(sample), combine(values)))
    return points
