"""Comparison of two runs of an experiment: regressions, and differences between the runs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from shardmark.base.errors import InputError
from shardmark.base.results.schema import Outcome
from shardmark.base.results.store import RunFolder, StoredRun
from shardmark.base.statistics.effects import Effect, holm
from shardmark.base.statistics.intervals import (
    Estimate,
    TrimmedMean,
    ratio_of,
    t_quantile,
    trimmed_mean,
)
from shardmark.bench.analysis.compare.comparison import compare
from shardmark.bench.analysis.compare.rows import Row, check_corpora, plain
from shardmark.bench.analysis.compare.verdicts import FAMILY_ERROR_RATE, METRIC

BROKEN_OUTCOMES = (Outcome.FAILED, Outcome.TIMED_OUT, Outcome.OUT_OF_MEMORY)
MACHINE_KEYS = ("host", "os", "kernel", "architecture", "python", "cpu.model", "cpu.usable_cores",
                "memory.limit_bytes", "cuda.driver_version", "cuda.cuda_version", "shardmark",
                "libraries", "packages", "variables", "git.commit", "git.dirty")  # fmt: skip
"""Keys of `environment.json` whose values can affect the speed."""
FEW_REPEATS = "fewer than two repeats"
MAX_REPEATS = 50
"""Maximum number of repeats that is proposed for deciding a cell."""
MAX_PERCENT = 100
"""Upper limit of `--threshold`, in percent."""
IGNORED_KEYS = ("workload.data_dir", "workload.loader_workers", "limits", "measure", "recipe.seed")
"""Keys of a trial in which two runs of the same experiment can differ."""


class Change(StrEnum):
    """The change of a cell between two runs."""

    BROKEN = "fails now"
    SLOWER = "slower"
    OPEN = "not decided"
    SAME = "same"
    FASTER = "faster"
    FIXED = "works now"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedCell:
    """A cell that both runs have, with its change."""

    before: Row
    after: Row
    ratio: Estimate | None
    """Ratio of the throughput after to that before, with an uncorrected 95 % interval."""
    change: Change
    reason: str | None = None
    """Reason for a failure or an undecided change."""

    @property
    def memory_ratio(self) -> float | None:
        before, after = (row.metrics.get("peak_memory_bytes") for row in (self.before, self.after))
        return after.value / before.value if before and after and before.value else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Regression:
    """The comparison of two runs of an experiment."""

    before: StoredRun
    after: StoredRun
    threshold: float
    """Smallest relative change that is a regression."""
    cells: tuple[ChangedCell, ...]
    only_before: tuple[str, ...]
    only_after: tuple[str, ...]
    differences: Mapping[str, tuple[str, str]]
    """Values before and after of keys of `environment.json` that differ."""
    content: tuple[str, ...] | None
    """Descriptions of changed code, data and models; None if a run has no fingerprint."""

    @property
    def regressions(self) -> tuple[ChangedCell, ...]:
        return tuple(cell for cell in self.cells if cell.change in (Change.BROKEN, Change.SLOWER))

    @property
    def decided_share(self) -> float:
        """Fraction of the cells that are decided; 0 without cells."""
        open_cells = sum(cell.change is Change.OPEN for cell in self.cells)
        return 1 - open_cells / len(self.cells) if self.cells else 0.0

    @property
    def decided(self) -> bool:
        """True if at least one cell is decided."""
        return self.decided_share > 0

    def advice(self) -> str | None:
        """Return advice for deciding cells that are too noisy; None if there are none."""
        noisy = [cell for cell in self.cells if cell.change is Change.OPEN and cell.ratio]
        if not noisy:
            return None
        needs = [_repeats_for(cell, self.threshold) for cell in noisy]
        shown, repeats = max((_half_width(cell, n), n) for cell in noisy for n in [_fewest(cell)])
        widest = max(map(_threshold_for, noisy))
        percent = math.ceil(100 * widest) if widest < 1 else MAX_PERCENT
        ways = [f"about {max(n for n in needs if n)} repeats"] if all(needs) else []
        if percent < MAX_PERCENT:
            ways.append(f"--threshold {percent}")
        resolution = f"{repeats} repeats show changes from about {math.ceil(100 * shown)} % on here"
        return f"{resolution}: {' or '.join(ways or ['quieter machines'])} would decide"


def find_regressions(before: StoredRun, after: StoredRun, *, threshold: float) -> Regression:
    """Compare every cell of the second run with the same cell of the first.

    A cell is slower if a change beyond the threshold is significant: one family of Welch's t tests
    on logarithms, corrected by Holm's procedure.  It is the same if its 95 % interval lies within
    the threshold.  Repeats of different runs share no disturbance, so they are not paired.

    Raises `InputError` for runs of different experiments, and if no cell can be decided.
    """
    check_corpora((before, after))
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
        same = {"versions": was.versions}  # compared as part of the environment
        content = (
            *sorted(was.changes(now.model_copy(update=same))),
            *(f"{text} (new)" for text in sorted(was.added(now))),
            *(f"{text} (gone)" for text in sorted(now.added(was))),
        )
    old, new = (_environment(run) for run in (before, after))
    values = {key: (old.get(key, "none"), new.get(key, "none")) for key in (*old, *new)}
    return Regression(
        before=before,
        after=after,
        threshold=threshold,
        cells=cells,
        only_before=tuple(row.place for key, row in rows[0].items() if key not in rows[1]),
        only_after=tuple(row.place for key, row in rows[1].items() if key not in rows[0]),
        differences={key: pair for key, pair in values.items() if pair[0] != pair[1]},
        content=content,
    )


def _fewest(cell: ChangedCell) -> int:
    """Return the number of repeats of the run that has fewer."""
    return min(len(_logs(row)) for row in (cell.before, cell.after))


def _half_width(cell: ChangedCell, repeats: int) -> float:
    """Return half the width of the ratio's 95 % interval with this many repeats of each run."""
    logs = [_logs(row) for row in (cell.before, cell.after)]
    variance = sum(trimmed_mean(values).standard_error ** 2 * len(values) for values in logs)
    return math.expm1(t_quantile(2 * repeats - 2) * math.sqrt(variance / repeats))


