"""What the machine did to a trial: other processes on its cores, devices that ran too hot."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import pairwise

from shardmark.analysis.trial.over_ranks import number
from shardmark.analysis.trial.raw_files import Line
from shardmark.measure.system.gpus import CLOCK_LIMITS
from shardmark.results.schema import RankRecord

Span = tuple[float, float]
"""Unix time."""


def spans_of(rank: RankRecord) -> list[Span]:
    """When the rank's steps were measured."""
    return [
        (one.started_at_seconds, one.started_at_seconds + one.window_seconds)
        for one in rank.windows
    ]


def share_of_others(samples: Sequence[Line], spans: Sequence[Span]) -> tuple[float, int] | None:
    """Share of the machine's CPU time that no rank used in those spans, and the number of cores.

    Of several machines, that of which others used most.  None where the samples do not tell: they
    do not lie around a span, or are of an older version.
    """
    together = _share_of_others(samples, spans)
    nodes = dict.fromkeys(sample.get("node") for sample in samples)
    if together is not None or len(nodes) < 2:
        return together  # nodes on one machine, as those of a bench, read the same counter
    each = (
        _share_of_others([sample for sample in samples if sample.get("node") == node], spans)
        for node in nodes
    )
    return max((one for one in each if one is not None), default=None)


def _share_of_others(samples: Sequence[Line], spans: Sequence[Span]) -> tuple[float, int] | None:
    machine = [
        (at, used, cores)
        for sample in samples
        if (at := number(sample.get("at_seconds"))) is not None
        and isinstance(of_machine := sample.get("machine"), Mapping)
        and (used := number(of_machine.get("cpu_seconds"))) is not None
        and (cores := number(of_machine.get("cores"))) is not None
    ]
    seconds = sum(end - start for start, end in spans)
    if not machine or seconds <= 0 or machine[0][2] < 1:
        return None
    if any(before - after > cores for (_, before, cores), (_, after, _) in pairwise(machine)):
        return None  # of several machines; a little less may be two readings at the same moment
    increase = _increase([(at, used) for at, used, _ in machine], spans)
    ours = [_increase(points, spans) for points in _by_rank(samples).values()]
    known = [one for one in ours if one is not None]
    if increase is None or not known or len(known) < len(ours):
        return None
    cores = int(machine[0][2])
    return max(0.0, increase - sum(known)) / (cores * seconds), cores


def slowed_devices(samples: Sequence[Line], spans: Sequence[Span]) -> list[tuple[str, float, str]]:
    """UUID, share of the samples in those spans in which it was slowed down, and by what."""
    bits: dict[str, list[int]] = {}
    for sample in samples:
        at = number(sample.get("at_seconds"))
        if at is not None and any(start <= at <= end for start, end in spans):
            for gpu in _objects(sample.get("gpus")):
                found = number(gpu.get("clock_limits"))
                if found is not None:
                    bits.setdefault(str(gpu.get("uuid")), []).append(int(found))
    mask = sum(CLOCK_LIMITS)
    result = []
    for uuid, each in sorted(bits.items()):
        slowed = [found for found in each if found & mask]
        reasons = [text for bit, text in CLOCK_LIMITS.items() if any(one & bit for one in slowed)]
        if slowed:
            result.append((uuid, len(slowed) / len(each), ", ".join(reasons)))
    return result


def hottest_celsius(samples: Sequence[Line], uuid: str) -> float | None:
    found = [
        number(gpu.get("temperature_celsius"))
        for sample in samples
        for gpu in _objects(sample.get("gpus"))
        if gpu.get("uuid") == uuid
    ]
    return max((one for one in found if one is not None), default=None)


def busy_at_start(environment: Mapping[str, object]) -> tuple[float, list[str]] | None:
    """Share of the usable cores that other processes took when the run began, and their names."""
    load, cpu = environment.get("load"), environment.get("cpu")
    cores = number(cpu.get("usable_cores")) if isinstance(cpu, Mapping) else None
    if not isinstance(load, Mapping) or not cores:
        return None
    busy = _objects(load.get("busy_processes"))
    percents = [number(one.get("cpu_percent")) or 0.0 for one in busy]
    return sum(percents) / 100 / cores, [str(one.get("name")) for one in busy]


def _by_rank(samples: Sequence[Line]) -> dict[tuple[object, object], list[tuple[float, float]]]:
    """By number and process, since a process that is started again counts from zero."""
    points: dict[tuple[object, object], list[tuple[float, float]]] = {}
    for sample in samples:
        at = number(sample.get("at_seconds"))
        for one in _objects(sample.get("ranks")):
            used = number(one.get("cpu_seconds"))
            if at is not None and used is not None:
                points.setdefault((one.get("rank"), one.get("pid")), []).append((at, used))
    return points


def _increase(points: Sequence[tuple[float, float]], spans: Sequence[Span]) -> float | None:
    """Of a counter within the spans, interpolated; None where a span has no sample around it."""
    if len(points) < 2 or any(a > b for (a, _), (b, _) in pairwise(points)):
        return None
    if any(start < points[0][0] or end > points[-1][0] for start, end in spans):
        return None
    return sum(_value_at(points, end) - _value_at(points, start) for start, end in spans)


def _value_at(points: Sequence[tuple[float, float]], time: float) -> float:
    index = min(max(bisect_left(points, (time, float("-inf"))), 1), len(points) - 1)
    (before, low), (after, high) = points[index - 1], points[index]
    return low if after == before else low + (high - low) * (time - before) / (after - before)


def _objects(found: object) -> list[Mapping[str, object]]:
    return [one for one in found if isinstance(one, Mapping)] if isinstance(found, list) else []
