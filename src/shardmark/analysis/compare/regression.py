"""One experiment run twice: what became slower, and what differs between the two runs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from shardmark.analysis.compare.comparison import compare
from shardmark.analysis.compare.rows import Row, plain, refuse_other_texts
from shardmark.analysis.compare.verdicts import FAMILY_ERROR_RATE, METRIC
from shardmark.analysis.statistics.effects import Effect, holm
from shardmark.analysis.statistics.intervals import (
    Estimate,
    Middle,
    middle_of,
    ratio_of,
    t_quantile,
)
from shardmark.core.errors import InputError
from shardmark.results.schema import Outcome
from shardmark.results.store import RunFolder, StoredRun

BROKEN_OUTCOMES = (Outcome.FAILED, Outcome.TIMED_OUT, Outcome.OUT_OF_MEMORY)
MACHINE_KEYS = ("host", "os", "kernel", "architecture", "python", "cpu.model", "cpu.usable_cores",
                "memory.limit_bytes", "cuda.driver_version", "cuda.cuda_version", "shardmark",
                "libraries", "packages", "variables", "git.commit", "git.dirty")  # fmt: skip
"""Of `environment.json`: what can change a speed."""
FEW_REPEATS = "fewer than two repeats"
MOST_REPEATS = 50
"""The largest number of repeats that is proposed in order to decide a cell."""
MOST_PERCENT = 100
"""`--threshold` must be smaller, in percent."""
PLACES = ("workload.data_dir", "workload.loader_workers", "limits", "measure", "recipe.seed")
"""Keys of a trial in which two runs of one experiment may differ."""


class Change(StrEnum):
    """How a cell changed from one run to the other."""

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
    """A cell that both runs have, and how it changed."""

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
    content: tuple[str, ...] | None
    """Changed code, data and models, in words; None where a run has no fingerprint."""

    @property
    def regressions(self) -> tuple[ChangedCell, ...]:
        return tuple(cell for cell in self.cells if cell.change.is_regression)

    @property
    def decided(self) -> bool:
        """True if at least one cell is decided."""
        return any(cell.change is not Change.OPEN for cell in self.cells)

    def surer(self) -> str | None:
        """Return what would decide the cells that are too noisy; None where none is."""
        noisy = [cell for cell in self.cells if cell.change is Change.OPEN and cell.ratio]
        if not noisy:
            return None
        needs = [_repeats_for(cell, self.threshold) for cell in noisy]
        shown, repeats = max((_half_width(cell, n), n) for cell in noisy for n in [_fewest(cell)])
        widest = max(map(_threshold_for, noisy))
        percent = math.ceil(100 * widest) if widest < 1 else MOST_PERCENT
        ways = [f"about {max(n for n in needs if n)} repeats"] if all(needs) else []
        if percent < MOST_PERCENT:
            ways.append(f"--threshold {percent}")
        here = f"{repeats} repeats show changes from about {math.ceil(100 * shown)} % on here"
        return f"{here}: {' or '.join(ways or ['quieter machines'])} would decide"


def find_regressions(before: StoredRun, after: StoredRun, *, threshold: float) -> Regression:
    """Hold every cell of the second run against the same cell of the first.

    A cell is slower where a change beyond the threshold is shown: one family of Welch's t tests on
    logarithms, corrected by Holm's procedure.  It is the same where its 95 % interval lies within
    the threshold.  Repeats of two runs share no disturbance, so nothing is paired.

    Raises `InputError` for runs of two experiments, and where no cell could show anything.
    """
    refuse_other_texts((before, after))
    rows = [{_key(row): row for row in compare([run]).rows} for run in (before, after)]
    pairs = [(rows[0][key], rows[1][key]) for key in rows[0] if key in rows[1]]
    for pair in pairs:
        _check_same_training(*pair, after)
    cells = _cells(pairs, threshold)
    if all(cell.change is Change.OPEN and cell.ratio is None for cell in cells):
        reasons = dict.fromkeys(cell.reason for cell in cells if cell.reason is not None)
        reason = f"nothing can be shown: {'; '.join(reasons)}"
        if not cells:
            reason = f"it has no cell of {before.path}"
        raise InputError(str(after.path), reason, "run both with measure.repeats=3 or more")
    content: tuple[str, ...] | None = None
    was, now = before.fingerprint, after.fingerprint
    if was is not None and now is not None:
        same = {"versions": was.versions}  # the environment has them
        content = (
            *sorted(was.changes(now.model_copy(update=same))),
            *(f"{text} (new)" for text in sorted(was.added(now))),
            *(f"{text} (gone)" for text in sorted(now.added(was))),
        )
    told = [_environment(run) for run in (before, after)]
    said = {key: [each.get(key, "none") for each in told] for key in (*told[0], *told[1])}
    return Regression(
        before=before,
        after=after,
        threshold=threshold,
        cells=cells,
        only_before=tuple(row.place for key, row in rows[0].items() if key not in rows[1]),
        only_after=tuple(row.place for key, row in rows[1].items() if key not in rows[0]),
        differences={key: (old, new) for key, (old, new) in said.items() if old != new},
        content=content,
    )


def _fewest(cell: ChangedCell) -> int:
    """Return the number of repeats of the run that has fewer."""
    return min(len(_logs(row)) for row in (cell.before, cell.after))


def _half_width(cell: ChangedCell, repeats: int) -> float:
    """Return half of the ratio's 95 % interval with so many repeats of each run, as a change."""
    logs = [_logs(row) for row in (cell.before, cell.after)]
    variance = sum(middle_of(each).standard_error ** 2 * len(each) for each in logs)
    return math.expm1(t_quantile(2 * repeats - 2) * math.sqrt(variance / repeats))


