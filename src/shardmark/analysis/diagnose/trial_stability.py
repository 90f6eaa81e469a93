"""What disturbed one trial, from its raw files when it ends: drifts, pauses, others on the machine.

Every kind has a practical threshold, below which nobody need care, and where chance could reach it
also a test, whose p value is stored: a comparison corrects it for the number of its trials.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import median

from shardmark.analysis.statistics.changes import JUMP_POINTS, jump_of, thinned, trend_of
from shardmark.analysis.trial.raw_files import number
from shardmark.measure.system.gpus import CLOCK_LIMITS
from shardmark.results.schema import RankRecord, StabilityFinding, StabilityKind

FALSE_ALARM_RATE = 0.01
"""Of all trials of a comparison together, for each kind that is tested."""
DRIFT = 0.05
"""Relative change from the first step, or repeat, to the last."""
LEAST_JUMP = 1.5
"""Factor between the steps before and after a lasting change."""
SLOW_FACTOR = 2.0
"""A step that takes so many times the median is slow."""
SLOW_SHARE = 0.05
"""Of the measured time, that slow steps took beyond the median."""
OTHERS_SHARE = 0.1
"""Of the machine's cores."""
SLOWED_SHARE = 0.1
"""Of the samples in which a device was slowed down."""
FEWEST_STEPS = 12

Line = Mapping[str, object]
Span = tuple[float, float]
"""Unix time."""


def stability_of_trial(
    ranks: Sequence[RankRecord], steps: Iterable[Line], samples: Sequence[Line]
) -> tuple[StabilityFinding, ...]:
    """Of the first rank that measured; `steps` and `samples` are the lines of the raw files."""
    rank = next((rank for rank in ranks if rank.windows), None)
    if rank is None:
        return ()
    points = [
        (step, seconds)
        for line in steps
        if line.get("measured") is True
        and line.get("rank") == rank.rank
        and (step := number(line.get("step"))) is not None
        and (seconds := number(line.get("step_seconds"))) is not None
        and seconds > 0
    ]
    findings: list[StabilityFinding] = []
    if len(points) >= FEWEST_STEPS:
        findings += _drift(points)
        findings += _slow_steps([seconds for _, seconds in points])
    return (*findings, *_of_machine(samples, spans_of(rank)))


def _drift(points: Sequence[tuple[float, float]]) -> Iterator[StabilityFinding]:
    """Of the logarithm: a share of the step's time, whatever the step's time is."""
    logs = sorted((step, math.log(seconds)) for step, seconds in points)
    jump = jump_of(thinned(logs, JUMP_POINTS))
    if jump is not None and abs(jump.size) >= math.log(LEAST_JUMP):
        times = f"{math.exp(abs(jump.size)):.1f} times {_longer(jump.size)}"
        text = f"steps became {times}, and stayed so, from about step {jump.time:.0f} on"
        yield from _finding(StabilityKind.TRIAL_DRIFT, text, abs(jump.size), jump.p_value)
    trend = trend_of([thinned(logs)])
    change = 0.0 if trend is None else math.expm1(trend.slope * (logs[-1][0] - logs[0][0]))
    if trend is not None and abs(change) >= DRIFT:
        text = f"steps became {abs(change):.0%} {_longer(change)} from the first to the last"
        yield from _finding(StabilityKind.TRIAL_DRIFT, text, abs(math.log1p(change)), trend.p_value)


def _longer(change: float) -> str:
    return "longer" if change > 0 else "shorter"


def _slow_steps(seconds: Sequence[float]) -> Iterator[StabilityFinding]:
    middle = median(seconds)
    slow = [each for each in seconds if each > SLOW_FACTOR * middle]
    share = sum(each - middle for each in slow) / sum(seconds)
    if share >= SLOW_SHARE:
        text = (
            f"{len(slow)} of {len(seconds)} steps took over {SLOW_FACTOR:g} times the median:"
            f" {share:.0%} of the time"
        )
        yield from _finding(StabilityKind.SLOW_STEPS, text, share)


def _of_machine(samples: Sequence[Line], spans: Sequence[Span]) -> Iterator[StabilityFinding]:
    others = share_of_others(samples, spans)
    if others is not None and others[0] >= OTHERS_SHARE:
        text = f"other programs used {others[0]:.0%} of the {others[1]} cores"
        yield from _finding(StabilityKind.OTHER_PROCESSES, text, others[0])
    for uuid, share, reasons in slowed_devices(samples, spans):
        if share >= SLOWED_SHARE:
            hottest = hottest_celsius(samples, uuid)
            heat = "" if hottest is None else f", at most {hottest:.0f} °C"
            text = f"{uuid} was slowed down in {share:.0%} of the samples ({reasons}{heat})"
            yield from _finding(StabilityKind.SLOWED_DEVICE, text, share)


def _finding(
    kind: StabilityKind, text: str, severity: float, p_value: float | None = None
) -> Iterator[StabilityFinding]:
    """None where chance would show as much too often in a single trial already."""
    if p_value is None or p_value <= FALSE_ALARM_RATE:
        yield StabilityFinding(kind=kind, text=text, severity=severity, p_value=p_value)


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
