"""Why something is slower or larger than one expects: one question and its answer a line."""

from __future__ import annotations

from collections.abc import Callable

from shardmark.analysis.advise.groups import groups_of
from shardmark.analysis.compare.comparison import Comparison
from shardmark.analysis.diagnose.explanations import Explanation, Kind, explain
from shardmark.report.answers.wording import milliseconds, name, percent, ranks, size

MOST_LINES = 3
LEAST_SHARE = 0.25
"""A smaller part of a difference is no answer to why."""


def why_lines(comparison: Comparison) -> list[str]:
    """The most striking surprise of each kind, three at most, as question and answer."""
    striking: dict[Kind, Explanation] = {}
    for group in groups_of(comparison.rows):
        for each in explain(group):
            known = striking.get(each.kind)
            # Strategies that train the same thing come first: they are what is recommended.
            if known is None or _order(each) < _order(known):
                striking[each.kind] = each
    return [_TEXTS[each.kind](each) for each in striking.values()][:MOST_LINES]


def _order(each: Explanation) -> tuple[bool, float]:
    return each.row.equivalent is None and each.row.guarantee is not None, -each.size


def _slower(each: Explanation) -> str:
    assert each.other is not None, "slower than something"
    row, other = each.row, each.other
    if row.label == other.label:
        question = f"Why is {row.label} slower on {ranks(row.world_size)} than on"
        question += f" {other.world_size}?"
    else:
        alike = row.world_size == other.world_size
        names = (name(row, with_ranks=not alike), name(other, with_ranks=not alike))
        question = f"Why is {names[0]} slower than {names[1]}?"
    main, amount = next(iter(each.parts.items()), ("", 0.0))
    if amount < LEAST_SHARE * each.difference or amount <= 0:
        return f"{question}  nothing that was recorded explains it"
    return f"{question}  +{milliseconds(amount)} of {main} a step"


def _memory(each: Explanation) -> str:
    assert each.other is not None, "saves against something"
    row, other = (name(one, with_ranks=False) for one in (each.row, each.other))
    share = each.difference / each.facts["peak_bytes"]
    question = (
        f"Why does {row} save only {percent(share)} of memory?"
        if share > 0
        else f"Why does {row} save no memory?"
    )
    grown = {part: -saved for part, saved in each.parts.items() if part != "model state"}
    part, bytes_more = max(grown.items(), key=lambda item: item[1])
    state = each.parts["model state"]
    if bytes_more > LEAST_SHARE * state:
        held = f"{size(abs(state))} {'less' if state > 0 else 'more'} model state"
        grown_too = f", {size(bytes_more)} more {part}" if bytes_more > 0 else ""
        return f"{question}  {held}{grown_too}"
    activations = percent(each.facts["activation_share"])
    return f"{question}  {activations} of {other}'s peak is activations"


def _waits(each: Explanation) -> str:
    question = f"Why does {name(each.row)} wait?"
    share = percent(each.size)
    return (
        f"{question}  rank {each.facts['rank']:.0f} comes last: the others wait"
        f" {milliseconds(each.difference)} a step ({share})"
    )


_TEXTS: dict[Kind, Callable[[Explanation], str]] = {
    "slower": _slower,
    "little memory saved": _memory,
    "waits for a rank": _waits,
}
