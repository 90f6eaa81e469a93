"""Detection of disturbances in a trial's raw files: drifts, pauses, other processes.

Every kind has a practical threshold.  If chance can exceed it, there is also a test, whose p-value
is stored; a comparison corrects it for the number of its trials.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from statistics import fmean, median

from shardmark.base.files.run_files import CLOCK_LIMITS
from shardmark.base.results.schema import RankRecord, StabilityFinding, StabilityKind
from shardmark.base.statistics.changes import JUMP_POINTS, jump_of, medians, trend_of
from shardmark.bench.analysis.compare.rows import gathered
from shardmark.bench.analysis.trial.rank_metrics import windows_of
from shardmark.bench.analysis.trial.raw_files import Line, by_node, mapping, number
from shardmark.bench.analysis.trial.sampled_metrics import (
    Windows,
    counter_increase,
    device_points,
    device_uuids,
    levels,
    process_points,
)

FALSE_ALARM_RATE = 0.01
"""Probability of a false alarm over all trials of a comparison, for each tested kind."""
DRIFT = 0.05
"""Minimum relative change from the first step or repeat to the last."""
LEAST_JUMP = 1.5
"""Minimum factor between the step times before and after a jump."""
SLOW_FACTOR = 2.0
"""Multiple of the median step time from which a step is slow."""
SLOW_SHARE = 0.05
"""Minimum fraction of the measured time that slow steps take beyond the median."""
OTHERS_SHARE = 0.1
"""Fraction of the cores' time, or of a device's samples, from which other programs disturb."""
WAITING_SHARE = 0.1
"""Fraction of the time with tasks waiting for a core, below which others do not disturb."""
FULL_SHARE = 0.8
"""Fraction of busy cores that replaces it if the kernel does not report waiting tasks."""
MEMORY_SHARE = 0.05
"""Minimum fraction of the time in which a task waited for memory."""
SLOWED_SHARE = 0.1
"""Minimum fraction of the time in which a device was slowed down."""
MIN_WINDOW_SECONDS = 0.2
"""Minimum duration of windows, for which the kernel's resolution of 10 ms is fine enough."""
FEWEST_STEPS = 12


def stability_of_trial(
    ranks: Sequence[RankRecord], steps: Iterable[Line], samples: Sequence[Line]
) -> tuple[StabilityFinding, ...]:
    """Return the disturbances of a trial; `steps` and `samples` are lines of the raw files."""
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
    failures = (text for line in samples if isinstance(text := line.get("failure"), str))
    if (failure := next(failures, None)) is not None:
        text = f"other work would not have been seen any more: {failure}"
        findings += _finding(StabilityKind.UNWATCHED, text, 1.0)
    if len(points) >= FEWEST_STEPS:
        findings += _drift(points)
        findings += _slow_steps([seconds for _, seconds in points])
    machines = gathered((record.kernel or record.host, record) for record in ranks)
    for local_ranks in machines.values():
        findings += _of_machine(local_ranks, samples)
    return (*findings, *_of_devices(samples, windows_of(rank)))


def _drift(points: Sequence[tuple[float, float]]) -> Iterator[StabilityFinding]:
    """Yield jumps and trends of the logarithm of the step time."""
    logs = sorted((step, math.log(seconds)) for step, seconds in points)
    jump = jump_of(medians(logs, JUMP_POINTS))
    if jump is not None and abs(jump.size) >= math.log(LEAST_JUMP):
        times = f"{math.exp(abs(jump.size)):.1f} times {_longer(jump.size)}"
        text = f"steps became {times}, and stayed so, from about step {jump.time:.0f} on"
        yield from _finding(StabilityKind.TRIAL_DRIFT, text, abs(jump.size), jump.p_value)
    trend = trend_of([medians(logs)])
    change = 0.0 if trend is None else math.expm1(trend.slope * (logs[-1][0] - logs[0][0]))
    if trend is not None and abs(change) >= DRIFT:
        text = f"steps became {percent(abs(change))} {_longer(change)} from the first to the last"
        yield from _finding(StabilityKind.TRIAL_DRIFT, text, abs(math.log1p(change)), trend.p_value)


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _longer(change: float) -> str:
    return "longer" if change > 0 else "shorter"


def _slow_steps(seconds: Sequence[float]) -> Iterator[StabilityFinding]:
    middle = median(seconds)
    slow = [step for step in seconds if step > SLOW_FACTOR * middle]
    share = sum(step - middle for step in slow) / sum(seconds)
    if share >= SLOW_SHARE:
        counts = f"{len(slow)} of {len(seconds)} steps took over {SLOW_FACTOR:g} times the median"
        yield from _finding(
            StabilityKind.SLOW_STEPS, f"{counts}: {percent(share)} of the time", share
        )


