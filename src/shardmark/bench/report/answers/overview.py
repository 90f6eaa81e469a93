"""A comparison on one screen: answers, table, reasons, and commands to run next."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict

from shardmark.base.table.formats import Format, render_points, render_tables
from shardmark.base.text import counted, render_json
from shardmark.bench.analysis.advise.groups import groups_of
from shardmark.bench.analysis.compare.comparison import Comparison
from shardmark.bench.analysis.diagnose.explanations import LEAST_SHARE, Explanation, Kind, explain
from shardmark.bench.report.answers.answers import answer_grid, answer_lines, answers, next_commands
from shardmark.bench.report.answers.wording import milliseconds, name, percent, short, size
from shardmark.bench.report.table.comparison import BRIEF, comparison_json, comparison_table

MOST_LINES = 3


def why_lines(comparison: Comparison) -> list[str]:
    """Return the largest surprise of each kind, at most three, as question and answer."""
    striking: dict[Kind, Explanation] = {}
    for group in groups_of(comparison.rows):
        for explanation in explain(group):
            current = striking.get(explanation.kind)
            # Strategies that train the same as the reference come first: they are recommended.
            if current is None or _order(explanation) < _order(current):
                striking[explanation.kind] = explanation
    return [_TEXTS[explanation.kind](explanation) for explanation in striking.values()][:MOST_LINES]


def _order(explanation: Explanation) -> tuple[bool, float]:
    return (
        explanation.row.equivalent is None and explanation.row.guarantee is not None,
        -explanation.size,
    )


def _slower(explanation: Explanation) -> str:
    assert explanation.other is not None, "slower than something"
    row, other = explanation.row, explanation.other
    if row.label == other.label:
        question = f"Why is {row.label} slower on {counted(row.world_size, 'rank')} than on"
        question += f" {other.world_size}?"
    else:
        same_size = row.world_size == other.world_size
        names = (name(row, with_ranks=not same_size), name(other, with_ranks=not same_size))
        question = f"Why is {names[0]} slower than {names[1]}?"
    most = max(explanation.parts.values())
    # Which of two parts of like size is the largest, chance decides.
    main = {part: amount for part, amount in explanation.parts.items() if amount >= most / 2}
    texts = [f"+{milliseconds(amount)} of {part}" for part, amount in main.items()]
    answer = f"{question}  {' and '.join(texts)} a step"
    calls, others = (explanation.facts.get(name, 0.0) for name in ("calls", "other_calls"))
    if "exposed communication" in main and calls > others > 0:
        answer += f", {short(calls)} collectives instead of {short(others)}"
    return answer


def _memory(explanation: Explanation) -> str:
    assert explanation.other is not None, "saves against something"
    row, other = (name(one, with_ranks=False) for one in (explanation.row, explanation.other))
    share = explanation.difference / explanation.facts["peak_bytes"]
    question = (
        f"Why does {row} save only {percent(share)} of memory?"
        if share > 0
        else f"Why does {row} save no memory?"
    )
    grown = {part: -saved for part, saved in explanation.parts.items() if part != "model state"}
    part, bytes_more = max(grown.items(), key=lambda item: item[1])
    state = explanation.parts["model state"]
    if bytes_more > LEAST_SHARE * state:
        change = f"{size(abs(state))} {'less' if state > 0 else 'more'} model state"
        change = change if state else "as much model state"
        grown_too = f", {size(bytes_more)} more {part}" if bytes_more > 0 else ""
        return f"{question}  {change}{grown_too}"
    activations = percent(explanation.facts["activation_share"])
    return f"{question}  {activations} of {other}'s peak is activations"


def _waits(explanation: Explanation) -> str:
    question = f"Why does {name(explanation.row)} wait?"
    share = percent(explanation.size)
    return (
        f"{question}  rank {explanation.facts['rank']:.0f} comes last: the others wait"
        f" {milliseconds(explanation.difference)} a step ({share})"
    )


_TEXTS: dict[Kind, Callable[[Explanation], str]] = {
    "slower": _slower,
    "little memory saved": _memory,
    "waits for a rank": _waits,
}


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
    first, grid = answer_lines(comparison), answer_grid(comparison)
    last = [*why_lines(comparison), *next_commands(comparison)]
    parts = [
        render_points(first, form, width) if first else "",
        "" if grid is None else render_tables([grid], form, width),
        shown,
        render_points(last, form, width) if last else "",
    ]
    return "\n".join(filter(None, parts))


def overview_json(
    comparison: Comparison,
    views: Mapping[str, object] | None = None,
    columns: Sequence[str] = (),
) -> str:
    """Return `answers`, `rows`, `warnings`, `rounding` if it was measured, and the views by key."""
    cautions_last = sorted(answers(comparison), key=lambda answer: answer.question == "caution")
    answer_documents = [asdict(answer) for answer in cautions_last]
    twins = [asdict(twin) for twin in comparison.rounding]
    rounding = {"rounding": twins} if twins else {}
    rows = comparison_json(comparison, columns)
    return render_json({"answers": answer_documents, **rows, **rounding, **(views or {})})
