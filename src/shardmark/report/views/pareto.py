"""Which rows nothing beats in throughput, memory and quality together."""

from __future__ import annotations

from collections.abc import Sequence

from shardmark.analysis.compare.comparison import Comparison
from shardmark.analysis.compare.pareto import Dominance, Front, Standing, fronts_of
from shardmark.analysis.compare.rows import Row, task_of
from shardmark.core.metrics import METRICS
from shardmark.report.table.columns import for_items, metric, row_columns
from shardmark.report.table.gaps import left_out
from shardmark.report.table.table import Column, Table, number, table_of

_WORDS = {"samples_per_second": "samples/s", "peak_memory_bytes": "peak memory"}
_NAMED = 2
"""Dominating rows named in a note; JSON has all."""


def pareto_tables(comparison: Comparison) -> list[Table]:
    """A table for each task."""
    fronts = fronts_of(comparison.rows)
    if not fronts:
        notes = ["No trial ended ok.", *left_out(comparison.rows)]
        return [table_of("Pareto front", (), (), notes)]
    return [_table(front, comparison, several=len(fronts) > 1) for front in fronts]


def _table(front: Front, comparison: Comparison, *, several: bool) -> Table:
    goals = ", ".join(f"{_words(name)} ({METRICS[name].better})" for name in front.goals)
    task = f": {front.experiment}, {front.workload}" if several else ""
    standing = Column(key="standing", title="standing", numeric=False)
    dominated = Column(key="dominated_by", title="dominated by", numeric=False, shown_to="programs")
    rows = [standing.row for standing in front.standings]
    return table_of(
        f"Pareto front of {goals}{task}",
        front.standings,
        [
            *for_items(row_columns(rows), _row_of),
            *for_items([metric(name) for name in front.goals], _row_of),
            (standing, _standing),
            (dominated, lambda item: "; ".join(_named(by) for by in item.dominated_by)),
        ],
        _notes(front, comparison),
    )


def _row_of(standing: Standing) -> Row:
    return standing.row


def _standing(standing: Standing) -> str:
    if standing.reason is not None:
        return f"not eligible: {standing.reason}"
    if standing.dominated_by:
        return "dominated"
    return "front, not sure" if standing.perhaps_by else "front"


def _words(name: str) -> str:
    return _WORDS.get(name, name)


def _notes(front: Front, comparison: Comparison) -> list[str]:
    eligible = [standing for standing in front.standings if standing.reason is None]
    rows = [standing.row for standing in eligible]
    notes = [
        f"Dominated: {standing.row.place}, by {_first(standing.dominated_by)}."
        for standing in eligible
        if standing.dominated_by
    ]
    unsure = "; ".join(
        f"{standing.row.place} (by {_named(standing.perhaps_by[0])})"
        for standing in eligible
        if standing.on_front and standing.perhaps_by
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
    if any(METRICS[name].group == "quality" for name in front.goals):
        notes.append("Quality: rows that are proven to train the same thing count as equal.")
    same_task = [row for row in comparison.rows if task_of(row) == front.task]
    return [*notes, *left_out(same_task)]


def _first(by: Sequence[Dominance]) -> str:
    named = [_named(dominance) for dominance in by[:_NAMED]]
    if len(by) > _NAMED:
        named.append(f"{len(by) - _NAMED} more")
    return f"{', '.join(named[:-1])} and {named[-1]}" if len(named) > 1 else named[0]


def _named(dominance: Dominance) -> str:
    """With its gains, as in `ddp on 4 ranks: samples/s +38 %, peak memory -5.3 %`."""
    parts = []
    for gain in dominance.gains:
        percent = (gain.ratios[0] - 1) * 100
        shown = number(percent, decimals=int(abs(percent) < 10))
        parts.append(f"{_words(gain.metric)} {'+' if percent > 0 else ''}{shown} %")
    return f"{dominance.by.place}: {', '.join(parts)}"