def _repeats_for(cell: ChangedCell, threshold: float) -> int | None:
    """Return the number of repeats that would decide the present change; None for too many.

    The interval must lie on one side of the threshold.  A change near the threshold is uncertain,
    so it is taken to be at least half of the threshold away.
    """
    assert cell.ratio is not None, "checked by the caller"
    distance = abs(abs(math.log(cell.ratio.value)) - math.log1p(threshold))
    limit = math.expm1(max(distance, math.log1p(threshold) / 2))
    counts = range(_fewest(cell) + 1, MAX_REPEATS + 1)
    return next((n for n in counts if _half_width(cell, n) <= limit), None)


def _threshold_for(cell: ChangedCell) -> float:
    """Return the smallest threshold that contains the interval, so that the cell is the same."""
    assert cell.ratio is not None, "checked by the caller"
    low, high = cell.ratio.low, cell.ratio.high
    return math.inf if low is None or high is None else max(high, 1 / low) - 1


def _key(row: Row) -> tuple[object, ...]:
    axes = plain({**row.varied, "options": dict(row.strategy_options)})
    return row.workload, row.strategy, row.world_size, row.precision, axes


def _check_same_training(before: Row, after: Row, run: StoredRun) -> None:
    """Raise `InputError` if the trials' descriptions differ, except in `IGNORED_KEYS`."""
    trials = [dict(flattened(row.trials[0].trial)) for row in (before, after)]
    parts = ("workload.", "recipe.", "strategy.", "device_type", "slow_ranks")
    for key in sorted(trials[0].keys() | trials[1].keys()):
        values = [plain(trial.get(key)) for trial in trials]
        if key.startswith(parts) and not key.startswith(IGNORED_KEYS) and values[0] != values[1]:
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
    """Return the change without regard to times; `OPEN` without a reason if times decide."""
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
        return Change.FIXED, None
    if not before.ok_trials or not after.ok_trials:
        return Change.OPEN, "no trial ended ok"
    few = FEW_REPEATS if min(len(_logs(before)), len(_logs(after))) < 2 else None
    return Change.OPEN, before.disturbed or after.disturbed or few


def _logs(row: Row) -> list[float]:
    return [math.log(rate) for rate in row.values.get(METRIC, {}).values() if rate > 0]


def _effect(before: Row, after: Row, threshold: float) -> Effect:
    """Test independent values for a change that is larger than the threshold.

    Source: Welch, Biometrika 34 (1947), 28-35; degrees of freedom rounded down.
    """
    logs = [_logs(before), _logs(after)]
    old, new = map(trimmed_mean, logs)
    variances = [mean.standard_error**2 for mean in (old, new)]
    total = sum(variances)
    parts = zip(variances, (old.degrees, new.degrees), strict=True)
    degrees = int(total**2 / sum(v**2 / d for v, d in parts)) if total else old.degrees
    change = TrimmedMean(new.value - old.value, math.sqrt(total), degrees)
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
    """Return values of the environment that can affect the speed, by dotted key."""
    environment = RunFolder(run.path).read_environment()
    wanted = tuple(f"{key}." for key in MACHINE_KEYS)
    chosen = {
        key: plain(value)
        for key, value in flattened(environment)
        if value is not None and f"{key}.".startswith(wanted)
    }
    if "git.commit" in chosen:
        chosen["git.commit"] = chosen["git.commit"][:12]
    devices = (environment.get("cuda") or {}).get("devices") or ()
    names = [str(device.get("name")) for device in devices]
    return chosen | ({"devices": ", ".join(names)} if names else {})


def flattened(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested mappings by dotted key."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from flattened(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