def _finding(
    kind: StabilityKind, text: str, severity: float, p_value: float | None = None
) -> Iterator[StabilityFinding]:
    """Yield a finding unless its p-value is too large for a single trial."""
    if p_value is None or p_value <= FALSE_ALARM_RATE:
        yield StabilityFinding(kind=kind, text=text, severity=severity, p_value=p_value)


def _of_machine(ranks: Sequence[RankRecord], samples: Sequence[Line]) -> Iterator[StabilityFinding]:
    """Yield disturbances by other work on a machine in the windows of its ranks."""
    nodes = {rank.node for rank in ranks}  # several on one machine read the same counters
    lines = [line for node, group in by_node(samples).items() if node in nodes for line in group]
    lines.sort(key=lambda line: number(line.get("at_seconds")) or 0.0)
    windows = windows_of(next((rank for rank in ranks if rank.windows), None))

    def share_of_time(counter: str) -> float | None:
        points = _machine_points(lines, counter)
        if any(before - after > 1 for (_, before), (_, after) in pairwise(points)):
            return None  # two machines of one name: a counter never falls
        seconds = counter_increase(points, windows)
        return None if isinstance(seconds, str) else seconds / windows.seconds

    cores = max((cores for _, cores in _machine_points(lines, "cores")), default=1.0)
    busy, used = share_of_time("cpu_seconds"), _cores_of(ranks, lines, windows)
    if busy is not None and used is not None and windows.seconds >= MIN_WINDOW_SECONDS:
        others, waiting = max(0.0, busy - used) / cores, share_of_time("cpu_pressure_seconds")
        in_the_way = busy / cores >= FULL_SHARE if waiting is None else waiting >= WAITING_SHARE
        if others >= OTHERS_SHARE and in_the_way:
            text = f"other programs used {percent(others)} of the CPU"
            yield from _finding(StabilityKind.OTHER_PROCESSES, text, others)
    short = share_of_time("memory_pressure_seconds") or 0.0
    if short >= MEMORY_SHARE:
        text = f"programs waited for memory in {percent(short)} of the time"
        yield from _finding(StabilityKind.MEMORY_PRESSURE, text, short)
    hot = share_of_time("throttled_seconds") or 0.0
    if hot >= SLOWED_SHARE:
        text = f"heat slowed the CPU down in {percent(hot)} of the time"
        yield from _finding(StabilityKind.SLOWED_DEVICE, text, hot)


def _machine_points(samples: Sequence[Line], counter: str) -> list[tuple[float, float]]:
    return [
        (at, value)
        for line in samples
        if (at := number(line.get("at_seconds"))) is not None
        and (value := number(mapping(line.get("machine")).get(counter))) is not None
    ]


def _cores_of(
    ranks: Sequence[RankRecord], samples: Sequence[Line], windows: Windows
) -> float | None:
    """Return the mean number of cores that the ranks kept busy; None if a rank has few samples."""
    total = 0.0
    for rank in ranks:
        points = process_points(samples, rank, "cpu_seconds")
        seconds = counter_increase(points, windows)
        inside = [point for point in points if windows.contain(point[0])]
        if isinstance(seconds, str) and inside:  # it ended before the sample that would follow
            (start, low), (end, high) = inside[0], inside[-1]
            if 0.75 * windows.seconds <= end - start <= windows.seconds:  # no gap between windows
                seconds = (high - low) * windows.seconds / (end - start)
        if isinstance(seconds, str):
            return None
        total += seconds / windows.seconds
    return total


def _of_devices(samples: Sequence[Line], windows: Windows) -> Iterator[StabilityFinding]:
    """Yield other processes on CUDA devices, and reasons for reduced clocks."""
    for uuid in device_uuids(samples):
        others = levels(device_points(samples, uuid, "other_processes"), windows)
        share = fmean(count > 0 for count in others) if others else 0.0
        if share >= OTHERS_SHARE:
            count = max(others)
            text = f"{count:.0f} other process{'es' if count > 1 else ''} ran on {uuid}"
            yield from _finding(StabilityKind.SHARED_DEVICE, text, share)
        limits = [
            int(bits) for bits in levels(device_points(samples, uuid, "clock_limits"), windows)
        ]
        reasons = [text for bit, text in CLOCK_LIMITS.items() if any(bits & bit for bits in limits)]
        share = fmean(bool(bits & sum(CLOCK_LIMITS)) for bits in limits) if limits else 0.0
        if share >= SLOWED_SHARE:
            celsius = [value for _, value in device_points(samples, uuid, "temperature_celsius")]
            heat = [f"at most {max(celsius):.0f} °C"] if celsius else []
            text = f"{uuid} was slowed down in {percent(share)} of the samples"
            text += f" ({', '.join([*reasons, *heat])})"
            yield from _finding(StabilityKind.SLOWED_DEVICE, text, share)
