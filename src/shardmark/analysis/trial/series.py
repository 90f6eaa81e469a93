"""What was read over time in one trial, thinned to what a figure can show."""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from shardmark.analysis.compare.rows import Row
from shardmark.analysis.trial.over_ranks import number
from shardmark.core.run_files import SAMPLES_FILE, STEPS_FILE
from shardmark.results.schema import TrialResult
from shardmark.results.store import RunFolder

MOST_POINTS = 300
"""Of one series: more than a screen's figure can tell apart."""
MOST_BYTES = 64 * 2**20
"""Of a raw file that is read for a figure."""
SHORTEST_SECONDS = 0.1
"""Between two readings of a counter: CPU time comes in hundredths of a second."""

Line = Mapping[str, object]


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
    ends = [
        one.started_at_seconds + one.window_seconds for rank in trial.ranks for one in rank.windows
    ]
    start = min((at for at in began if at is not None), default=None)
    samples = list(lines_of(RunFolder(row.folder).trial_folder(trial.id) / SAMPLES_FILE))
    if start is None or not ends or not samples:
        return None
    end = max(ends)

    nodes = _by_node(samples)

    def series(points: Sequence[Sequence[tuple[float, float]]], scale: float = 1.0) -> OverTime:
        summed = _summed([own for own in points if own])
        return thinned([(at - start, scale * one) for at, one in summed if start <= at <= end])

    busy = [_levels(own, "utilization_percent", mean=True) for own in nodes]
    return Sampled(
        network_bytes_per_second=series(
            [_rates([(_at(one), _sent(one)) for one in own]) for own in nodes]
        ),
        cpu_percent=series(
            [_rates([(_at(one), _cpu(one)) for one in own]) for own in nodes], scale=100
        ),
        gpu_percent=series(busy, scale=1 / max(1, sum(map(bool, busy)))),
        power_watts=series([_levels(own, "power_watts", mean=False) for own in nodes]),
    )


def _by_node(samples: Sequence[Line]) -> list[list[Line]]:
    """A sample of a trial on one node does not name it."""
    nodes: dict[object, list[Line]] = {}
    for sample in samples:
        nodes.setdefault(sample.get("node", 0), []).append(sample)
    return list(nodes.values())


def _summed(nodes: Sequence[Sequence[tuple[float, float]]]) -> list[tuple[float, float]]:
    """The nodes' values together where all are known, at the times of the first node's readings."""
    if len(nodes) < 2:
        return [point for own in nodes for point in own]
    first = max(own[0][0] for own in nodes)
    last = min(own[-1][0] for own in nodes)
    times = [at for at, _ in nodes[0] if first <= at <= last]
    return [(at, math.fsum(_between(own, at) for own in nodes)) for at in times]


def _between(points: Sequence[tuple[float, float]], at: float) -> float:
    """Linear between the readings before and after, which there must be."""
    place = bisect_left(points, (at, -math.inf))
    after, above = points[place]
    before, below = points[max(0, place - 1)]
    return above if after == before else below + (above - below) * (at - before) / (after - before)


def loss_by_step(row: Row) -> OverTime:
    """Training loss of the first repeat that ended ok, mean over the samples of all ranks."""
    trial = _first(row)
    if trial is None or row.folder is None:
        return OverTime()
    sums: dict[int, tuple[float, float]] = {}
    for line in lines_of(RunFolder(row.folder).trial_folder(trial.id) / STEPS_FILE):
        step, loss = number(line.get("step")), number(line.get("loss"))
        if step is None or loss is None or not math.isfinite(loss):
            continue
        weight = number(line.get("samples")) or 1.0
        total, samples = sums.get(int(step), (0.0, 0.0))
        sums[int(step)] = (total + loss * weight, samples + weight)
    return thinned([(step + 1, total / weight) for step, (total, weight) in sorted(sums.items())])


def thinned(points: Sequence[tuple[float, float]], most: int = MOST_POINTS) -> OverTime:
    """At most so many of the points, in order of x: the ends, and each stretch's extremes.

    A peak of one reading stays visible, which a mean or every n-th point would hide.
    """
    kept = list(range(len(points)))
    if len(points) > most:
        stretches = most // 2 - 1
        edges = [1 + (len(points) - 2) * one // stretches for one in range(stretches + 1)]
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


def lines_of(path: Path) -> Iterator[Line]:
    """The JSON objects of a file; a broken line is left out, and nothing comes of a huge file."""
    try:
        if path.stat().st_size > MOST_BYTES:
            return
        with path.open(encoding="utf-8", errors="replace") as file:
            for text in file:
                try:
                    line = json.loads(text)
                except (ValueError, RecursionError):
                    continue
                if isinstance(line, dict):
                    yield line
    except OSError:
        return


def _rates(
    readings: Sequence[tuple[float | None, Mapping[object, float]]],
) -> list[tuple[float, float]]:
    """Increase per second of counters, at the middle of two readings, summed over those in both."""
    known = [(at, counters) for at, counters in readings if at is not None and counters]
    rates: list[tuple[float, float]] = []
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
    network = sample.get("network")
    counters = network.items() if isinstance(network, Mapping) else ()
    return {
        name: sent
        for name, one in counters
        if isinstance(one, Mapping) and (sent := number(one.get("bytes_sent"))) is not None
    }


def _cpu(sample: Line) -> dict[object, float]:
    """CPU seconds so far by process."""
    return {
        (one.get("rank"), one.get("pid")): seconds
        for one in _objects(sample, "ranks")
        if (seconds := number(one.get("cpu_seconds"))) is not None
    }


def _levels(samples: Sequence[Line], field: str, *, mean: bool) -> list[tuple[float, float]]:
    """A value of the GPUs at each sampling, mean or sum over them."""
    found: list[tuple[float, float]] = []
    for sample in samples:
        at = _at(sample)
        values = [number(gpu.get(field)) for gpu in _objects(sample, "gpus")]
        known = [value for value in values if value is not None]
        if at is not None and known:
            found.append((at, sum(known) / (len(known) if mean else 1)))
    return found


def _objects(sample: Line, key: str) -> list[Line]:
    found = sample.get(key)
    return [one for one in found if isinstance(one, Mapping)] if isinstance(found, list) else []
