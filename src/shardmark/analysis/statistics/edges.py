"""How rows stand to one another in several goals, with what is shown of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from statistics import fmean

from shardmark.analysis.compare.rows import Row
from shardmark.analysis.statistics.effects import Effect, between_all, holm
from shardmark.analysis.statistics.sampling import beyond_sampling, seeds_of
from shardmark.analysis.statistics.verdicts import is_different, is_shown
from shardmark.core.metrics import METRICS


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
    def ratios(self) -> tuple[float, float | None, float | None]:
        """The metric over the other's, with its interval."""
        if self.higher:
            return self.factor, self.low, self.high
        low, high = (None if end is None else 1 / end for end in (self.high, self.low))
        return 1 / self.factor, low, high


def edges_of(rows: Sequence[Row], goals: Sequence[str]) -> dict[tuple[int, int], list[Edge]]:
    """Of each row to each other one; all differences are one family, corrected by Holm."""
    effects = _effects(rows, goals)
    higher = {goal: any(row.better(goal) == "higher" for row in rows) for goal in goals}
    edges = {}
    for above, below in combinations(range(len(rows)), 2):
        for one, other in ((above, below), (below, above)):
            proven = _same_by_proof(rows[one], rows[other])
            edges[one, other] = [
                Edge(metric=goal, higher=higher[goal])
                if proven and _is_quality(goal)
                else _edge(goal, effects.get((above, below, goal)), higher[goal], one > other)
                for goal in goals
            ]
    return edges


def _effects(rows: Sequence[Row], goals: Sequence[str]) -> dict[tuple[int, int, str], Effect]:
    """By the places of two rows, and goal; only what can be shown belongs to the family."""
    found: dict[tuple[int, int, str], Effect] = {}
    silent: dict[tuple[int, int, str], Effect] = {}
    for goal in goals:
        quality = _is_quality(goal)
        pairs = between_all([_values(row, goal) for row in rows], exact=not quality)
        for (above, below), effect in pairs.items():
            can_be_shown = not quality or _tells(rows[above], rows[below], goal)
            (found if can_be_shown else silent)[above, below, goal] = effect
    never = {key: replace(effect, p_corrected=1.0) for key, effect in silent.items()}
    return never | dict(zip(found, holm(list(found.values())), strict=True))


def _values(row: Row, goal: str) -> Mapping[int, float]:
    """None of the times of a disturbed row, which decide nothing."""
    timed = not _is_quality(goal) and METRICS[goal].group in ("time", "rate")
    return {} if row.disturbed and timed else row.values.get(goal, {})


def _tells(row: Row, other: Row, quality: str) -> bool:
    """Whether repeats can show a difference of a quality.

    Those of one seed cannot, however well they agree, and nor can too few validation samples.
    """
    if min(seeds_of(row), seeds_of(other)) < 2 or _same_by_proof(row, other):
        return False
    means = [fmean(one.values[quality].values()) for one in (row, other)]
    return beyond_sampling(row, other, quality, means[0] - means[1])


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
