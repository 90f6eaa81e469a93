"""A race of variants against the first one: which are kept, and which are out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean
from typing import Literal

from shardmark.base.statistics.race import Decision, Standing, standing
from shardmark.bench.analysis.compare.rows import Row
from shardmark.bench.analysis.compare.verdicts import METRIC, MIN_GAIN, common_repeats

MEMORY = ("peak_memory_bytes", "peak_rss_bytes")
"""Metrics of memory, the first of which that both have is compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Racer:
    """A candidate and what its pairs with the reference show."""

    row: Row
    standing: Standing
    decision: Decision
    out: bool
    """True if the candidate needs no more trials."""
    memory_ratio: float | None
    """Peak memory in units of the reference's, if every pair shows less; else None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Race:
    reference: Row
    racers: tuple[Racer, ...]
    margin: float

    @property
    def ended(self) -> bool:
        return all(racer.out for racer in self.racers)


def race_of(rows: Sequence[Row], first: str, margin: float) -> Race | None:
    """Return the race of the rows against the one of the strategy `first`; None without it.

    Disturbed trials do not count.  A candidate is out that is decided against the reference, if no
    other candidate is undecided that could be faster, or that is shown slower than another one.
    """
    reference = next((row for row in rows if row.strategy == first), None)
    candidates = [row for row in rows if row is not reference]
    if reference is None or not candidates:
        return None
    comparisons = len(candidates) * (len(candidates) + 1) // 2
    against = [_standing(row, reference, comparisons) for row in candidates]
    decisions = [result.decision(margin) for result in against]
    beaten, separated = set[int](), set[tuple[int, int]]()
    for one, other in combinations(range(len(candidates)), 2):
        decision = _standing(candidates[one], candidates[other], comparisons).decision(margin)
        beaten |= {
            *([one] if decision is Decision.SLOWER else []),
            *([other] if decision is Decision.FASTER else []),
        }
        if decision is not Decision.UNDECIDED:
            separated |= {(one, other), (other, one)}
    alive = [n for n, d in enumerate(decisions) if d in {Decision.FASTER, Decision.UNDECIDED}]
    alive = [n for n in alive if n not in beaten]
    racers = []
    for number, row in enumerate(candidates):
        rivals = [other for other in alive if other != number and (number, other) not in separated]
        racers.append(
            Racer(
                row=row,
                standing=against[number],
                decision=decisions[number],
                out=bool(row.outcomes)
                and (
                    number in beaten
                    or decisions[number] in {Decision.SLOWER, Decision.NO_DIFFERENCE}
                    or (decisions[number] is Decision.FASTER and not rivals)
                    or row.equivalent is False
                    or not row.ok_trials
                ),
                memory_ratio=_memory_ratio(row, reference),
            )
        )
    return Race(reference=reference, racers=tuple(racers), margin=margin)


def _standing(row: Row, other: Row, comparisons: int) -> Standing:
    if row.disturbed or other.disturbed:
        return standing([], [])
    repeats = common_repeats(row, other, METRIC)
    speeds = [[r.values[METRIC][n] for n in repeats] for r in (row, other)]
    return standing(speeds[0], speeds[1], comparisons=comparisons)


def _memory_ratio(row: Row, reference: Row) -> float | None:
    for metric in MEMORY:
        if row.values.get(metric) and reference.values.get(metric):
            values, other = (r.values[metric] for r in (row, reference))
            ratios = [values[n] / other[n] for n in values.keys() & other.keys() if other[n]]
            if len(ratios) > 2 and max(ratios) < 1 - MIN_GAIN:
                return fmean(ratios)
            return None
    return None


Verdict = Literal["keep", "discard", "not decided"]


def verdict_on(racer: Racer) -> Verdict:
    """Keep what trains the same and is faster, or as fast with less memory."""
    if racer.row.equivalent is False or racer.decision is Decision.SLOWER:
        return "discard"
    if racer.decision is Decision.NO_DIFFERENCE and racer.memory_ratio is None:
        return "discard"
    if racer.decision is Decision.UNDECIDED or racer.row.equivalent is None:
        return "discard" if not racer.row.ok_trials and racer.row.outcomes else "not decided"
    return "keep"
