"""The front of throughput against memory against quality, as tables and for programs."""

from __future__ import annotations

from collections.abc import Sequence

from shardmark.analysis.compare.comparison import Comparison
from shardmark.analysis.compare.pareto import Dominance, Front, Standing, fronts_of
from shardmark.analysis.compare.rows import Row
from shardmark.core.metrics import METRICS
from shardmark.report.table.data import estimate_columns, flat, format_csv, identity_of, metrics_of
from shardmark.report.table.quantities import Quantity, quantity
from shardmark.report.table.sections import Section, View
from shardmark.report.table.tables import Column, Table, number, row_names
from shardmark.report.views.epochs import left_out

_SHOWN_AS = {
    "samples_per_second": Quantity("samples/s"),
    "peak_memory_bytes": Quantity("peak\nMiB", scale=2.0**-20),
}
_WORDS = {"samples_per_second": "samples/s", "peak_memory_bytes": "peak memory"}
_MANY = 2
"""Dominating rows named in a note; JSON has all."""


def pareto_view(comparison: Comparison) -> View:
    return View(
        key="pareto",
        sections=lambda: pareto_sections(comparison),
        data=lambda: pareto_json(comparison),
        csv=lambda: pareto_csv(comparison),
    )


def pareto_sections(comparison: Comparison) -> tuple[Section, ...]:
    """A table for each task; one that only explains itself where nothing was measured."""
    fronts = fronts_of(comparison.rows)
    if not fronts:
        notes = ("No trial ended ok.", *left_out(comparison.rows))
        return (Section(title="Pareto front", table=Table(columns=(), notes=notes)),)
    several = len(fronts) > 1
    return tuple(_section(front, comparison, several=several) for front in fronts)


def _section(front: Front, comparison: Comparison, *, several: bool) -> Section:
    rows = [one.row for one in front.standings]
    goals = ", ".join(f"{_words(name)} ({METRICS[name].better})" for name in front.goals)
    title = f"Pareto front of {goals}"
    if several:
        title += f": {front.experiment}, {front.workload}"
    columns: tuple[Column, ...] = ()
    if rows:
        columns = (
            *row_names(rows),
            *(_goal(name, rows) for name in front.goals),
            Column(
                title="standing",
                cells=tuple(_standing(one) for one in front.standings),
                numeric=False,
            ),
        )
    return Section(title=title, table=Table(columns=columns, notes=_notes(front, comparison)))


def _goal(name: str, rows: Sequence[Row]) -> Column:
    shown_as = _SHOWN_AS.get(name, quantity(name))
    interval = METRICS[name].group == "rate"
    cells = []
    for row in rows:
        estimate = row.metrics[name]
        text = shown_as.show(estimate)
        cells.append(text if interval else text.partition(" ")[0])
    return Column(title=shown_as.title.replace(" (", "\n("), cells=tuple(cells))


def _standing(one: Standing) -> str:
    if one.dominated_by:
        return "dominated"
    return "front, not sure" if one.perhaps_by else "front"


def _words(name: str) -> str:
    return _WORDS.get(name, name)


