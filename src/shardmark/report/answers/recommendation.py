"""Which one when, in plain sentences and for programs: verdict first, then why, then what lacks."""

from __future__ import annotations

from collections.abc import Sequence

from shardmark.analysis.advise.candidates import Field, fields_of
from shardmark.analysis.advise.recommendation import (
    PEAK,
    RATE,
    TOTAL,
    Recommendation,
    Weaker,
    recommend,
)
from shardmark.analysis.compare.comparison import Comparison
from shardmark.analysis.compare.quality_in_time import QualityInTime
from shardmark.analysis.compare.rows import Row, plain
from shardmark.analysis.diagnose.explanations import explain
from shardmark.analysis.statistics.sampling import chance_of
from shardmark.report.answers.answers_json import answer_json
from shardmark.report.answers.explanations import explanation_json, explanation_lines
from shardmark.report.answers.left_out import basis_lines, fits_lines, left_out_lines
from shardmark.report.answers.sentences import answer, named
from shardmark.report.answers.wording import amount, listed, name, ranks, row_json, title

MOST_LED = 3
"""Rows named that share the lead on a number of ranks."""

MOST_WEAKER = 2
"""Rows named that promise less."""


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
        line
        for field in fields
        for line in _verdicts(
            [one for one in found if one.field.rows[0] is field.rows[0]], group_of(field.rows[0])
        )
    ]
    return (
        *verdicts,
        *fits_lines(fields, group_of),
        *explanation_lines(explain(comparison), group_of),
        *left_out_lines(fields, group_of),
        *basis_lines(fields),
    )


def recommendation_json(comparison: Comparison) -> object:
    """The same for programs, whole: base units, nothing that JSON does not know."""
    return {
        "recommendations": [answer_json(one) for one in recommend(comparison)],
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


def _verdicts(found: Sequence[Recommendation], label: str) -> list[str]:
    """Of one group: speed, memory, soonest to a quality, and the quality in a given time."""
    group = f" ({label})" if label else ""
    speed = next(one for one in found if one.metric == RATE)
    soonest = next(one for one in found if one.goal == "quality")
    lines = [
        f"Fastest{group}: {answer(speed)}.{_by_ranks(found)}{_not_ranked(speed)}",
        _memory([one for one in found if one.goal == "memory"], group),
        _soonest(soonest, group),
    ]
    if soonest.in_time is not None:
        lines.append(_in_time(soonest.in_time, group))
    return lines


def _by_ranks(found: Sequence[Recommendation]) -> str:
    """Who leads on each number of ranks, where several compete there."""
    parts = []
    for one in found:
        chosen = one.selection
        if one.metric != RATE or one.world_size is None or chosen is None or chosen.second is None:
            continue
        rows = [chosen.best, *chosen.ties] if chosen.state == "tie" else [chosen.best]
        names = [name(row, with_ranks=False) for row in rows[:MOST_LED]]
        if len(rows) > MOST_LED:
            names.append(f"{len(rows) - MOST_LED} more")
        doubt = " (not shown)" if chosen.state == "not shown" else ""
        parts.append(f"on {ranks(one.world_size)} {listed(names, 'or')}{doubt}")
    return f" By ranks: {'; '.join(parts)}." if parts else ""


def _not_ranked(one: Recommendation) -> str:
    """Rows that promise less and do better, the best first, with what they learned."""
    better = [weaker for weaker in one.weaker if _is_ahead(one, weaker)]
    if not better:
        return ""
    better.sort(key=lambda weaker: weaker.value or 0.0, reverse=one.metric == RATE)
    it_promises = "it promises" if len(better) == 1 else "they promise"
    texts = [_priced(one, weaker) for weaker in better[:MOST_WEAKER]]
    if len(better) > MOST_WEAKER:
        texts.append(f"{len(better) - MOST_WEAKER} more")
    return f" Not ranked, because {it_promises} less: {'; '.join(texts)}."


def _is_ahead(one: Recommendation, weaker: Weaker) -> bool:
    """By the means that the table shows, whatever can be shown of them."""
    if weaker.value is None or one.selection is None:
        return False
    _, best = one.selection.values[0]
    return weaker.value > best if one.metric == RATE else weaker.value < best


def _priced(one: Recommendation, weaker: Weaker) -> str:
    assert weaker.value is not None, "it is ahead"
    text = f"{named(weaker.row)}, {amount(one.metric, weaker.value)}"
    if not weaker.shown_better:
        text += " (not shown to be better)"
    if one.quality is None or weaker.quality is None:
        return text
    return f"{text}, {title(one.quality)} {amount(one.quality, weaker.quality.value)} at the end"


def _memory(found: Sequence[Recommendation], group: str) -> str:
    """The fullest rank by number of ranks: more ranks share more; then all ranks together."""
    each = [one for one in found if one.metric == PEAK and one.world_size is not None]
    if each:
        parts = [f"on {ranks(one.world_size or 0)} {answer(one, with_ranks=False)}" for one in each]
    else:
        parts = [answer(one) for one in found if one.metric == PEAK]
    total = [f" All ranks together: {answer(one)}." for one in found if one.metric == TOTAL]
    return f"Least memory in the fullest rank{group}: {'; '.join(parts)}.{''.join(total)}"


def _soonest(one: Recommendation, group: str) -> str:
    if one.quality is None or one.target is None:
        return f"Soonest to a quality{group}: {answer(one)}."
    goal = f"{title(one.quality)} {amount(one.quality, one.target)}"
    remarks = _about_chance(one.target_is_chance, one.field.candidates[0])
    if one.ended_below:
        count, everyone = len(one.ended_below), len(one.field.candidates)
        remarks.append(f"{count} of {everyone} rows ended below it again")
    remark = f" ({'; '.join(remarks)})" if remarks else ""
    head = f"Soonest to {goal}{group}, which every candidate reaches{remark}"
    return f"{head}: {answer(one)}.{_not_ranked(one)}"


def _in_time(found: QualityInTime, group: str) -> str:
    time = f"{amount('seconds_to_target', found.seconds)} that {name(found.fastest)} trains"
    texts = [f"{named(row)} {amount(found.metric, value)}" for row, value in found.values[:2]]
    remarks = _about_chance(found.is_chance is True, found.fastest)
    if found.within_sampling:
        count = len(found.within_sampling)
        others = "1 other lies" if count == 1 else f"{count} others lie"
        remarks.append(f"{others} within the sampling error of the first")
    if found.too_early:
        remarks.append(f"{len(found.too_early)} had no epoch done")
    if len(found.values) > 1:
        remarks.append("one seed: no order is shown")
    text = f"Best {title(found.metric)}{group} in the {time}: {', then '.join(texts)}"
    return f"{text} ({'; '.join(remarks)})." if remarks else f"{text}."


def _about_chance(is_chance: bool | None, row: Row) -> list[str]:
    if is_chance is None:
        lacking = "classes" if chance_of(row) is None else "validation samples"
        return [f"may be chance: the number of {lacking} is not recorded"]
    return ["guessing reaches it, too"] if is_chance else []
