"""Warns of runs that were not calm, with the remedy: a number can be precise and still be wrong.

Every kind has a practical threshold, below which nobody need care, and where chance could reach it
also a test: all trials of a comparison together raise a false alarm of a kind with a probability of
about `FALSE_ALARM_RATE`.  `docs/method/statistics.md` has the evidence.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from statistics import fmean, median

from shardmark.analysis.compare.comparison import Comparison
from shardmark.analysis.compare.rows import Row
from shardmark.analysis.diagnose.machine_stability import (
    Span,
    busy_at_start,
    hottest_celsius,
    share_of_others,
    slowed_devices,
    spans_of,
)
from shardmark.analysis.statistics.intervals import two_sided_p_value
from shardmark.analysis.statistics.lasting_change import lasting_change
from shardmark.analysis.statistics.trends import thinned, trend_of
from shardmark.analysis.statistics.verdicts import METRIC
from shardmark.analysis.trial.over_ranks import number
from shardmark.analysis.trial.raw_files import Line, raw_lines
from shardmark.core.run_files import SAMPLES_FILE, STEPS_FILE
from shardmark.results.schema import TrialResult
from shardmark.results.store import RunFolder

FALSE_ALARM_RATE = 0.01
DRIFT = 0.05
"""Relative change from the first to the last."""
SLOW_FACTOR = 2.0
"""A step that takes so many times the median is slow."""
SLOW_SHARE = 0.05
"""Of the measured time, that slow steps took beyond the median."""
OUTLYING = 0.1
"""Distance of a repeat from the others of its row."""
OTHERS_SHARE = 0.1
"""Of the machine's cores."""
SLOWED_SHARE = 0.1
"""Of the samples in which a device was slowed down."""

FEWEST_STEPS = 12


class Kind(StrEnum):
    """What was not calm."""

    TRIAL_DRIFT = "drift within a trial"
    RUN_DRIFT = "drift over repeats"
    SLOW_STEPS = "slow steps"
    OUTLYING_REPEAT = "outlying repeat"
    OTHER_PROCESSES = "other processes"
    SLOWED_DEVICE = "device slowed down"


