"""Explanations in sentences: the surprise, its reasons with their amounts, and the rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shardmark.analysis.explanations_memory import ACTIVATIONS
from shardmark.analysis.rows import Row
from shardmark.analysis.surprise import Explanation, Kind
from shardmark.report.slower import slower_text
from shardmark.report.tables import number
from shardmark.report.wording import (
    amount,
    interval_json,
    listed,
    milliseconds,
    name,
    percent,
    ranks,
    row_json,
    size,
    title,
)

MOST_NAMED = 4
"""Further rows with the same kind of surprise."""


def explanation_lines(
    found: Sequence[Explanation], group_of: Callable[[Row], str]
) -> tuple[str, ...]:
    """One line a kind of surprise: the most striking in full, the others by name.

    `group_of` names the row's group of comparable rows; empty where there is one group.
    """
    by_kind = [[one for one in found if one.kind == kind] for kind in _TEXTS]
    return tuple(_line(alike, group_of) for alike in by_kind if alike)


def explanation_text(one: Explanation) -> str:
    """The whole explanation."""
    doubt = "" if one.shown else " (one repeat: not shown to be real)"
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


def _line(found: Sequence[Explanation], group_of: Callable[[Row], str]) -> str:
    """Strategies that keep the whole promise come first: they are what is recommended."""
    ordered = sorted(found, key=lambda one: (one.row.promise is not None, -abs(one.size.value)))
    group = group_of(ordered[0].row)
    text = f"{group}: {explanation_text(ordered[0])}" if group else explanation_text(ordered[0])
    others = ordered[1:]
    if not others:
        return text
    names = [_brief(one, group_of(one.row)) for one in others[:MOST_NAMED]]
    more = len(others) - len(names)
    return f"{text} Likewise {listed([*names, *([f'{more} more'] if more else [])])}."


def _brief(one: Explanation, group: str) -> str:
    if one.unit == "bytes":
        amounts = f"{size(abs(one.difference))} {'less' if one.difference >= 0 else 'more'}"
    elif one.other is None:
        amounts = milliseconds(one.difference)
    elif one.unit == "seconds":
        amounts = percent(1 - 1 / one.size.value)
    else:
        value = one.row.metrics[one.metric]
        assert value is not None, "a difference has two values"
        amounts = amount(one.metric, value.value)
    return f"{name(one.row)} ({', '.join([*([group] if group else []), amounts])})"


def _memory(one: Explanation, doubt: str) -> str:
    assert one.other is not None, "saves against something"
    facts = one.facts
    other = name(one.other, with_ranks=False)
    peak = facts["other_peak_bytes"]
    share = percent(abs(one.difference) / peak)
    change = f"saves only {size(one.difference)} ({share}) against {other}"
    if one.difference < 0:
        change = f"needs {size(-one.difference)} ({share}) more than {other}"
    activations, state = facts["activation_bytes"], facts["state_bytes"]
    rest = next(part.amount for part in one.parts if part.name == ACTIVATIONS)
    return (
        f"Sharding saves little: {name(one.row)} {change}{doubt}. Of the {size(peak)},"
        f" {size(activations)} are activations and buffers,"
        f" {number(activations / state, decimals=1)} times the {size(state)} of parameters,"
        f" gradients and optimizer state, of which {ranks(one.row.world_size)} can save"
        f" {size(facts['possible_bytes'])} at most. Saved there were"
        f" {size(facts['saved_state_bytes'])}, and activations and buffers"
        f" {'fell' if rest >= 0 else 'rose'} by {size(abs(rest))}"
    )


def _quality(one: Explanation, doubt: str) -> str:
    text = f"Equivalent strategies end with different quality: {_ends(one)}{doubt}"
    facts = one.facts
    if "samples" in facts:
        text += (
            f". BatchNorm averages over each rank's share of the batch,"
            f" {number(facts['samples'], decimals=0)} samples against"
            f" {number(facts['other_samples'], decimals=0)}, which makes them different models; how"
            " much of the difference that is was not recorded"
        )
    else:
        text += ". Nothing recorded explains it"
    return text + _one_seed(one)


def _ends(one: Explanation) -> str:
    assert one.other is not None, "differs from something"
    values = []
    for row in (one.row, one.other):
        estimate = row.metrics[one.metric]
        assert estimate is not None, "a difference has two values"
        values.append(f"{name(row)} {amount(one.metric, estimate.value)}")
    return f"{title(one.metric)} of {values[0]}, of {values[1]}"


def _one_seed(one: Explanation) -> str:
    if one.facts.get("seeds") != 1:
        return ""
    return "; all repeats share one seed, so that another seed may order them otherwise"


def _stale(one: Explanation, doubt: str) -> str:
    return (
        f"Stale gradients: {_ends(one)}{doubt}; its gradients were"
        f" {number(one.facts['staleness_mean'])} updates old on average and"
        f" {number(one.facts['staleness_max'], decimals=0)} at most{_one_seed(one)}"
    )


def _waits(one: Explanation, doubt: str) -> str:
    rank = f"{one.facts['rank']:.0f}"
    share = percent(one.difference / one.facts["step_seconds"])
    return (
        f"With {name(one.row)} the others wait for rank {rank}: they spend"
        f" {milliseconds(one.difference)} a step more in exposed communication than it does,"
        f" {share} of the step{doubt}"
    )


_TEXTS: dict[Kind, Callable[[Explanation, str], str]] = {
    "more ranks are slower": slower_text,
    "strategy is slower": slower_text,
    "sharding saves little": _memory,
    "quality differs": _quality,
    "gradients are stale": _stale,
    "a rank is waited for": _waits,
}
