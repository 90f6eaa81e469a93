"""A comparison on one screen: answers, table, reasons, and commands to run next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from shardmark.base.table.formats import Format, render_points, render_tables
from shardmark.base.text import render_json
from shardmark.bench.analysis.compare.comparison import Comparison
from shardmark.bench.analysis.compare.step_time import division_of
from shardmark.bench.report.answers.answers import answer_grid, answer_lines, answers, next_commands
from shardmark.bench.report.answers.parts import division_facts, parts_table
from shardmark.bench.report.answers.surprises import why_lines
from shardmark.bench.report.table.comparison import BRIEF, comparison_json, comparison_table


def overview(
    comparison: Comparison,
    form: Format = Format.TEXT,
    columns: Sequence[str] | None = None,
    width: int | None = 80,
) -> str:
    """Return the comparison in that format, with a line break at the end; CSV is the table alone.

    A text table that is wider than `width` continues below; None is for a file.
    """
    if form is Format.JSON:
        return overview_json(comparison, columns=columns or ())
    brief = width if form is Format.TEXT and not columns else None
    table = comparison_table(comparison, columns or BRIEF, brief_width=brief)
    shown = render_tables([table], form, width, headings=False)
    if form is Format.CSV:
        return shown
    first, more = answer_lines(comparison), [answer_grid(comparison), parts_table(comparison)]
    grid, parts_of_steps = (
        "" if table is None else render_tables([table], form, width).rstrip() + "\n"
        for table in more
    )
    last = [*why_lines(comparison), *next_commands(comparison)]
    parts = [
        render_points(first, form, width) if first else "",
        grid,
        shown,
        parts_of_steps,
        render_points(last, form, width) if last else "",
    ]
    return "\n".join(filter(None, parts))


def overview_json(
    comparison: Comparison, views: Mapping[str, object] | None = None, columns: Sequence[str] = ()
) -> str:
    """Return `answers`, `rows`, `warnings`, `rounding` if it was measured, and the views by key."""
    cautions_last = sorted(answers(comparison), key=lambda answer: answer.question == "caution")
    answer_documents = [asdict(answer) for answer in cautions_last]
    twins = [asdict(twin) for twin in comparison.rounding]
    rounding = {"rounding": twins} if twins else {}
    rows = comparison_json(comparison, columns)
    for row, document in zip(comparison.rows, rows["rows"], strict=True):
        division = division_of(row)
        document["step"] = None if division is None else division_facts(division)
    return render_json({"answers": answer_documents, **rows, **rounding, **(views or {})})
