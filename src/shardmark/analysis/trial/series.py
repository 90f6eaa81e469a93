"""What was read over time in one trial, thinned to what a figure can show."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from shardmark.analysis.compare.rows import Row
from shardmark.analysis.trial.raw_files import Line, by_node, mapping, number, objects, raw_lines
from shardmark.analysis.trial.sampled_metrics import Point
from shardmark.core.run_files import SAMPLES_FILE, STEPS_FILE
from shardmark.results.schema import TrialResult
from shardmark.results.store import RunFolder

MOST_POINTS = 300
"""Of one series: more than a screen's figure can tell apart."""
SHORTEST_SECONDS = 0.1
"""Between two readings of a counter: CPU time comes in hundredths of a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OverTime:
    """One quantity of one trial; empty where nothing was read."""

    x: tuple[float, ...] = ()
    """Seconds since the first training step, or number of steps."""
    y: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """From the first training step to the end of the last window, evaluations included."""

    network_bytes_per_second: OverTime
    """Sent over all interfaces of all nodes, loopback included."""
    cpu_percent: OverTime
    """All ranks and their children together; 100 is one busy core."""
    gpu_percent: OverTime
    """Share of time in which some kernel ran, mean over the GPUs in use."""
    power_watts: OverTime
    """All GPUs in use together."""


def sampled(row: Row) -> Sampled | None:
    """The samples of the first repeat that ended ok; None without one, or without its file."""
    trial = _first(row)
    if trial is None or row.folder is None:
        return None
    began = [rank.first_step_at_seconds for rank in trial.ranks]
    ends = [w.started_at_seconds + w.window_seconds for rank in trial.ranks for w in rank.windows]
    start = min((at for at in began if at is not None), default=None)
    nodes = by_node(raw_lines(RunFolder(row.folder).trial_folder(trial.id) / SAMPLES_FILE))
    if start is None or not ends or not nodes:
        return None
    end = max(ends)

    def series(by_node: Sequence[Sequence[Point]], scale: float = 1.0) -> OverTime:
        summed = _summed([points for points in by_node if points])
        return thinned([(at - start, scale * y) for at, y in summed if start <= at <= end])

    busy = [_levels(own, "utilization_percent", mean=True) for own in nodes.values()]
    return Sampled(
        network_bytes_per_second=series(
            [_rates([(_at(sample), _sent(sample)) for sample in own]) for own in nodes.values()]
        ),
        cpu_percent=series(
            [_rates([(_at(sample), _cpu(sample)) for sample in own]) for own in nodes.values()],
            scale=100,
        ),
        gpu_percent=series(busy, scale=1 / max(1, sum(map(bool, busy)))),
        power_watts=series([_levels(own, "power_watts", mean=False) for own in nodes.values()]),
    )


def loss_by_step(row: Row) -> OverTime:
    """Training loss of the first repeat that ended ok, mean over the samples of all ranks."""
    trial = _first(row)
    if trial is None or row.folder is None:
        return OverTime()
    sums: dict[int, tuple[float, float]] = {}
    for line in raw_lines(RunFolder(row.folder).trial_folder(trial.id) / STEPS_FILE):
        step, loss = number(line.get("step")), number(line.get("loss"))
        if step is None or loss is None or not math.isfinite(loss):
            continue
        weight = number(line.get("samples")) or 1.0
        total, samples = sums.get(int(step), (0.0, 0.0))
        sums[int(step)] = (total + loss * weight, samples + weight)
    return thinned([(step + 1, total / weight) for step, (total, weight) in sorted(sums.items())])


def thinned(points: Sequence[Point], most: int = MOST_POINTS) -> OverTime:
    """At most so many of the points, in order of x: the ends, and each stretch's extremes.

    A peak of one reading stays visible, which a mean or every n-th point would hide.
    """
    kept = list(range(len(points)))
    if len(points) > most:
        stretches = most // 2 - 1
        edges = [1 + (len(points) - 2) * index // stretches for index in range(stretches + 1)]
        chosen = {0, len(points) - 1}
        for first, end in pairwise(edges):
            chosen.add(min(range(first, end), key=lambda index: points[index][1]))
            chosen.add(max(range(first, end), key=lambda index: points[index][1]))
        kept = sorted(chosen)
    return OverTime(
        x=tuple(points[index][0] for index in kept), y=tuple(points[index][1] for index in kept)
    )


def _first(row: Row) -> TrialResult | None:
    return next(iter(row.ok_trials), None)


def _summed(nodes: Sequence[Sequence[Point]]) -> Sequence[Point]:
    """The nodes' values together where all are known, at the times of the first node's readings."""
    if len(nodes) < 2:
        return nodes[0] if nodes else []
    first = max(points[0][0] for points in nodes)
    last = min(points[-1][0] for points in nodes)
    times = [at for at, _ in nodes[0] if first <= at <= last]
    readings = [np.asarray(points) for points in nodes]
    total = sum(np.interp(times, points[:, 0], points[:, 1]) for points in readings)
    return list(zip(times, np.asarray(total).tolist(), strict=True))


def _rates(readings: Sequence[tuple[float | None, Mapping[object, float]]]) -> list[Point]:
    """Increase per second of counters, at the middle of two readings, summed over those in both."""
    known = [(at, counters) for at, counters in readings if at is not None and counters]
    rates: list[Point] = []
    if not known:
        return rates
    before, old = known[0]
    for at, counters in known[1:]:
        if at - before < SHORTEST_SECONDS:
            continue
        rises = [counters[key] - old[key] for key in counters.keys() & old.keys()]
        if rises:
            rates.append(((before + at) / 2, max(0.0, sum(rises)) / (at - before)))
        before, old = at, counters
    return rates


def _at(sample: Line) -> float | None:
    return number(sample.get("at_seconds"))


def _sent(sample: Line) -> dict[object, float]:
    """Bytes sent so far by interface."""
    return {
        name: sent
        for name, counters in mapping(sample.get("network")).items()
        if (sent := number(mapping(counters).get("bytes_sent"))) is not None
    }


def _cpu(sample: Line) -> dict[object, float]:
    """CPU seconds so far by process."""
    return {
        (process.get("rank"), process.get("pid")): seconds
        for process in objects(sample, "ranks")
        if (seconds := number(process.get("cpu_seconds"))) is not None
    }


def _levels(samples: Sequence[Line], field: str, *, mean: bool) -> list[Point]:
    """A value of the GPUs at each sampling, mean or sum over them."""
    points: list[Point] = []
    for sample in samples:
        values = [number(gpu.get(field)) for gpu in objects(sample, "gpus")]
        known = [value for value in values if value is not None]
        if (at := _at(sample)) is not None and known:
            points.append((at, sum(known) / (len(known) if mean else 1)))
    return points