REMEDIES = {
    Kind.TRIAL_DRIFT: "if steps became shorter, raise measure.warmup_steps; if longer, look for "
    "heat, growing memory, another process or a slower link, and measure again",
    Kind.RUN_DRIFT: "warm the machine up with a run that is thrown away, or wait until it is calm; "
    "ratios of the same repeat hold, absolute values less",
    Kind.SLOW_STEPS: "look for pauses (data that are not ready, checkpoints, other processes); "
    "more steps make them weigh what they weigh in a long training",
    Kind.OUTLYING_REPEAT: "read the trial's log.txt; run more repeats (from ten on the outer "
    "ones do not count)",
    Kind.OTHER_PROCESSES: "stop them or use the machine when it is free, then run again",
    Kind.SLOWED_DEVICE: "cool the device or lower its power limit until it holds its clocks",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Instability:
    """One thing that was not calm, and what to do."""

    kind: Kind
    place: str
    """The trial's id; of the run, its folder."""
    text: str
    remedy: str


@dataclass(frozen=True, slots=True)
class _Finding:
    kind: Kind
    place: str
    text: str
    severity: float
    """In its kind, for the order."""


def warnings_of(comparison: Comparison) -> tuple[Instability, ...]:
    """By kind, the worst first.  Reads the raw files of the trials that ended `ok`, where given."""
    rows = comparison.rows
    trials = [(row, trial) for row in rows for trial in row.ok_trials]
    found = [*_run_drifts(rows), *_outlying_repeats(rows), *_busy_machines(rows)]
    for row, trial in trials:
        if row.folder is not None:
            found += _of_trial(RunFolder(row.folder).trial_folder(trial.id), trial, len(trials))
    order = list(Kind)
    found.sort(key=lambda one: (order.index(one.kind), -one.severity, one.place))
    return tuple(
        Instability(kind=one.kind, place=one.place, text=one.text, remedy=REMEDIES[one.kind])
        for one in found
    )


def _of_trial(folder: Path, trial: TrialResult, num_trials: int) -> Iterator[_Finding]:
    rank = next((rank for rank in trial.ranks if rank.windows), None)
    if rank is None:
        return
    lines = raw_lines(folder / STEPS_FILE, f'{{"rank": {rank.rank},')
    steps = [
        (step, seconds)
        for line in lines
        if line.get("measured") is True
        and (step := number(line.get("step"))) is not None
        and (seconds := number(line.get("step_seconds"))) is not None
        and seconds > 0
    ]
    if len(steps) >= FEWEST_STEPS:
        yield from _drift_of_steps(trial.id, steps, num_trials)
        yield from _slow_steps(trial.id, [seconds for _, seconds in steps])
    samples = list(raw_lines(folder / SAMPLES_FILE))
    yield from _of_samples(trial.id, samples, spans_of(rank))


def _drift_of_steps(
    place: str, steps: Sequence[tuple[float, float]], num_trials: int
) -> Iterator[_Finding]:
    """Of the logarithm: a share of the step's time, whatever the step's time is."""
    points = sorted((step, math.log(seconds)) for step, seconds in steps)
    lasting = lasting_change(points, FALSE_ALARM_RATE / num_trials)
    if lasting is not None:
        yield _Finding(Kind.TRIAL_DRIFT, place, lasting.text, abs(lasting.size))
        return
    trend = trend_of([thinned(points)])
    if trend is None:
        return
    change = math.expm1(trend.slope * (points[-1][0] - points[0][0]))
    if abs(change) >= DRIFT and trend.p_value * num_trials <= FALSE_ALARM_RATE:
        direction = "longer" if change > 0 else "shorter"
        text = f"steps became {abs(change):.0%} {direction} from the first to the last"
        yield _Finding(Kind.TRIAL_DRIFT, place, text, abs(math.log1p(change)))


def _slow_steps(place: str, seconds: Sequence[float]) -> Iterator[_Finding]:
    middle = median(seconds)
    slow = [one for one in seconds if one > SLOW_FACTOR * middle]
    share = sum(one - middle for one in slow) / sum(seconds) if slow else 0.0
    if share >= SLOW_SHARE:
        text = (
            f"{len(slow)} of {len(seconds)} steps took over {SLOW_FACTOR:g} times the median and "
            f"cost {share:.0%} of the time"
        )
        yield _Finding(Kind.SLOW_STEPS, place, text, share)


def _of_samples(place: str, samples: Sequence[Line], spans: Sequence[Span]) -> Iterator[_Finding]:
    others = share_of_others(samples, spans)
    if others is not None and others[0] >= OTHERS_SHARE:
        text = f"{others[0]:.0%} of the {others[1]} cores were used by others during this trial"
        yield _Finding(Kind.OTHER_PROCESSES, place, text, others[0])
    for uuid, share, reasons in slowed_devices(samples, spans):
        if share >= SLOWED_SHARE:
            hottest = hottest_celsius(samples, uuid)
            heat = "" if hottest is None else f", at most {hottest:.0f} °C"
            text = f"{uuid} was slowed down in {share:.0%} of the samples ({reasons}{heat})"
            yield _Finding(Kind.SLOWED_DEVICE, place, text, share)


def _by_folder(rows: Sequence[Row]) -> dict[Path | None, list[Row]]:
    folders: dict[Path | None, list[Row]] = {}
    for row in rows:
        folders.setdefault(row.folder, []).append(row)
    return folders


def _run_drifts(rows: Sequence[Row]) -> Iterator[_Finding]:
    """A trend that the rows of a run share, from one repeat to the next."""
    runs = _by_folder(rows)
    for folder, of_run in runs.items():
        series = [_log_rates(row) for row in of_run]
        trend = trend_of([[(float(at), one) for at, one in each.items()] for each in series])
        repeats = [repeat for each in series for repeat in each]
        if trend is None:
            continue
        change = math.expm1(trend.slope * (max(repeats) - min(repeats)))
        if abs(change) >= DRIFT and trend.p_value * len(runs) <= FALSE_ALARM_RATE:
            direction = "faster" if change > 0 else "slower"
            text = f"from the first repeat to the last, trials became {abs(change):.0%} {direction}"
            yield _Finding(Kind.RUN_DRIFT, _run_place(folder, of_run), text, abs(change))


def _outlying_repeats(rows: Sequence[Row]) -> Iterator[_Finding]:
    """A repeat far from the others of its row, beside the spread of all rows of its run.

    The externally studentised residual, tested as the largest of all.  Source: Cook and Weisberg,
    Residuals and Influence in Regression (1982), section 2.2.2.
    """
    for of_run in _by_folder(rows).values():
        series = [(row, rates) for row in of_run if len(rates := _log_rates(row)) >= 3]
        squares = sum(
            (one - fmean(rates.values())) ** 2 for _, rates in series for one in rates.values()
        )
        count = sum(len(rates) for _, rates in series)
        degrees = count - len(series) - 1
        for row, rates in series:
            for repeat, rate in rates.items():
                others = fmean(one for other, one in rates.items() if other != repeat)
                left = (len(rates) - 1) / len(rates)
                without = max(squares - (rate - others) ** 2 * left, 0.0) / degrees
                distance = rate - others
                error = math.sqrt(without / left)
                p_value = two_sided_p_value(distance / error, degrees) if error > 0 else 0.0
                off = math.expm1(distance)
                if abs(off) >= OUTLYING and p_value * count <= FALSE_ALARM_RATE:
                    yield _outlier(row, repeat, off)


def _outlier(row: Row, repeat: int, off: float) -> _Finding:
    place = next(trial.id for trial in row.ok_trials if trial.repeat == repeat)
    direction = "faster" if off > 0 else "slower"
    text = f"{abs(off):.0%} {direction} than the other repeats of {row.place}"
    return _Finding(Kind.OUTLYING_REPEAT, place, text, abs(off))


def _log_rates(row: Row) -> dict[int, float]:
    return {repeat: math.log(rate) for repeat, rate in row.values[METRIC].items() if rate > 0}


def _busy_machines(rows: Sequence[Row]) -> Iterator[_Finding]:
    for folder, of_run in _by_folder(rows).items():
        busy = None if folder is None else busy_at_start(RunFolder(folder).read_environment())
        if busy is not None and busy[0] >= OTHERS_SHARE:
            names = ", ".join(busy[1])
            text = f"when the run began, {busy[0]:.0%} of the cores were used by {names}"
            yield _Finding(Kind.OTHER_PROCESSES, _run_place(folder, of_run), text, busy[0])


def _run_place(folder: Path | None, rows: Sequence[Row]) -> str:
    return rows[0].experiment if folder is None else str(folder)
