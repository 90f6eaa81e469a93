"""Effect of rounding on a quality, measured by a twin with slightly different initial weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import isclose
from statistics import fmean

from shardmark.base.cells import cell_id
from shardmark.base.metrics import METRICS
from shardmark.base.results.schema import Outcome, TrialResult
from shardmark.base.results.store import StoredRun
from shardmark.bench.analysis.compare.rows import Row, main_quality, seed_of, trained


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounding:
    """The spread of a quality that rounding alone causes, and the rows within it."""

    metric: str
    distance: float
    """Largest difference between the twin and the repeats of its cell with its seed."""
    cell: str
    """Name of the twin's cell: its strategy if that is unique, else its description."""
    same: tuple[str, ...]
    """Verified rows whose mean with this seed differs from the cell's by at most the distance."""


def rounding_of(runs: Sequence[StoredRun], rows: Sequence[Row]) -> tuple[Rounding, ...]:
    """Return the results of the runs' twins, without twins that failed or have no quality."""
    return tuple(
        rounding
        for run in runs
        for twin in run.twins
        for row in rows
        if row.folder == run.path and (rounding := _rounding(twin, row, rows)) is not None
    )


def _rounding(twin: TrialResult, row: Row, rows: Sequence[Row]) -> Rounding | None:
    if twin.outcome is not Outcome.OK or twin.diverged or row.diverged or row.synthetic:
        return None
    if cell_id(twin.trial) not in {cell_id(result.trial) for result in row.ok_trials}:
        return None
    metric = next((name for name in row.values if name not in METRICS), main_quality([row]))
    summary = twin.metrics.get(metric) if metric else None
    if metric is None or summary is None:
        return None
    values = _with_seed(row, metric, seed_of(twin))
    if not values:
        return None
    distance = max(*values, summary.value) - min(*values, summary.value)
    rivals = [other for other in rows if row.comparable(other)]
    labels = Counter(other.label for other in rivals)
    names = {id(r): r.label if labels[r.label] == 1 else r.place for r in rivals}
    close = (
        names[id(other)]
        for other in rivals
        if other is not row
        and row.equivalent
        and other.equivalent
        and not (row.weak_scaling and row.world_size != other.world_size)
        and (other_values := _with_seed(other, metric, seed_of(twin)))
        and isclose(fmean(other_values), fmean(values), abs_tol=distance)
    )
    return Rounding(metric=metric, distance=distance, cell=names[id(row)], same=tuple(close))


def _with_seed(row: Row, metric: str, seed: int | None) -> list[float]:
    """Return the row's values of the metric from trials with the seed."""
    repeats = {trial.repeat for trial in trained(row.trials) if seed_of(trial) == seed}
    return [value for repeat, value in row.values.get(metric, {}).items() if repeat in repeats]
