"""Why something is slower: its main cause in one sentence, where the time went in another."""

from __future__ import annotations

from shardmark.analysis.diagnose.explanations_time import EXPOSED
from shardmark.analysis.diagnose.surprise import Explanation, Part
from shardmark.report.answers.wording import listed, milliseconds, name, percent, ranks
from shardmark.report.table.tables import number

LEAST_SHARE = 0.1
"""A smaller part of a difference is left to the JSON."""

CAUSE_SHARE = 0.25
"""From this part of the difference on, what the cores tell is named as a cause."""

MOST_PARTS = 2


def slower_text(one: Explanation, doubt: str) -> str:
    """The surprise with its largest cause among the cores' amounts, then the largest spans."""
    text = f"{_head(one)}{doubt}"
    if not one.parts:
        return f"{text}; its parts were not recorded, so that nothing explains it"
    samples = number(one.facts["samples"], decimals=0)
    text += f": {milliseconds(one.difference)} more for {samples} samples"
    return f"{text}{_cause(one)}. {_spans(one)}"


def _head(one: Explanation) -> str:
    assert one.other is not None, "slower than something"
    less = percent(1 - 1 / one.size.value)
    if one.kind == "strategy is slower":
        row, other = (name(r, with_ranks=False) for r in (one.row, one.other))
        return f"On {ranks(one.row.world_size)} {row} is {less} slower than {other}"
    if one.kind == "slower than single":
        return f"{name(one.row)} is {less} slower than {name(one.other)}"
    fewer = ranks(one.other.world_size)
    return f"More ranks are slower: {name(one.row)} is {less} slower than on {fewer}"


def _cause(one: Explanation) -> str:
    """The larger of what the lack of cores and what more work on the same cores can explain."""
    facts = one.facts
    sharing = facts.get("sharing_share", 0.0) if one.kind != "strategy is slower" else 0.0
    work = facts.get("work_share", 0.0)
    if max(sharing, work) < CAUSE_SHARE:
        return ""
    count = number(facts["cores"], decimals=None if facts["cores"] % 1 else 0)
    cores = f"{count} core" if facts["cores"] == 1 else f"{count} cores"
    if sharing >= work:
        threads = f"{facts['threads']:.0f} threads"
        most = milliseconds(facts["sharing_seconds"])
        return f", of which up to {most} is the lack of cores ({threads} on {cores})"
    return f", of which {milliseconds(facts['work_seconds'])} is more CPU work on {cores}"


def _spans(one: Explanation) -> str:
    named = [part for part in one.parts if part.share >= LEAST_SHARE][:MOST_PARTS]
    rest = one.unexplained or 0.0
    unexplained = f"{milliseconds(rest)} unexplained"
    if not named:
        return f"The same by span: none holds it; {unexplained}"
    text = f"The same by span: {listed([_part(part) for part in named])}"
    return f"{text}; {unexplained}" if rest >= LEAST_SHARE * one.difference else text


def _part(part: Part) -> str:
    source = " (in a profiled, untimed step)" if part.name == EXPOSED else ""
    return f"{part.name} +{milliseconds(part.amount)}{source}"