def _repeats_for(cell: ChangedCell, threshold: float) -> int | None:
    """Return the fewest repeats that decide if the change stays what it is; None for too many.

    The interval must end before the threshold, or begin behind it.  A change near the threshold
    counts as half of the threshold away from it: that change is uncertain itself.
    """
    assert cell.ratio is not None, "the caller looked"
    distance = abs(abs(math.log(cell.ratio.value)) - math.log1p(threshold))
    limit = math.expm1(max(distance, math.log1p(threshold) / 2))
    counts = range(_fewest(cell) + 1, MOST_REPEATS + 1)
    return next((n for n in counts if _half_width(cell, n) <= limit), None)


def _threshold_for(cell: ChangedCell) -> float:
    """Return the smallest threshold within which the interval lies: the cell is the same then."""
    assert cell.ratio is not None, "the caller looked"
    low, high = cell.ratio.low, cell.ratio.high
    return math.inf if low is None or high is None else max(high, 1 / low) - 1


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


def _cells(pairs: Sequence[tuple[Row, Row]], threshold: float) -> tuple[ChangedCell, ...]:
    cells = []
    for before, after in pairs:
        change, reason = _without_times(before, after)
        cells.append(
            ChangedCell(before=before, after=after, ratio=None, change=change, reason=reason)
        )
    tested = [n for n, c in enumerate(cells) if c.change is Change.OPEN and c.reason is None]
    effects = holm([_effect(cells[n].before, cells[n].after, threshold) for n in tested])
    for place, effect in zip(tested, effects, strict=True):
        change, reason = _decided(effect, threshold)
        cells[place] = replace(cells[place], ratio=effect.ratio, change=change, reason=reason)
    return tuple(cells)


def _without_times(before: Row, after: Row) -> tuple[Change, str | None]:
    """What shows without a look at times, or why these cannot tell; open where they may."""
    broken = [
        [failed for failed in row.failed if failed.outcome in BROKEN_OUTCOMES]
        for row in (before, after)
    ]
    if before.ok_trials and broken[1] and not broken[0]:
        return Change.BROKEN, f"{broken[1][0].outcome}: {broken[1][0].reason}"
    if before.equivalent and after.equivalent is False:
        return Change.BROKEN, "it is shown to train something else"
    if after.diverged and not before.diverged:
        return Change.BROKEN, after.diverged
    if after.ok_trials and not before.ok_trials:
        return Change.MENDED, None
    if not before.ok_trials or not after.ok_trials:
        return Change.OPEN, "no trial ended ok"
    few = FEW_REPEATS if min(len(_logs(before)), len(_logs(after))) < 2 else None
    return Change.OPEN, before.disturbed or after.disturbed or few


def _logs(row: Row) -> list[float]:
    return [math.log(rate) for rate in row.values.get(METRIC, {}).values() if rate > 0]


def _effect(before: Row, after: Row, threshold: float) -> Effect:
    """Of independent values, tested for a change that is larger than the threshold.

    Source: Welch, Biometrika 34 (1947), 28-35; degrees rounded down.
    """
    logs = [_logs(before), _logs(after)]
    old, new = map(middle_of, logs)
    variances = [each.standard_error**2 for each in (old, new)]
    total = sum(variances)
    parts = zip(variances, (old.degrees, new.degrees), strict=True)
    degrees = int(total**2 / sum(v**2 / d for v, d in parts)) if total else old.degrees
    change = Middle(new.value - old.value, math.sqrt(total), degrees)
    beyond = abs(change.value) - math.log1p(threshold)
    p_value = replace(change, value=beyond).p_value if beyond > 0 else 1.0
    ratio = ratio_of(change, min(map(len, logs)))
    return Effect(ratio=ratio, p_value=p_value, p_corrected=p_value)


def _decided(effect: Effect, threshold: float) -> tuple[Change, str | None]:
    low, high = effect.ratio.low, effect.ratio.high
    if effect.p_corrected <= FAMILY_ERROR_RATE:
        return (Change.FASTER if effect.ratio.value > 1 else Change.SLOWER), None
    if low is not None and high is not None and max(high, 1 / low) <= 1 + threshold:
        return Change.SAME, None
    return Change.OPEN, "too noisy"


def _environment(run: StoredRun) -> dict[str, str]:
    """What can change a speed, by dotted key."""
    environment = RunFolder(run.path).read_environment()
    wanted = tuple(f"{key}." for key in MACHINE_KEYS)
    chosen = {
        key: plain(value)
        for key, value in _flat(environment)
        if value is not None and f"{key}.".startswith(wanted)
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
