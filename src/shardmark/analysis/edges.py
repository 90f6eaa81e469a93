"""How rows stand to one another in several goals, with what is shown of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from shardmark.analysis.effects import Effect, holm, paired_effect
from shardmark.analysis.rows import Row
from shardmark.analysis.verdicts import FAMILY_ERROR_RATE, common_repeats
from shardmark.measure.metrics import METRICS

_TINY = 1e-300
"""Two repeats that differ wildly have an interval that begins at zero."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """How one row stands to another in one goal."""

    metric: str
    factor: float
    """How many times better: 2 is twice the throughput, and half the memory."""
    low: float | None
    """95 % interval of this one difference; None where the repeats allow none."""
    high: float | None
    shown: bool
    """Better, at the level that is corrected for all differences of the front."""

    @property
    def worse(self) -> bool:
        """A loss is shown, at the level of a single difference."""
        return self.high is not None and self.high < 1

    @property
    def ratios(self) -> tuple[float, float | None, float | None]:
        """The metric over the other's, with its interval."""
        if METRICS[self.metric].better == "higher":
            return self.factor, self.low, self.high
        low, high = (None if end is None else 1 / end for end in (self.high, self.low))
        return 1 / self.factor, low, high


def edges_of(rows: Sequence[Row], goals: Sequence[str]) -> dict[tuple[int, int], list[Edge]]:
    """Of each row to each other one; all differences are one family, corrected by Holm."""
    effects: dict[tuple[int, int, str], Effect] = {}
    for above, below in combinations(range(len(rows)), 2):
        for goal in goals:
            found = _effect(rows[above], rows[below], goal)
            if found is not None:
                effects[above, below, goal] = found
    corrected = dict(zip(effects, holm(list(effects.values())), strict=True))
    edges = {}
    for above, below in combinations(range(len(rows)), 2):
        same = _same_by_proof(rows[above], rows[below])
        both = [(goal, corrected.get((above, below, goal))) for goal in goals]
        for pair, inverse in (((above, below), False), ((below, above), True)):
            edges[pair] = [
                _edge(goal, effect, inverse=inverse, same=same and _is_quality(goal))
                for goal, effect in both
            ]
    return edges


def _effect(row: Row, other: Row, metric: str) -> Effect | None:
    """None where nothing can be shown, and for a quality that is the same by proof."""
    repeats = common_repeats(row, other, metric)
    if len(repeats) < 2 or (_is_quality(metric) and _same_by_proof(row, other)):
        return None
    return paired_effect(
        [row.values[metric][repeat] for repeat in repeats],
        [other.values[metric][repeat] for repeat in repeats],
    )


def _edge(metric: str, effect: Effect | None, *, inverse: bool, same: bool) -> Edge:
    """In the metric's own direction; `inverse` turns the effect round."""
    if same:
        return Edge(metric=metric, factor=1.0, low=1.0, high=1.0, shown=False)
    if effect is None:
        return Edge(metric=metric, factor=1.0, low=None, high=None, shown=False)
    ratio = effect.ratio
    assert ratio.low is not None, "an effect has an interval"
    assert ratio.high is not None, "an effect has an interval"
    factor, low, high = ratio.value, ratio.low, ratio.high
    if inverse is (METRICS[metric].better == "higher"):
        factor, low, high = 1 / factor, 1 / high, 1 / max(low, _TINY)
    shown = factor > 1 and effect.p_corrected <= FAMILY_ERROR_RATE
    return Edge(metric=metric, factor=factor, low=low, high=high, shown=shown)


def _is_quality(metric: str) -> bool:
    return METRICS[metric].group == "quality"


def _same_by_proof(row: Row, other: Row) -> bool:
    """Two rows that are proven to train the same thing have one quality.

    What remains is rounding, and repeats with one seed would show it as a difference.  Weak scaling
    trains something else on every number of ranks.
    """
    if row.weak_scaling and row.world_size != other.world_size:
        return False
    return row.equivalent is True and other.equivalent is True and row.comparable(other)
