"""Warnings about disturbed measurements, with remedies.

`docs/method/statistics.md` has the thresholds and their evidence.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import fmean

from shardmark.base.results.schema import StabilityKind, TrialResult
from shardmark.base.statistics.changes import trend_of
from shardmark.base.statistics.intervals import t_probability
from shardmark.bench.analysis.compare.comparison import Comparison
from shardmark.bench.analysis.compare.rows import Row, gathered
from shardmark.bench.analysis.compare.verdicts import METRIC
from shardmark.bench.analysis.diagnose.trial_stability import DRIFT, FALSE_ALARM_RATE, percent

OUTLYING = 0.1
"""Minimum relative distance of an outlying repeat from the others of its row."""
RECURRING = 2.0
"""Factor between steps of a trial below which a drift counts only if other repeats have one."""

REMEDIES = {
    StabilityKind.TRIAL_DRIFT: "raise measure.warmup_seconds if steps became shorter; else look for"
    " heat, growing memory or a slower link",
    StabilityKind.RUN_DRIFT: "warm the machine up first; ratios within a repeat hold",
    StabilityKind.SLOW_STEPS: "look for pauses such as late data, or measure more steps",
    StabilityKind.OUTLYING_REPEAT: "read the trial's log.txt, and run more repeats",
    StabilityKind.OTHER_PROCESSES: "stop them and run again",
    StabilityKind.SHARED_DEVICE: "stop them, or take a free device",
    StabilityKind.MEMORY_PRESSURE: "free memory, or train something smaller",
    StabilityKind.SLOWED_DEVICE: "cool the device, or lower its power limit",
    StabilityKind.UNWATCHED: "mend what stopped it, and measure again",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Instability:
    """A disturbance of a measurement, with its remedy."""

    kind: StabilityKind
    place: str
    """The row and the repeat, or the folder of the run."""
    text: str
    severity: float
    """Sort key within the kind."""

    @property
    def remedy(self) -> str:
        return REMEDIES[self.kind]


def warnings_of(comparison: Comparison) -> tuple[Instability, ...]:
    """Return the disturbances of the trials that ended `ok`, by kind, the most severe first."""
    rows = comparison.rows
    num_trials = sum(len(row.ok_trials) for row in rows)
    warnings = [*_run_drifts(rows), *_outlying_repeats(rows)]
    for row in rows:
        of_trials = [
            [*_of_trial(trial, _place(row, trial.repeat), num_trials)] for trial in row.ok_trials
        ]
        drifting = sum(any(map(_is_slight_drift, of_trial)) for of_trial in of_trials)
        recurs = 2 * drifting >= len(of_trials)
        warnings += [w for w in chain(*of_trials) if recurs or not _is_slight_drift(w)]
    order = list(StabilityKind)
    return tuple(sorted(warnings, key=lambda w: (order.index(w.kind), -w.severity, w.place)))


def _place(row: Row, repeat: int) -> str:
    return f"{row.place}, repeat {repeat + 1}"


def _of_trial(trial: TrialResult, place: str, num_trials: int) -> Iterator[Instability]:
    """Yield the stored findings; of a tested kind the first that is significant over all trials."""
    tested = set()
    for finding in trial.stability:
        if finding.p_value is not None:
            if finding.p_value * num_trials > FALSE_ALARM_RATE or finding.kind in tested:
                continue
            tested.add(finding.kind)
        yield Instability(
            kind=finding.kind, place=place, text=finding.text, severity=finding.severity
        )


def _is_slight_drift(warning: Instability) -> bool:
    """A machine that others share wanders so in a second; what a row does recurs in its repeats."""
    return warning.kind is StabilityKind.TRIAL_DRIFT and warning.severity < math.log(RECURRING)


def _run_drifts(rows: Sequence[Row]) -> Iterator[Instability]:
    """Yield trends over the repeats that the rows of a run share."""
    runs = gathered((row.folder, row) for row in rows)
    for folder, of_run in runs.items():
        series = [_log_rates(row) for row in of_run]
        trend = trend_of([[(float(n), rate) for n, rate in rates.items()] for rates in series])
        repeats = [repeat for rates in series for repeat in rates]
        if trend is None:
            continue
        change = math.expm1(trend.slope * (max(repeats) - min(repeats)))
        if abs(change) >= DRIFT and trend.p_value * len(runs) <= FALSE_ALARM_RATE:
            yield Instability(
                kind=StabilityKind.RUN_DRIFT,
                place=of_run[0].experiment if folder is None else str(folder),
                text=f"trials became {percent(abs(change))} {_faster(change)} over the repeats",
                severity=abs(change),
            )


def _outlying_repeats(rows: Sequence[Row]) -> Iterator[Instability]:
    """Yield repeats that differ from the others of their row by far more than the run's spread.

    Tests the externally studentised residual as the largest of all.  Source: Cook and Weisberg,
    Residuals and Influence in Regression (1982), section 2.2.2.
    """
    for of_run in gathered((row.folder, row) for row in rows).values():
        series = [(row, rates) for row in of_run if len(rates := _log_rates(row)) >= 3]
        squares = sum(
            (rate - fmean(rates.values())) ** 2 for _, rates in series for rate in rates.values()
        )
        count = sum(len(rates) for _, rates in series)
        degrees = count - len(series) - 1
        for row, rates in series:
            for repeat, rate in rates.items():
                distance = rate - fmean(other for at, other in rates.items() if at != repeat)
                left = (len(rates) - 1) / len(rates)
                without = max(squares - distance**2 * left, 0.0) / degrees
                error = math.sqrt(without / left)
                p_value = t_probability(distance / error, degrees) if error > 0 else 0.0
                off = math.expm1(distance)
                text = f"{percent(abs(off))} {_faster(off)} than the other repeats"
                if abs(off) >= OUTLYING and p_value * count <= FALSE_ALARM_RATE:
                    yield Instability(
                        kind=StabilityKind.OUTLYING_REPEAT,
                        place=_place(row, repeat),
                        text=text,
                        severity=abs(off),
                    )


def _faster(change: float) -> str:
    return "faster" if change > 0 else "slower"


def _log_rates(row: Row) -> dict[int, float]:
    return {repeat: math.log(rate) for repeat, rate in row.values[METRIC].items() if rate > 0}
