"""Which one when, in plain sentences and for programs: verdict first, then why, then what lacks."""

from __future__ import annotations

from collections.abc import Sequence

from shardmark.analysis.candidates import Field, fields_of
from shardmark.analysis.comparison import Comparison
from shardmark.analysis.explanations import explain
from shardmark.analysis.recommendation import Recommendation, Weaker, recommend
from shardmark.analysis.rows import Row, plain
from shardmark.analysis.selection import Selection
from shardmark.report.explanations import explanation_json, explanation_lines
from shardmark.report.left_out import basis_lines, fits_lines, left_out_lines
from shardmark.report.wording import (
    amount,
    interval_json,
    listed,
    name,
    percent,
    ranks,
    row_json,
    title,
)

_TITLES = {"speed": "Fastest", "memory": "Least memory", "quality": "Quality in a given time"}
MOST_NAMED = 5
"""Rows that share a place; the rest of a longer list is counted."""

_COMPARED = {"speed": "faster", "memory": "less", "quality": "sooner"}


def recommendation_lines(comparison: Comparison) -> tuple[str, ...]:
    """Sentences for a person, the verdicts first; nothing where no trial has a result.

    One line for each goal of each group of comparable rows; then what explains surprises, and what
    was left out.
    """
    if not comparison.rows:
        return ()
    fields = fields_of(comparison.rows)
    labels = {
        id(row): label
        for field, label in zip(fields, _labels(fields), strict=True)
        for row in field.rows
    }

    def group_of(row: Row) -> str:
        return labels[id(row)]

    found = recommend(comparison)
    verdicts = [
        _verdict(one, group_of(one.field.rows[0])) for one in found if one.world_size is None
    ]
    by_ranks = _by_ranks(found) if len(fields) == 1 else []
    explained = explanation_lines(explain(comparison), group_of)
    return (
        *verdicts,
        *by_ranks,
        *fits_lines(fields, group_of),
        *explained,
        *left_out_lines(fields, group_of),
        *basis_lines(fields),
    )


def recommendation_json(comparison: Comparison) -> object:
    """The same for programs: base units, nothing that JSON does not know."""
    return {
        "recommendations": [_json(one) for one in recommend(comparison)],
        "explanations": [explanation_json(one) for one in explain(comparison)],
        "left_out": [
            {"row": row_json(one.row), "cause": one.cause, "reason": one.reason}
            for field in fields_of(comparison.rows)
            for one in field.left_out
        ],
    }


def _labels(fields: Sequence[Field]) -> list[str]:
    """What tells the groups apart; nothing for a single one."""
    if len(fields) == 1:
        return [""]
    labels = []
    for field in fields:
        parts = [
            value
            for key in ("experiment", "workload", "precision")
            if len({getattr(one, key) for one in fields}) > 1
            and not (key == "workload" and any(k.startswith("workload") for k in field.varied))
            for value in [getattr(field, key)]
        ]
        labels.append(", ".join([*parts, *(plain(value) for value in field.varied.values())]))
    return labels


def _verdict(one: Recommendation, label: str) -> str:
    head = f"{_TITLES[one.goal]}{f' ({label})' if label else ''}: "
    if one.selection is None:
        return f"{head}no answer: {one.reason}."
    text = head + _selected(one, one.selection)
    better = [f"{_weaker(one, weaker)}." for weaker in one.weaker if _worth_naming(weaker)]
    return " ".join([f"{text}.", *better])


def _selected(one: Recommendation, found: Selection) -> str:
    best, value = found.values[0]
    shown = amount(one.metric, value)
    goal = "" if one.target is None or one.quality is None else _goal(one.quality, one.target)
    if found.state == "tie":
        rows = [(best, value), *((row, v) for row, v in found.values if row in found.ties)]
        each = [f"{name(row)} ({amount(one.metric, v)})" for row, v in rows]
        if len(each) > MOST_NAMED:
            hidden = f"{len(each) - MOST_NAMED + 1} more, the last with"
            each[MOST_NAMED - 1 :] = [f"{hidden} {amount(one.metric, rows[-1][1])}"]
        return f"{goal}no measurable difference between {listed(each)}"
    text = f"{goal}{name(best)}, {shown}{' in its fullest rank' if one.goal == 'memory' else ''}"
    if found.second is None or found.margin is None:
        return f"{text}; nothing else competes"
    text += f", {_margin(one, found)} than {name(found.second)}"
    if found.state == "not shown":
        only = " with one repeat" if found.margin.n < 2 else ""
        return f"{text}; {only.strip() or 'without intervals'} the order is not shown to be real"
    return text


