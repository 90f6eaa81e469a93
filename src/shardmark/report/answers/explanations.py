"""Explanations in sentences: the surprise, its main causes with their amounts, and the rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shardmark.analysis.compare.rows import Row
from shardmark.analysis.diagnose.explanations_memory import NAMES
from shardmark.analysis.diagnose.surprise import Explanation, Kind
from shardmark.analysis.studies.plausibility_sizes import SHARDED
from shardmark.report.answers.slower import slower_text
from shardmark.report.answers.wording import (
    amount,
    interval_json,
    listed,
    milliseconds,
    name,
    percent,
    row_json,
    size,
    title,
)
from shardmark.report.table.tables import number

MOST_LINES = 3
"""Explanations in the text; the JSON has all."""

LEAST_SHARE = 0.01
"""A part of the memory that changed by less of the peak is counted with the rest."""


def explanation_lines(
    found: Sequence[Explanation], group_of: Callable[[Row], str]
) -> tuple[str, ...]:
    """The most striking of each kind, three at most and no row's time twice; then how many more.

    `group_of` names the row's group of comparable rows; empty where there is one group.
    """
    by_kind = [[one for one in found if one.kind == kind] for kind in _TEXTS]
    striking = [_most_striking(alike) for alike in by_kind if alike]
    striking.sort(key=lambda one: not one.shown)
    chosen: list[Explanation] = []
    for one in striking:
        if all(one.row is not other.row or one.unit != other.unit for other in chosen):
            chosen.append(one)
    lines = [_line(one, group_of(one.row)) for one in chosen[:MOST_LINES]]
    more = len(found) - len(lines)
    if more:
        explanations = "explanation" if more == 1 else "explanations"
        lines.append(f"{more} more {explanations} and every part: compare --format json.")
    return tuple(lines)


def _most_striking(alike: Sequence[Explanation]) -> Explanation:
    """Strategies that keep the whole promise come first: they are what is recommended."""
    return min(
        alike, key=lambda one: (not one.shown, one.row.guarantee is not None, -abs(one.size.value))
    )


def _line(one: Explanation, group: str) -> str:
    return f"{group}: {explanation_text(one)}" if group else explanation_text(one)


def explanation_text(one: Explanation) -> str:
    """The whole explanation."""
    why = "one seed" if "seeds" in one.facts else "one repeat"
    doubt = "" if one.shown else f" ({why}: not shown to be real)"
    return f"{_TEXTS[one.kind](one, doubt)}."


def explanation_json(one: Explanation) -> dict[str, object]:
    return {
        "kind": one.kind,
        "row": row_json(one.row),
        "other": None if one.other is None else row_json(one.other),
        "metric": one.metric,
        "size": interval_json(one.size),
        "shown": one.shown,
        "unit": one.unit,
        "difference": one.difference,
        "parts": [
            {"name": part.name, "amount": part.amount, "share": part.share} for part in one.parts
        ],
        "unexplained": one.unexplained,
        "facts": dict(one.facts),
        "text": explanation_text(one),
    }


def _memory(one: Explanation, doubt: str) -> str:
    assert one.other is not None, "saves against something"
    facts = one.facts
    peak = facts["other_peak_bytes"]
    share = percent(abs(one.difference) / peak)
    other = name(one.other, with_ranks=False)
    change = f"saves {size(one.difference)} ({share}) of {other}'s {size(peak)}"
    if one.difference < 0:
        change = f"needs {size(-one.difference)} ({share}) more than {other}'s {size(peak)}"
    divided = SHARDED[one.row.strategy]
    kinds = "all model state" if len(divided) == len(NAMES) else listed(_kinds(divided))
    named = [part for part in one.parts if abs(part.amount) >= LEAST_SHARE * peak]
    named.sort(key=lambda part: -abs(part.amount))
    texts = [f"{part.name} {_signed(-part.amount)}" for part in named]
    rest = one.difference - sum(part.amount for part in named)
    if abs(rest) >= LEAST_SHARE * peak:
        texts.append(f"the rest {_signed(-rest)}")
    return (
        f"Sharding saves little: {name(one.row)} {change}{doubt}. It shards {kinds}, which saves"
        f" {size(facts['possible_bytes'])} at most. Changed: {', '.join(texts) or 'nothing'}"
    )


def _kinds(divided: frozenset[str]) -> list[str]:
    return [text for kind, text in NAMES.items() if kind in divided]


def _signed(change: float) -> str:
    return f"{'+' if change >= 0 else '-'}{size(abs(change))}"


def _quality(one: Explanation, doubt: str) -> str:
    proven = one.other is not None and one.row.equivalent is one.other.equivalent is True
    who = "Equivalent strategies end" if proven else "Strategies end"
    text = f"{who} with different quality: {_ends(one)}{doubt}"
    facts = one.facts
    if "samples" not in facts:
        return f"{text}. Nothing recorded explains it"
    own, base = (number(facts[key], decimals=0) for key in ("samples", "other_samples"))
    return (
        f"{text}. BatchNorm averages over each rank's {own} samples against {base}; how much of the"
        " difference that makes was not recorded"
    )


def _ends(one: Explanation) -> str:
    assert one.other is not None, "differs from something"
    values = []
    for row in (one.row, one.other):
        estimate = row.metrics[one.metric]
        assert estimate is not None, "a difference has two values"
        values.append(f"{name(row)} {amount(one.metric, estimate.value)}")
    return f"{title(one.metric)} of {values[0]}, of {values[1]}"


def _stale(one: Explanation, doubt: str) -> str:
    return (
        f"Stale gradients: {_ends(one)}{doubt}. Its gradients were"
        f" {number(one.facts['staleness_mean'], decimals=2)} updates old on average,"
        f" {number(one.facts['staleness_max'], decimals=0)} at most"
    )


def _waits(one: Explanation, doubt: str) -> str:
    rank = f"{one.facts['rank']:.0f}"
    share = percent(one.difference / one.facts["step_seconds"])
    return (
        f"With {name(one.row)} the others wait for rank {rank}{doubt}: in the profiled step, which"
        f" is not timed, they communicate {milliseconds(one.difference)} longer than rank {rank},"
        f" {share} of a timed step"
    )


_TEXTS: dict[Kind, Callable[[Explanation, str], str]] = {
    "more ranks are slower": slower_text,
    "strategy is slower": slower_text,
    "sharding saves little": _memory,
    "a rank is waited for": _waits,
    "slower than single": slower_text,
    "gradients are stale": _stale,
    "quality differs": _quality,
}
