"""What was read over time in one trial, thinned to what a figure can show."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

from shardmark.analysis.compare.rows import Row
from shardmark.analysis.trial.rank_metrics import measured_steps
from shardmark.analysis.trial.raw_files import (
    Line,
    at_seconds,
    number,
    objects,
    raw_lines,
    samples_by_node,
)
from shardmark.analysis.trial.sampled_metrics import Point, network_points, value_at
from shardmark.core.run_files import STEPS_FILE
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
    """Sent over all interfaces of all nodes, as network_sent_bytes."""
    cpu_percent: OverTime
    """All ranks and their children together; 100 is one busy core."""
    gpu_percent: OverTime
    """Share of time in which some kernel ran, mean over the GPUs in use."""
    power_watts: OverTime
    """All GPUs in use together."""


def sampled(row: Row) -> Sampled | None:
    """The samples of the first repeat that counts; None without one, or without its file."""
    if not row.ok_trials or row.folder is None:
        return None
    trial = row.ok_trials[0]
    began = [rank.first_step_at_seconds for rank in trial.ranks]
    ends = [w.started_at_seconds + w.window_seconds for rank in trial.ranks for w in rank.windows]
    start = min((at for at in began if at is not None), default=None)
    nodes = samples_by_node(RunFolder(row.folder).trial_folder(trial.id)).values()
    if start is None or not ends or not nodes:
        return None
    end = max(ends)

    def series(read: Callable[[Sequence[Line]], list[Point]], scale: float = 1.0) -> OverTime:
        summed = _summed([points for node in nodes if (points := read(node))])
        return thinned([(at - start, scale * y) for at, y in summed if start <= at <= end])

    with_gpus = sum(bool(_gpu_points(node, "utilization_percent", fmean)) for node in nodes)
    return Sampled(
        network_bytes_per_second=series(
            lambda own: rates_between(network_points(own, "bytes_sent"))
        ),
        cpu_percent=series(lambda own: rates_between(_cpu_points(own)), scale=100),
        gpu_percent=series(
            lambda own: _gpu_points(own, "utilization_percent", fmean),
            scale=1 / max(1, with_gpus),
        ),
        power_watts=series(lambda own: _gpu_points(own, "power_watts", math.fsum)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LossCurve:
    """Training loss of one trial, and where each of these steps ended."""

    by_step: OverTime = OverTime()
    seconds: tuple[float, ...] = ()
    """Since the first step began; empty where that was not recorded."""
    tokens: tuple[float, ...] = ()
    """Trained on by then, of all ranks, each step as the mean; empty where there are none."""


def loss_curve(row: Row) -> LossCurve:
    """Of the first repeat that counts, mean over the samples of all ranks."""
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
            continue  # added for measuring, after the recipe's last
        if step is None or loss is None or not math.isfinite(loss):
            continue
        weight = number(line.get("samples")) or 1.0
        total, samples = sums.get(int(step), (0.0, 0.0))
        sums[int(step)] = (total + loss * weight, samples + weight)
        began, took = number(line.get("started_at_seconds")), number(line.get("step_seconds"))
        if began is not None and took is not None:
            begins.append(began)
            ends[int(step)] = max(began + took, ends.get(int(step), began))
    curve = thinned([(step + 1, total / weight) for step, (total, weight) in sorted(sums.items())])
    steps = [int(x) - 1 for x in curve.x]
    measured = max(map(measured_steps, trial.ranks), default=0)
    tokens = sum(rank.tokens or 0 for rank in trial.ranks) / max(1, measured)
    return LossCurve(
        by_step=curve,
        seconds=tuple(ends[s] - min(begins) for s in steps) if ends.keys() >= set(steps) else (),
        tokens=tuple(x * tokens for x in curve.x) if tokens else (),
    )


def thinned(points: Sequence[Point], most: int = MOST_POINTS) -> OverTime:
    """At most so many of the points, in order of x: the ends, and each stretch's extremes.

    A peak of one reading stays visible, which a mean or every n-th point would hide.
    """
    kept: Sequence[int] = range(len(points))
    if len(points) > most:
        stretches = most // 2 - 1
        edges = [1 + (len(points) - 2) * index // stretches for index in range(stretches + 1)]
        chosen = {0, len(points) - 1}
        for stretch in pairwise(edges):
            chosen.add(min(range(*stretch), key=lambda index: points[index][1]))
            chosen.add(max(range(*stretch), key=lambda index: points[index][1]))
        kept = sorted(chosen)
    return OverTime(x=tuple(points[n][0] for n in kept), y=tuple(points[n][1] for n in kept))


def rates_between(points: Sequence[Point]) -> list[Point]:
    """A counter's increase per second, at the middle of readings that are not too close for it."""
    rates: list[Point] = []
    before, old = points[0] if points else (0.0, 0.0)
    for at, value in points[1:]:
        if (seconds := at - before) >= SHORTEST_SECONDS:
            rates.append(((before + at) / 2, max(0.0, value - old) / seconds))
            before, old = at, value
    return rates


def _summed(nodes: Sequence[Sequence[Point]]) -> Sequence[Point]:
    """The nodes' values together where all are known, at the times of the first node's readings."""
    if len(nodes) < 2:
        return nodes[0] if nodes else []
    first = max(points[0][0] for points in nodes)
    last = min(points[-1][0] for points in nodes)
    times = [at for at, _ in nodes[0] if first <= at <= last]
    return [(at, sum(value_at(points, at) for points in nodes)) for at in times]


def _cpu_points(samples: Sequence[Line]) -> list[Point]:
    """CPU seconds of all processes, as far as each is in two samples that follow one another."""
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
    """A value of a node's GPUs together at each sampling."""
    points: list[Point] = []
    for sample in samples:
        read = [number(gpu.get(field)) for gpu in objects(sample, "gpus")]
        if known := [value for value in read if value is not None]:
            points.append((at_seconds(sample), combine(known)))
    return points