def _goal(quality: str, target: float) -> str:
    return f"{title(quality)} {amount(quality, target)}, which every candidate reaches: "


def _margin(one: Recommendation, found: Selection) -> str:
    """`11 % faster (95 % interval 5 to 17 %)`."""
    margin = found.margin
    assert margin is not None, "the caller looked"
    shares = [
        None if ratio is None else (ratio - 1 if one.goal == "speed" else 1 - 1 / ratio)
        for ratio in (margin.value, margin.low, margin.high)
    ]
    assert shares[0] is not None, "a margin has a value"
    text = f"{percent(shares[0])} {_COMPARED[one.goal]}"
    if shares[1] is None or shares[2] is None:
        return text
    low, high = percent(shares[1]), percent(shares[2])
    if low == high:
        return f"{text} (95 % interval: the same)"
    return f"{text} (95 % interval {low.removesuffix(' %')} to {high})"


def _worth_naming(weaker: Weaker) -> bool:
    """Better than the recommended row, or seemingly so where no interval can tell."""
    ratio = weaker.advantage
    if ratio is None or ratio.value <= 1:
        return False
    return weaker.shown_better or ratio.low is None


def _weaker(one: Recommendation, weaker: Weaker) -> str:
    """What is gained, what is given up for it, and what was learned."""
    assert weaker.value is not None, "it has an advantage"
    doubt = "" if weaker.shown_better else ", not shown to be real"
    text = (
        f"{name(weaker.row)} reaches {amount(one.metric, weaker.value)}{doubt}, but"
        f" promises less: {weaker.row.promise}"
    )
    if one.quality is None or weaker.quality is None or one.selection is None:
        return f"{text}; what it learns was not evaluated"
    own = amount(one.quality, weaker.quality.value)
    best = one.selection.best.metrics.get(one.quality)
    beside = "" if best is None else f" against {amount(one.quality, best.value)}"
    return f"{text}; {title(one.quality)} {own}{beside} at the end"


def _by_ranks(found: Sequence[Recommendation]) -> list[str]:
    parts = []
    for one in found:
        if one.world_size is None or one.selection is None:
            continue
        best = one.selection.best
        rows = [best, *one.selection.ties] if one.selection.state == "tie" else [best]
        doubt = {"tie": " (no measurable difference)", "not shown": " (not shown to be real)"}
        texts = listed(
            [name(row, with_ranks=False) for row in rows],
            "or",
        )
        parts.append(f"on {ranks(one.world_size)} {texts}{doubt.get(one.selection.state, '')}")
    return [f"Fastest by number of ranks: {'; '.join(parts)}."] if len(parts) > 1 else []


def _json(one: Recommendation) -> dict[str, object]:
    found = one.selection
    return {
        "goal": one.goal,
        "experiment": one.field.experiment,
        "workload": one.field.workload,
        "precision": one.field.precision,
        "varied": dict(one.field.varied),
        "world_size": one.world_size,
        "metric": one.metric,
        "quality": one.quality,
        "target": one.target,
        "unverified": one.field.unverified,
        "state": None if found is None else found.state,
        "reason": one.reason,
        "best": None if found is None else row_json(found.best),
        "second": None if found is None or found.second is None else row_json(found.second),
        "margin": None if found is None else interval_json(found.margin),
        "no_measurable_difference": [] if found is None else [row_json(r) for r in found.ties],
        "values": []
        if found is None
        else [{"row": row_json(row), "value": value} for row, value in found.values],
        "promises_less": [
            {
                "row": row_json(weaker.row),
                "promise": weaker.row.promise,
                "value": weaker.value,
                "advantage": interval_json(weaker.advantage),
                "shown_better": weaker.shown_better,
                "quality": interval_json(weaker.quality),
            }
            for weaker in one.weaker
        ],
    }
