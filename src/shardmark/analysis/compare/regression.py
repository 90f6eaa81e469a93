"""One experiment run twice: what became slower, and what differs between the two runs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from shardmark.analysis.compare.comparison import compare
from shardmark.analysis.compare.rows import Row, plain, refuse_other_texts
from shardmark.analysis.statistics.effects import Effect, holm
from shardmark.analysis.statistics.intervals import (
    Estimate,
    Middle,
    middle_of,
    ratio_of,
    t_probability,
)
from shardmark.analysis.statistics.verdicts import FAMILY_ERROR_RATE, METRIC
from shardmark.core.errors import InputError
from shardmark.results.schema import Outcome
from shardmark.results.store import RunFolder, StoredRun

BROKEN_OUTCOMES = (Outcome.FAILED, Outcome.TIMED_OUT, Outcome.OUT_OF_MEMORY)
MACHINE_KEYS = ("host", "os", "kernel", "architecture", "python", "cpu.model", "cpu.usable_cores",
                "memory.limit_bytes", "cuda.driver_version", "cuda.cuda_version", "shardmark",
                "libraries", "packages", "variables", "git.commit", "git.dirty")  # fmt: skip
"""Of `environment.json`: what can change a speed."""
FEW_REPEATS = "fewer than two repeats"
PLACES = ("workload.data_dir", "workload.loader_workers", "limits", "measure", "recipe.seed")
"""Of a trial: what two runs of one experiment may differ in."""


class Change(StrEnum):
    """What became of a cell."""

    BROKEN = "fails now"
    SLOWER = "slower"
    OPEN = "not decided"
    SAME = "same"
    FASTER = "faster"
    MENDED = "works now"

    @property
    def is_regression(self) -> bool:
        return self in (Change.BROKEN, Change.SLOWER)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedCell:
    """One cell in both runs."""

    before: Row
    after: Row
    ratio: Estimate | None
    """Samples per second after over before, with a single 95 % interval."""
    change: Change
    reason: str | None = None
    """Why it is not decided, or how it fails."""

    @property
    def memory_ratio(self) -> float | None:
        before, after = (row.metrics.get("peak_memory_bytes") for row in (self.before, self.after))
        return after.value / before.value if before and after and before.value else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Regression:
    """Two runs of one experiment."""

    before: StoredRun
    after: StoredRun
    threshold: float
    """Smallest relative change that counts."""
    cells: tuple[ChangedCell, ...]
    only_before: tuple[str, ...]
    only_after: tuple[str, ...]
    differences: Mapping[str, tuple[str, str]]
    """Key of `environment.json` -> before, after."""

    @property
    def regressions(self) -> tuple[ChangedCell, ...]:
        return tuple(cell for cell in self.cells if cell.change.is_regression)


def find_regressions(before: StoredRun, after: StoredRun, *, threshold: float) -> Regression:
    """Hold every cell of the second run against the same cell of the first.

    A cell is slower where a change beyond the threshold is shown: one family of Welch's t tests on
    logarithms, corrected by Holm's procedure.  It is the same where its 95 % interval lies within
    the threshold.  Repeats of two runs share no disturbance, so nothing is paired.

    Raises `InputError` for runs of two experiments, and where no cell could show anything.
    """
    refuse_other_texts((before, after))
    rows = [{_key(row): row for row in compare([run]).rows} for run in (before, after)]
    common = [key for key in rows[0] if key in rows[1]]
    for key in common:
        _check_same_training(rows[0][key], rows[1][key], after)
    pairs = [(rows[0][key], rows[1][key]) for key in common]
    cells = tuple(_judged([_cell(*pair, threshold) for pair in pairs], threshold))
    if all(cell.change is Change.OPEN and cell.ratio is None for cell in cells):
        reasons = dict.fromkeys(cell.reason for cell in cells if cell.reason is not None)
        reason = f"nothing can be shown: {'; '.join(reasons)}"
        if not cells:
            reason = f"it has no cell of {before.path}"
        raise InputError(str(after.path), reason, "run both with measure.repeats=3 or more")
    return Regression(
        before=before,
        after=after,
        threshold=threshold,
        cells=cells,
        only_before=tuple(row.place for key, row in rows[0].items() if key not in rows[1]),
        only_after=tuple(row.place for key, row in rows[1].items() if key not in rows[0]),
        differences=_differences(before, after),
    )


def _key(row: Row) -> tuple[object, ...]:
    axes = plain({**row.varied, "options": dict(row.strategy_options)})
    return row.workload, row.strategy, row.world_size, row.precision, axes


def _check_same_training(before: Row, after: Row, run: StoredRun) -> None:
    """Compare what the trials were told, apart from `PLACES`."""
    told = [dict(_flat(row.trials[0].trial)) for row in (before, after)]
    parts = ("workload.", "recipe.", "strategy.", "device_type", "slow_ranks")
    for key in sorted(told[0].keys() | told[1].keys()):
        values = [plain(each.get(key)) for each in told]
        if key.startswith(parts) and not key.startswith(PLACES) and values[0] != values[1]:
            raise InputError(
                str(run.path),
                f"{after.place} has {key} {values[1]}, and before it was {values[0]}",
                "name two runs of one experiment",
            )


def _cell(before: Row, after: Row, threshold: float) -> tuple[ChangedCell, Effect | None]:
    """With the test of its change where there is one."""
    logs = [
        [math.log(v) for v in row.values.get(METRIC, {}).values() if v > 0]
        for row in (before, after)
    ]
    few = FEW_REPEATS if min(map(len, logs)) < 2 else None
    change = _of_outcomes(before, after)
    if change is None and (reason := before.disturbed or after.disturbed or few):
        change = Change.OPEN, reason
    if change is not None:
        cell = ChangedCell(
            before=before, after=after, ratio=None, change=change[0], reason=change[1]
        )
        return cell, None
    difference = _difference(*map(middle_of, logs))
    ratio = ratio_of(difference, min(map(len, logs)))
    p_value = _p_value(difference, math.log1p(threshold))
    effect = Effect(ratio=ratio, standardised=None, p_value=p_value, p_corrected=p_value)
    return ChangedCell(before=before, after=after, ratio=ratio, change=Change.OPEN), effect


def _of_outcomes(before: Row, after: Row) -> tuple[Change, str | None] | None:
    """What shows without a look at times: trials that fail, or train something else."""
    broken = [
        [failed for failed in row.failed if failed.outcome in BROKEN_OUTCOMES]
        for row in (before, after)
    ]
    if before.ok_trials and broken[1] and not broken[0]:
        return Change.BROKEN, f"{broken[1][0].outcome}: {broken[1][0].reason}"
    if before.equivalent and after.equivalent is False:
        return Change.BROKEN, "it is shown to train something else"
    if after.ok_trials and not before.ok_trials:
        return Change.MENDED, None
    if not before.ok_trials or not after.ok_trials:
        return Change.OPEN, "no trial ended ok"
    return None


def _difference(before: Middle, after: Middle) -> Middle:
    """Of independent values.  Source: Welch, Biometrika 34 (1947), 28-35; degrees rounded down."""
    variances = [each.standard_error**2 for each in (before, after)]
    total = sum(variances)
    parts = zip(variances, (before.degrees, after.degrees), strict=True)
    degrees = total**2 / sum(v**2 / d for v, d in parts) if total else before.degrees
    return Middle(after.value - before.value, math.sqrt(total), int(degrees), math.nan)


def _p_value(difference: Middle, limit: float) -> float:
    """Two-sided, of a change that is no larger than the limit."""
    beyond = abs(difference.value) - limit
    if beyond <= 0:
        return 1.0
    if difference.standard_error == 0:
        return 0.0
    return t_probability(beyond / difference.standard_error, difference.degrees)


def _judged(
    cells: list[tuple[ChangedCell, Effect | None]], threshold: float
) -> Iterator[ChangedCell]:
    corrected = iter(holm([effect for _, effect in cells if effect is not None]))
    for cell, effect in cells:
        yield cell if effect is None else _decided(cell, next(corrected), threshold)


def _decided(cell: ChangedCell, effect: Effect, threshold: float) -> ChangedCell:
    low, high = effect.ratio.low, effect.ratio.high
    if effect.p_corrected <= FAMILY_ERROR_RATE:
        faster = effect.ratio.value > 1
        return replace(cell, change=Change.FASTER if faster else Change.SLOWER)
    if low is not None and high is not None and max(high, 1 / low) <= 1 + threshold:
        return replace(cell, change=Change.SAME)
    return replace(cell, reason="too noisy")


def _differences(before: StoredRun, after: StoredRun) -> dict[str, tuple[str, str]]:
    """What the two environments say differently, by dotted key."""
    told = [_environment(run) for run in (before, after)]
    keys = dict.fromkeys((*told[0], *told[1]))
    pairs = {key: (told[0].get(key, "none"), told[1].get(key, "none")) for key in keys}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def _environment(run: StoredRun) -> dict[str, str]:
    environment = RunFolder(run.path).read_environment()
    flat = dict(_flat(environment))
    chosen = {
        key: plain(value)
        for wanted in MACHINE_KEYS
        for key, value in flat.items()
        if value is not None and (key == wanted or key.startswith(f"{wanted}."))
    }
    if "git.commit" in chosen:
        chosen["git.commit"] = chosen["git.commit"][:12]
    devices = (environment.get("cuda") or {}).get("devices") or ()
    names = [str(device.get("name")) for device in devices]
    return chosen | ({"devices": ", ".join(names)} if names else {})


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
