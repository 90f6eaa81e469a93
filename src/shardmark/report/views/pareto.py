"""Which rows nothing beats in throughput, memory and quality together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple

from shardmark.analysis.compare.comparison import Comparison
from shardmark.analysis.compare.edges import Edge, edges_of
from shardmark.analysis.compare.rows import Row, main_quality, main_rate, plain, rate_of, task_of
from shardmark.core.metrics import METRICS, RATES
from shardmark.report.table.notes import left_out
from shardmark.report.table.table import (
    Column,
    Table,
    for_items,
    for_programs,
    metric,
    number,
    table_by_row,
)

MARGIN = 0.05
"""A loss of this size and more must be ruled out in every other goal."""
_WORDS = {rate: METRICS[rate].unit for rate in RATES} | {"peak_memory_bytes": "peak memory"}


class Dominance(NamedTuple):
    """A row that beats another one."""

    by: Row
    gains: Sequence[Edge]
    """Goals in which it is shown to be better."""

    def __str__(self) -> str:
        """With its gains, as in `ddp on 4 ranks: samples/s +38 %, peak memory -5.3 %`."""
        percents = {gain.metric: (gain.ratio - 1) * 100 for gain in self.gains}
        parts = [
            f"{_words(name)} {'+' if percent > 0 else ''}"
            f"{number(percent, decimals=int(abs(percent) < 10))} %"
            for name, percent in percents.items()
        ]
        return f"{self.by.place}: {', '.join(parts)}"


class Standing(NamedTuple):
    """A row with those that beat it."""

    row: Row
    dominated_by: Sequence[Dominance] = ()
    """Largest gain first; none on the front."""
    reason: str | None = None
    """Why it is not eligible."""

    def __str__(self) -> str:
        if self.reason is not None:
            return f"not eligible: {self.reason}"
        return f"dominated by {self.dominated_by[0].by.place}" if self.dominated_by else "front"


def pareto_tables(comparison: Comparison) -> list[Table]:
    """A table for each task: experiment, workload and the varied keys of the workload.

    Eligible are rows with a trial that ended ok and without a proof that they train something else.
    """
    tasks: dict[tuple[str, ...], list[Row]] = {}
    for row in comparison.rows:
        tasks.setdefault(task_of(row), []).append(row)
    measured = [rows for rows in tasks.values() if any(row.ok_trials for row in rows)]
    if not measured:
        notes = ("No trial ended ok.", *left_out(comparison.rows))
        return [Table(title="Pareto front", notes=notes)]
    return [_table(rows, several=len(measured) > 1) for rows in measured]


def _table(same_task: Sequence[Row], *, several: bool) -> Table:
    rows = [row for row in same_task if row.ok_trials]
    goals = _goals([row for row in rows if row.equivalent is not False and not row.diverged])
    standings = _standings(rows, goals)
    shown = ", ".join(f"{_words(name)} ({rows[0].better(name)})" for name in goals)
    return table_by_row(
        f"Pareto front of {shown}{_task(rows[0]) if several else ''}",
        [(standing.row, standing) for standing in standings],
        [
            *for_items([metric(name) for name in goals], attrgetter("row")),
            (Column("standing", "standing", numeric=False), str),
            (for_programs("dominated_by"), lambda each: [*map(str, each.dominated_by)]),
        ],
        [*_notes(standings, goals), *left_out(same_task)],
    )


def _task(row: Row) -> str:
    varied = {key: value for key, value in row.varied.items() if key.startswith("workload")}
    parts = (row.experiment, row.workload, *(f"{k}={plain(v)}" for k, v in varied.items()))
    return f": {', '.join(parts)}"


def _goals(rows: Sequence[Row]) -> tuple[str, ...]:
    """Throughput and memory where any row has them, and one quality that most rows have."""
    quality = main_quality(rows)
    names = (main_rate(rows), "peak_memory_bytes", *([quality] if quality else ()))
    return tuple(name for name in names if any(row.values.get(name) for row in rows))


def _standings(rows: Sequence[Row], goals: Sequence[str]) -> list[Standing]:
    """The front first, then by throughput; what is not eligible last."""
    reasons = [(row, _not_eligible(row, goals)) for row in rows]
    standings = [
        *_compared([row for row, reason in reasons if reason is None], goals),
        *(Standing(row, reason=reason) for row, reason in reasons if reason is not None),
    ]
    return sorted(
        standings,
        key=lambda s: (s.reason is not None, bool(s.dominated_by), -rate_of(s.row)),
    )


def _not_eligible(row: Row, goals: Sequence[str]) -> str | None:
    if row.equivalent is False:
        return "trains something else"
    if row.diverged:
        return row.diverged
    lacking = [name for name in goals if not row.values.get(name)]
    return f"it has no {lacking[0]}: {row.missing.get(lacking[0], '')}" if lacking else None


def _compared(rows: Sequence[Row], goals: Sequence[str]) -> list[Standing]:
    """Rows that beat one another in a ring do not count for one another, so that some row stays.

    A ring takes pairs that were compared over different repeats, because some trials failed.
    """
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    sure: dict[tuple[int, int], Dominance] = {}
    for pair, edges in edges_of(rows, goals).items():
        gains = [edge for edge in edges if edge.shown]
        if gains and _safe(edges, gains) and not any(edge.worse for edge in edges):
            sure[pair] = Dominance(rows[pair[0]], gains)
    above, below = zip(*sure, strict=True) if sure else ((), ())
    beats = coo_array(([1] * len(sure), (above, below)), shape=(len(rows), len(rows)))
    ring = connected_components(beats, connection="strong")[1]
    outside = {pair: by for pair, by in sure.items() if ring[pair[0]] != ring[pair[1]]}
    return [Standing(row, _over(index, outside)) for index, row in enumerate(rows)]


def _over(index: int, dominances: Mapping[tuple[int, int], Dominance]) -> list[Dominance]:
    """Those that beat the row of that index, the largest gain first."""
    chosen = [dominance for (_, below), dominance in dominances.items() if below == index]
    return sorted(chosen, key=lambda each: -max(gain.factor for gain in each.gains))


def _safe(edges: Sequence[Edge], gains: Sequence[Edge]) -> bool:
    """No interval allows a loss of `MARGIN`, nor one by as large a factor as that of the gain.

    Of the gain counts what is sure: the lower end of its own interval.
    """
    sure = max(gain.low or 1.0 for gain in gains)
    bound = max(1 / sure, 1 - MARGIN)
    return all(e.low is not None and e.low > bound for e in edges if not e.shown)


def _words(name: str) -> str:
    return _WORDS.get(name, name)


def _notes(standings: Sequence[Standing], goals: Sequence[str]) -> list[str]:
    rows = [standing.row for standing in standings if standing.reason is None]
    notes = [
        "Dominated is what is shown to be worse in some goal and at most 5 % better in any other."
        " Inside the noise nothing dominates."
    ]
    if rows and max(len(row.ok_trials) for row in rows) < 2:
        notes.append("One repeat: no difference can be shown, so every row is on the front.")
    unproven = "; ".join(row.place for row in rows if row.equivalent is None)
    if unproven:
        notes.append(f"Eligible though not proven to train the same thing: {unproven}.")
    if any(name not in METRICS or METRICS[name].group == "quality" for name in goals):
        notes.append("Quality: rows that are proven to train the same thing count as equal.")
    return notes
