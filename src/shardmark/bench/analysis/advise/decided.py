"""Cells that need no more repeats: narrow intervals, or comparisons that are decided."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from shardmark.base.cells import cell_id
from shardmark.base.results.schema import TrialResult
from shardmark.base.results.store import StoredRun
from shardmark.base.statistics.effects import holm, pairwise_effects
from shardmark.base.statistics.intervals import estimate_mean
from shardmark.bench.analysis.advise.groups import groups_of
from shardmark.bench.analysis.compare.comparison import compare
from shardmark.bench.analysis.compare.race import race_of
from shardmark.bench.analysis.compare.rows import Row, rate_of
from shardmark.bench.analysis.compare.verdicts import BASELINE, METRIC

STOPPING_LEVEL = 0.001
"""Significance level of the tests after each repeat, so strict that the verdicts after the last
repeat keep their level.  Sources: Haybittle, British J. Radiology 44 (1971),
793-797; Peto and others, British J. Cancer 34 (1976), 585-612."""


def decided_cells(
    trials: Sequence[TrialResult],
    until: float,
    strategies: tuple[str, ...] = (),
    *,
    margin: float | None = None,
) -> frozenset[str]:
    """Return the `cell_id` of cells that need no more repeats; disturbed trials do not count.

    A cell without a trial that ended ok is decided, too.  `strategies` is in the matrix's order.
    With a `margin`, the cells race against the first strategy's.
    """
    rows = compare([StoredRun(path=Path(), trials=tuple(trials), strategies=strategies)]).rows
    race = None if margin is None else race_of(rows, strategies[0], margin)
    if race is not None:
        over = [race.reference] if race.ended else []
        over += [racer.row for racer in race.racers if racer.out]
        return frozenset(cell_id(row.trials[0].trial) for row in over)
    undecided = [id(row) for row in undecided_rows(rows, until)]
    return frozenset(cell_id(row.trials[0].trial) for row in rows if id(row) not in undecided)


def undecided_rows(rows: Sequence[Row], until: float) -> list[Row]:
    """Return the measured rows that need more repeats, some of them twice.

    A row is decided if its differences to its baseline and to its group's fastest row are
    significant, or if it and those that it does not differ from are known precisely: the half width
    of an interval is at most `until` of its value.  Repeats are paired, so these two rows are
    repeated as long as a row that is compared with them.
    """
    undecided: list[Row] = []
    for group in groups_of(rows):
        measured = [row for row in group.rows if row.values.get(METRIC) and not row.diverged]
        effects = pairwise_effects([{} if r.disturbed else r.values[METRIC] for r in measured])
        corrected = dict(zip(effects, holm(list(effects.values())), strict=True))
        shown = {pair for pair, e in corrected.items() if e.p_corrected <= STOPPING_LEVEL}
        anchors = {at for at, row in enumerate(measured) if row.verdict == BASELINE}
        if measured:
            anchors.add(max(range(len(measured)), key=lambda at: rate_of(measured[at])))
        narrow = {at for at, row in enumerate(measured) if _is_narrow(row, until)}
        for at, row in enumerate(measured):
            others = ({*range(len(measured))} if at in anchors else anchors) - {at}
            left = {o for o in others if (min(at, o), max(at, o)) not in shown}
            if not ({at, *left} <= narrow or (others and not left)):
                undecided += [row, *(measured[other] for other in anchors)]
    return undecided


def _is_narrow(row: Row, until: float) -> bool:
    estimate = estimate_mean(list(row.values[METRIC].values()))
    half_width = math.inf if row.disturbed else estimate.half_width
    return half_width is not None and half_width <= until * estimate.value
