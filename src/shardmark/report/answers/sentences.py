"""The answer to one question in words: the winner with its margin, or those that share a place."""

from __future__ import annotations

from shardmark.analysis.advise.recommendation import RATE, Recommendation
from shardmark.analysis.advise.selection import Selection
from shardmark.analysis.compare.rows import Row
from shardmark.report.answers.wording import amount, listed, name, percent

MOST_NAMED = 4
"""Rows that share a place; the rest of a longer list is counted."""

_COMPARED = {"speed": "faster", "memory": "less", "quality": "sooner"}


def answer(one: Recommendation, *, with_ranks: bool = True) -> str:
    """`ddp on 2 ranks, 181.0 samples/s, 20 % faster (95 % interval 18 to 22 %) than ...`."""
    found = one.selection
    if found is None:
        return f"no answer: {one.reason}"
    if found.state == "not shown":
        return _leading(one, found, with_ranks) + _not_shown(found)
    tied = found.state == "tie"
    text = _tied(one, found, with_ranks) if tied else _leading(one, found, with_ranks)
    if not found.without_interval:
        return text
    names = listed([named(row, with_ranks=with_ranks) for row in found.without_interval])
    return f"{text}; too few repeats to judge {names}"


def named(row: Row, *, with_ranks: bool = True) -> str:
    """With the trials that ended ok, where some did not."""
    text, ok, all_trials = name(row, with_ranks=with_ranks), len(row.ok_trials), len(row.trials)
    return text if ok == all_trials else f"{text} ({ok} of {all_trials} trials ok)"


def _leading(one: Recommendation, found: Selection, with_ranks: bool) -> str:
    best, value = found.values[0]
    text = f"{named(best, with_ranks=with_ranks)}, {amount(one.metric, value)}"
    if found.second is None or found.margin is None:
        return f"{text} (nothing else competes)"
    return f"{text}, {_margin(one, found)} than {named(found.second, with_ranks=with_ranks)}"


def _not_shown(found: Selection) -> str:
    one_each = all(len(row.ok_trials) < 2 for row, _ in found.values)
    return f"; {'one repeat' if one_each else 'too few repeats'}: the order is not shown to be real"


def _tied(one: Recommendation, found: Selection, with_ranks: bool) -> str:
    rows = [(row, v) for row, v in found.values if found.state_of(row) in ("best", "tie")]
    each = [f"{named(row, with_ranks=with_ranks)} ({amount(one.metric, v)})" for row, v in rows]
    if len(each) > MOST_NAMED:
        last = amount(one.metric, rows[-1][1])
        each[MOST_NAMED - 1 :] = [f"{len(each) - MOST_NAMED + 1} more (the last {last})"]
    return f"no measurable difference between {listed(each)}"


def _margin(one: Recommendation, found: Selection) -> str:
    """`11 % faster (95 % interval 5 to 17 %)`."""
    margin = found.margin
    assert margin is not None, "the caller looked"
    shares = [
        None if ratio is None else (ratio - 1 if one.metric == RATE else 1 - 1 / ratio)
        for ratio in (margin.value, margin.low, margin.high)
    ]
    assert shares[0] is not None, "a margin has a value"
    text = f"{percent(shares[0])} {_COMPARED[one.goal]}"
    if shares[1] is None or shares[2] is None:
        return text
    low, high = percent(shares[1]), percent(shares[2])
    if low == high:
        return text
    return f"{text} (95 % interval {low.removesuffix(' %')} to {high})"
