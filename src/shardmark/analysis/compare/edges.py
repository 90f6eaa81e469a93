"""How rows stand to one another in several goals, with what is shown of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from statistics import NormalDist, fmean

from shardmark.analysis.compare.rows import Row
from shardmark.analysis.compare.verdicts import is_different, is_shown
from shardmark.analysis.statistics.effects import Effect, between_all, holm
from shardmark.analysis.statistics.intervals import CONFIDENCE
from shardmark.core.metrics import METRICS

NORMAL_QUANTILE = NormalDist().inv_cdf(0.5 + CONFIDENCE / 2)
VALIDATION_SAMPLES = {"digits": 360, "mnist": 10_000, "cifar10": 10_000}
"""Evaluated where the recipe does not limit them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """How one row stands to another in one goal."""

    metric: str
    higher: bool
    """Whether higher values are better."""
    factor: float = 1.0
    """How many times better: 2 is twice the throughput, and half the memory."""
    low: float | None = 1.0
    """95 % interval of this one difference; None where the repeats allow none."""
    high: float | None = 1.0
    shown: bool = False
    """Better, at the level that is corrected for all differences of the front."""

    @property
    def worse(self) -> bool:
        """A loss is shown, at the level of a single difference."""
        return self.high is not None and self.high < 1

    @property
    def ratio(self) -> float:
        """The metric over the other's."""
        return self.factor if self.higher else 1 / self.factor


def edges_of(rows: Sequence[Row], goals: Sequence[str]) -> dict[tuple[int, int], list[Edge]]:
    """Of each to each other, by their places; all differences are one family, by Holm."""
    effects = _effects(rows, goals)
    higher = {goal: any(row.better(goal) == "higher" for row in rows) for goal in goals}

    def edge(above: int, below: int, goal: str) -> Edge:
        if _is_quality(goal) and _same_by_proof(rows[above], rows[below]):
            return Edge(metric=goal, higher=higher[goal])
        effect = effects.get((min(above, below), max(above, below), goal))
        return _edge(goal, effect, higher[goal], above > below)

    places = permutations(range(len(rows)), 2)
    return {pair: [edge(*pair, goal) for goal in goals] for pair in places}


def _effects(rows: Sequence[Row], goals: Sequence[str]) -> dict[tuple[int, int, str], Effect]:
    """By the places of two rows, and goal; only what can be shown belongs to the family."""
    effects = {
        (above, below, goal): effect
        for goal in goals
        for (above, below), effect in between_all(
            [_values(row, goal) for row in rows], exact=not _is_quality(goal)
        ).items()
    }
    family = [
        (above, below, goal)
        for above, below, goal in effects
        if not _is_quality(goal) or _repeats_can_tell(rows[above], rows[below], goal)
    ]
    never = {key: replace(effect, p_corrected=1.0) for key, effect in effects.items()}
    return never | dict(zip(family, holm([effects[key] for key in family]), strict=True))


def _values(row: Row, goal: str) -> Mapping[int, float]:
    """None of the times of a disturbed row, which decide nothing."""
    timed = not _is_quality(goal) and METRICS[goal].group in ("time", "rate")
    return {} if row.disturbed and timed else row.values.get(goal, {})


def _repeats_can_tell(row: Row, other: Row, quality: str) -> bool:
    """Those of one seed cannot, however well they agree, and nor can too few validation samples.

    An accuracy's difference must exceed 1.96 sqrt((p (1 - p) + q (1 - q)) / n), what independent
    samples differ by through chance in 5 % of cases; it does not where n is unknown.  The sampling
    of other qualities has no such formula, and is not judged.
    """
    if min(row.seeds, other.seeds) < 2 or _same_by_proof(row, other):
        return False
    if not quality.startswith("accuracy"):
        return True
    samples = [_samples_evaluated(each) for each in (row, other)]
    shares = [fmean(each.values[quality].values()) for each in (row, other)]
    variance = sum(share * (1 - share) for share in shares)
    error = math.sqrt(variance / min(samples)) if all(samples) else math.inf
    return abs(shares[0] - shares[1]) > NORMAL_QUANTILE * error


def _samples_evaluated(row: Row) -> int:
    """0 where it is not known."""
    workload = row.trials[0].trial.get("workload", {}) if row.trials else {}
    known = VALIDATION_SAMPLES.get(str(workload.get("dataset")), 0)
    return int(workload.get("validation_samples") or known)


def _edge(metric: str, effect: Effect | None, higher: bool, inverse: bool) -> Edge:
    """In the metric's own direction; `inverse` turns the effect round."""
    if effect is None:
        return Edge(metric=metric, higher=higher, low=None, high=None)
    factor, low, high = effect.ratio.value, effect.ratio.low, effect.ratio.high
    if inverse is higher:
        factor, (low, high) = 1 / factor, (None if end is None else 1 / end for end in (high, low))
    shown = factor > 1 and (is_shown(effect) if _is_quality(metric) else is_different(effect))
    return Edge(metric=metric, higher=higher, factor=factor, low=low, high=high, shown=shown)


def _is_quality(metric: str) -> bool:
    """What the catalogue does not know is a quality of the user's own."""
    return metric not in METRICS or METRICS[metric].group == "quality"


def _same_by_proof(row: Row, other: Row) -> bool:
    """Two rows that are proven to train the same thing have one quality.

    What remains is rounding, and repeats with one seed would show it as a difference.  Weak scaling
    trains something else on every number of ranks.
    """
    if row.weak_scaling and row.world_size != other.world_size:
        return False
    return row.equivalent is True and other.equivalent is True and row.comparable(other)