def _notes(front: Front, comparison: Comparison) -> tuple[str, ...]:
    rows = [one.row for one in front.standings]
    notes = [
        f"Dominated: {one.row.place}, by {_beaten(one.dominated_by)}."
        for one in front.standings
        if one.dominated_by
    ]
    unsure = [one for one in front.standings if one.on_front and one.perhaps_by]
    if unsure:
        named = "; ".join(f"{one.row.place} (by {_named(one.perhaps_by[0])})" for one in unsure)
        notes.append(
            f"Not sure, perhaps dominated: {named}; but the noise could hide a larger loss of the"
            " row in brackets in another goal. More repeats decide."
        )
    notes += [f"Not eligible: {row.place}: {reason}." for row, reason in front.left_out]
    notes.append(
        "Dominated: another row is shown to be better in some goal, at a level corrected for all"
        " differences of the front, and in every other goal its interval allows a loss of less than"
        " 5 %, and less than the gain is sure to be. Inside the noise nothing dominates."
    )
    if rows and max(len(row.ok_trials) for row in rows) < 2:
        notes.append("One repeat: no difference can be shown, so that every row is on the front.")
    unverified = [row.place for row in rows if row.equivalent is None and row.guarantee is None]
    if unverified:
        notes.append(f"Eligible though not verified: {'; '.join(unverified)}.")
    weaker = [row.place for row in rows if row.equivalent is None and row.guarantee is not None]
    if weaker:
        notes.append(f"Eligible though it promises less than equivalence: {'; '.join(weaker)}.")
    if any(METRICS[name].group == "quality" for name in front.goals):
        notes.append(
            "Quality: rows that are proven to train the same thing count as equal. The repeats"
            " share a seed, so that their interval says nothing of another one."
        )
    failed = [row for row in comparison.rows if row.experiment == front.experiment]
    return (*notes, *left_out([row for row in failed if row.workload == front.workload]))


def _beaten(by: Sequence[Dominance]) -> str:
    named = [_named(one) for one in by[:_MANY]]
    if len(by) > _MANY:
        named.append(f"{len(by) - _MANY} more")
    return f"{', '.join(named[:-1])} and {named[-1]}" if len(named) > 1 else named[0]


def _named(one: Dominance) -> str:
    """With its gains, as in `ddp on 4 ranks: samples/s +38 %, peak memory -5.3 %`."""
    parts = []
    for gain in one.gains:
        percent = (gain.ratios[0] - 1) * 100
        shown = number(percent, decimals=int(abs(percent) < 10))
        parts.append(f"{_words(gain.metric)} {'+' if percent > 0 else ''}{shown} %")
    return f"{one.by.place}: {', '.join(parts)}"


def pareto_json(comparison: Comparison) -> list[dict[str, object]]:
    """One mapping for each task."""
    return [
        {
            "experiment": front.experiment,
            "workload": front.workload,
            "goals": {name: METRICS[name].better for name in front.goals},
            "rows": [
                identity_of(one.row)
                | {
                    "metrics": metrics_of({name: one.row.metrics[name] for name in front.goals}),
                    "on_front": one.on_front,
                    "dominated_by": [_dominance(by) for by in one.dominated_by],
                    "perhaps_dominated_by": [_dominance(by) for by in one.perhaps_by],
                }
                for one in front.standings
            ],
            "left_out": [identity_of(row) | {"reason": reason} for row, reason in front.left_out],
        }
        for front in fronts_of(comparison.rows)
    ]


def _dominance(one: Dominance) -> dict[str, object]:
    gains = {
        gain.metric: dict(zip(("value", "low", "high"), gain.ratios, strict=True))
        | {"unit": "ratio"}
        for gain in one.gains
    }
    return {**identity_of(one.by), "gains": gains}


def pareto_csv(comparison: Comparison) -> str:
    """One line for each row that was measured; `on_front` is blank for one that is not eligible."""
    fronts = fronts_of(comparison.rows)
    goals = list(dict.fromkeys(name for front in fronts for name in front.goals))
    lines = []
    for front in fronts:
        for one in front.standings:
            line = identity_of(one.row) | {
                "on_front": one.on_front,
                "dominated_by": "; ".join(by.by.place for by in one.dominated_by),
                "perhaps_dominated_by": "; ".join(by.by.place for by in one.perhaps_by),
            }
            lines.append(line | _flat(one.row, goals))
        for row, reason in front.left_out:
            lines.append(identity_of(row) | {"not_eligible": reason} | _flat(row, goals))
    keys = dict.fromkeys(key for row in comparison.rows for key in identity_of(row))
    columns = [column for name in goals for column in estimate_columns(name)]
    states = ["on_front", "dominated_by", "perhaps_dominated_by", "not_eligible"]
    return format_csv(lines, [*keys, *columns, *states])


def _flat(row: Row, names: Sequence[str]) -> dict[str, object]:
    return {key: value for name in names for key, value in flat(name, row.metrics.get(name))}
