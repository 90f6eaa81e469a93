"""Which rows nothing beats in throughput, memory and quality together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

from shardmark.analysis.compare.comparison import Comparison
from shardmark.analysis.compare.rows import Row, main_quality, rate_of, task_of
from shardmark.analysis.statistics.edges import Edge, edges_of
from shardmark.core.metrics import METRICS
from shardmark.report.table.columns import for_items, metric, row_columns
from shardmark.report.table.gaps import left_out
from shardmark.report.table.table import Column, Table, number, table_of

GOALS = ("samples_per_second", "peak_memory_bytes")
"""Beside the main quality."""
NOT_EQUIVALENT = "trains something else"
MARGIN = 0.05
"""A loss of this size and more must be ruled out in every other goal."""
_WORDS = {"samples_per_second": "samples/s", "peak_memory_bytes": "peak memory"}
_NAMED = 2
"""Dominating rows named in a note; JSON has all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dominance:
    """A row that beats another one."""

    by: Row
    gains: tuple[Edge, ...]
    """Goals in which it is shown to be better."""

    def __str__(self) -> str:
        """With its gains, as in `ddp on 4 ranks: samples/s +38 %, peak memory -5.3 %`."""
        parts = []
        for gain in self.gains:
            percent = (gain.ratios[0] - 1) * 100
            shown = number(percent, decimals=int(abs(percent) < 10))
            parts.append(f"{_words(gain.metric)} {'+' if percent > 0 else ''}{shown} %")
        return f"{self.by.place}: {', '.join(parts)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """A row with those that beat it."""

    row: Row
    dominated_by: tuple[Dominance, ...] = ()
    """Largest gain first; none on the front."""
    perhaps_by: tuple[Dominance, ...] = ()
    """Shown to be better in some goal; the noise could hide a larger loss in another."""
    reason: str | None = None
    """Why it is not eligible."""

    def __str__(self) -> str:
        if self.reason is not None:
            return f"not eligible: {self.reason}"
        if self.dominated_by:
            return "dominated"
        return "front, not sure" if self.perhaps_by else "front"


def pareto_tables(comparison: Comparison) -> list[Table]:
    """A table for each task: experiment, workload and the varied keys of the workload.

    Eligible are rows with a trial that ended ok and without a proof that they train something else.
    """
    tasks: dict[tuple[str, ...], list[Row]] = {}
    for row in comparison.rows:
        if row.ok_trials:
            tasks.setdefault(task_of(row), []).append(row)
    if not tasks:
        notes = ["No trial ended ok.", *left_out(comparison.rows)]
        return [table_of("Pareto front", (), (), notes)]
    return [
        _table(
            rows, [row for row in comparison.rows if task_of(row) == task], several=len(tasks) > 1
        )
        for task, rows in tasks.items()
    ]


def _table(rows: Sequence[Row], same_task: Sequence[Row], *, several: bool) -> Table:
    goals = _goals([row for row in rows if row.equivalent is not False])
    standings = _standings(rows, goals)
    shown = ", ".join(f"{_words(name)} ({METRICS[name].better})" for name in goals)
    task = f": {rows[0].experiment}, {rows[0].workload}" if several else ""
    dominated = Column(key="dominated_by", title="dominated by", numeric=False, shown_to="programs")
    return table_of(
        f"Pareto front of {shown}{task}",
        standings,
        [
            *for_items(row_columns([standing.row for standing in standings]), attrgetter("row")),
            *for_items([metric(name) for name in goals], attrgetter("row")),
            (Column(key="standing", title="standing", numeric=False), str),
            (dominated, lambda standing: "; ".join(map(str, standing.dominated_by))),
        ],
        [*_notes(standings, goals), *left_out(same_task)],
    )


def _goals(rows: Sequence[Row]) -> tuple[str, ...]:
    """Throughput and memory where any row has them, and one quality that most rows have."""
    quality = main_quality(rows)
    names = GOALS if quality is None else (*GOALS, quality)
    return tuple(name for name in names if any(row.values.get(name) for row in rows))


def _standings(rows: Sequence[Row], goals: Sequence[str]) -> list[Standing]:
    """The front first, then by throughput; what is not eligible last."""
    reasons = [_not_eligible(row, goals) for row in rows]
    standings = [
        *_compared([row for row, why in zip(rows, reasons, strict=True) if why is None], goals),
        *(Standing(row=r, reason=why) for r, why in zip(rows, reasons, strict=True) if why),
    ]
    return sorted(
        standings,
        key=lambda s: (s.reason is not None, bool(s.dominated_by), -rate_of(s.row)),
    )


def _not_eligible(row: Row, goals: Sequence[str]) -> str | None:
    if row.equivalent is False:
        return NOT_EQUIVALENT
    lacking = [name for name in goals if not row.values.get(name)]
    return f"it has no {lacking[0]}: {row.missing.get(lacking[0], '')}" if lacking else None


def _compared(rows: Sequence[Row], goals: Sequence[str]) -> list[Standing]:
    """Rows that beat one another in a ring do not count for one another, so that some row stays.

    A ring takes pairs that were compared over different repeats, because some trials failed.
    """
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    sure: dict[tuple[int, int], Dominance] = {}
    perhaps: dict[tuple[int, int], Dominance] = {}
    for pair, edges in edges_of(rows, goals).items():
        gains = tuple(edge for edge in edges if edge.shown)
        if gains and not any(edge.worse for edge in edges):
            dominance = Dominance(by=rows[pair[0]], gains=gains)
            (sure if _safe(edges, gains) else perhaps)[pair] = dominance
    above, below = zip(*sure, strict=True) if sure else ((), ())
    beats = coo_array(([1] * len(sure), (above, below)), shape=(len(rows), len(rows)))
    ring = connected_components(beats, connection="strong")[1]

    def of(dominances: dict[tuple[int, int], Dominance], index: int) -> tuple[Dominance, ...]:
        chosen = [each for (_, below), each in dominances.items() if below == index]
        return tuple(sorted(chosen, key=lambda each: -max(gain.factor for gain in each.gains)))

    outside = {pair: by for pair, by in sure.items() if ring[pair[0]] != ring[pair[1]]}
    return [
        Standing(row=row, dominated_by=of(outside, index), perhaps_by=of(perhaps, index))
        for index, row in enumerate(rows)
    ]


def _safe(edges: Sequence[Edge], gains: Sequence[Edge]) -> bool:
    """No interval allows a loss of `MARGIN`, nor one by as large a factor as that of the gain.

    Of the gain counts what is sure: the lower end of its own interval.
    """
    sure = max(gain.low or 1.0 for gain in gains)
    bound = max(1 / sure, 1 - MARGIN)
    others = [edge.low for edge in edges if not edge.shown]
    return all(low is not None and low > bound for low in others)


def _words(name: str) -> str:
    return _WORDS.get(name, name)


def _notes(standings: Sequence[Standing], goals: Sequence[str]) -> list[str]:
    eligible = [standing for standing in standings if standing.reason is None]
    rows = [standing.row for standing in eligible]
    notes = [
        f"Dominated: {standing.row.place}, by {_first(standing.dominated_by)}."
        for standing in eligible
        if standing.dominated_by
    ]
    unsure = "; ".join(
        f"{standing.row.place} (by {standing.perhaps_by[0]})"
        for standing in eligible
        if standing.perhaps_by and not standing.dominated_by
    )
    if unsure:
        notes.append(f"Not sure, more repeats decide; perhaps dominated: {unsure}.")
    notes.append(
        "Dominated is what is shown to be worse in some goal and at most 5 % better in any other."
        " Inside the noise nothing dominates."
    )
    if rows and max(len(row.ok_trials) for row in rows) < 2:
        notes.append("One repeat: no difference can be shown, so every row is on the front.")
    unproven = [row for row in rows if row.equivalent is None]
    unverified = [row.place for row in unproven if row.guarantee is None]
    if unverified:
        notes.append(f"Eligible though not verified: {'; '.join(unverified)}.")
    weaker = [row.place for row in unproven if row.guarantee is not None]
    if weaker:
        notes.append(f"Eligible with a weaker guarantee than equivalence: {'; '.join(weaker)}.")
    if any(METRICS[name].group == "quality" for name in goals):
        notes.append("Quality: rows that are proven to train the same thing count as equal.")
    return notes


def _first(by: Sequence[Dominance]) -> str:
    more = [f"{len(by) - _NAMED} more"] if len(by) > _NAMED else []
    named = [*map(str, by[:_NAMED]), *more]
    return f"{', '.join(named[:-1])} and {named[-1]}" if len(named) > 1 else named[0]
