"""Why something is slower, in a sentence: what the cores did, and what the ranks did."""

from __future__ import annotations

from collections.abc import Mapping

from shardmark.analysis.surprise import Explanation, Part
from shardmark.report.tables import number
from shardmark.report.wording import listed, milliseconds, name, percent, ranks

LEAST_SHARE = 0.02
"""A smaller part of a difference is not named."""

MUCH_IDLE = 0.25
"""From this part of the difference on, cores that did not work for the ranks are named."""


def slower_text(one: Explanation, doubt: str) -> str:
    """The surprise, the cores' view where it was sampled, and the spans' with the rest."""
    assert one.other is not None, "slower than something"
    less = percent(1 - 1 / one.size.value)
    if one.kind == "more ranks are slower":
        own = name(one.row)
        text = f"More ranks are slower: {own} is {less} slower than {_other(one)}{doubt}"
    else:
        where = ranks(one.row.world_size)
        row, other = (name(r, with_ranks=False) for r in (one.row, one.other))
        text = f"On {where} {row} is {less} slower than {other}{doubt}"
    if not one.parts:
        return f"{text}; its parts were not recorded, so that nothing explains it"
    facts = one.facts
    text += (
        f": {milliseconds(one.difference)} more for {number(facts['samples'], decimals=0)} samples"
        f" ({milliseconds(facts['seconds'])} against {milliseconds(facts['other_seconds'])})"
    )
    cores = _cores(one) if one.kind == "more ranks are slower" else _cpu_work(one)
    seen = ". Seen from the ranks, the same time is " if cores else ", made up of "
    return f"{text}{cores}{seen}{_parts(one)}"


def _cores(one: Explanation) -> str:
    """The lack of cores, where it explains anything."""
    facts = one.facts
    if facts.get("sharing_share", 0.0) < LEAST_SHARE:
        return _no_more_cores(one) + _cpu_work(one)
    return (
        f". {facts['processes']:.0f} processes with {facts['threads']:.0f} threads share"
        f" {_number_of_cores(facts)}: their {milliseconds(facts['busy_seconds'])} of CPU time take"
        f" at least {milliseconds(facts['floor_seconds'])} there"
        f" ({milliseconds(facts['other_floor_seconds'])} with {_other_ranks(one)}), and the lack"
        f" of cores explains up to {milliseconds(facts['sharing_seconds'])}"
        f" ({percent(facts['sharing_share'])}): the cores worked for them in"
        f" {percent(facts['floor_seconds'] / facts['seconds'])} of the time"
    )


def _no_more_cores(one: Explanation) -> str:
    """Where fewer ranks already had a thread for every core."""
    facts = one.facts
    if "cores" not in facts or facts["other_threads"] < min(facts["threads"], facts["cores"]):
        return ""
    threads = f"{facts['other_threads']:.0f} thread{'' if facts['other_threads'] == 1 else 's'}"
    return (
        f". The further ranks bring no further cores: {_other_ranks(one)} had {threads} on"
        f" {_number_of_cores(facts)} already"
    )


def _cpu_work(one: Explanation) -> str:
    """More CPU time on the same cores."""
    facts = one.facts
    if facts.get("work_share", 0.0) < LEAST_SHARE:
        return ""
    return (
        f". It takes {milliseconds(facts['busy_seconds'])} of CPU time against"
        f" {milliseconds(facts['other_busy_seconds'])}, which on {_number_of_cores(facts)} is"
        f" {milliseconds(facts['work_seconds'])} ({percent(facts['work_share'])}) of it"
        f"{_idle(one)}"
    )


def _idle(one: Explanation) -> str:
    """Time in which the ranks did not use the cores."""
    idle = one.difference - one.facts["work_seconds"]
    share = idle / one.difference
    if share < MUCH_IDLE:
        return ""
    return (
        f". For {milliseconds(idle)} ({percent(share)}) of it the cores waited, or worked for other"
        " processes"
    )


def _number_of_cores(facts: Mapping[str, float]) -> str:
    cores = facts["cores"]
    text = number(cores, decimals=None if cores % 1 else 0)
    return f"{text} core" if cores == 1 else f"{text} cores"


def _other_ranks(one: Explanation) -> str:
    assert one.other is not None, "held against something"
    if one.other.label == one.row.label:
        return ranks(one.other.world_size)
    return name(one.other)


def _other(one: Explanation) -> str:
    other = _other_ranks(one)
    return f"on {other}" if other[0].isdigit() else other


def _parts(one: Explanation) -> str:
    named = [part for part in one.parts if abs(part.share) >= LEAST_SHARE]
    texts = [_part(part) for part in named]
    rest = one.difference - sum(part.amount for part in named)
    share = rest / one.difference if one.difference else 0.0
    text = listed(texts) if texts else "nothing that a span recorded"
    if abs(share) < LEAST_SHARE:
        return text
    if share < 0:
        return f"{text}, medians that together are {milliseconds(-rest)} more than it"
    return f"{text}; {milliseconds(rest)} ({percent(share)}) remain unexplained"


def _part(part: Part) -> str:
    sign = "+" if part.amount >= 0 else "-"
    return f"{part.name} {sign}{milliseconds(abs(part.amount))} ({percent(part.share)})"
