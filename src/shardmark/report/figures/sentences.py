"""What captions say of more than one figure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shardmark.report.figures.grouping import Entry, Group


def entries_in(groups: Iterable[Group]) -> list[Entry]:
    return [entry for group in groups for entry in group.entries]


def intervals(entries: Sequence[Entry]) -> str:
    """How many repeats there are, and what the whiskers are."""
    counts = sorted({len(entry.row.ok_trials) for entry in entries})
    if counts == [1]:
        return "One repeat each: there is no interval."
    repeats = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return (
        f"Means of {repeats} repeats; whiskers or bands are 95 % intervals of the mean"
        " (Student's t), cut where they are many times what the values differ by."
    )


def not_equivalent(entries: Sequence[Entry]) -> str:
    """A warning where some row trains something else; empty where none was found."""
    names = dict.fromkeys(
        entry.bar for entry in entries if entry.row.equivalent is False and not entry.row.guarantee
    )
    return f"Found not to train the same thing: {'; '.join(names)}." if names else ""


def references(facets: Sequence[Group]) -> str:
    """Which rows are drawn more than once."""
    if len(facets) < 2:
        return ""
    names = dict.fromkeys(
        entry.name
        for facet in facets
        for entry in facet.entries
        if entry.row.world_size == 1 and sum(entry in other.entries for other in facets) > 1
    )
    return f"{', '.join(names)} (1 rank) is drawn in every panel." if names else ""


def joined(*sentences: str) -> str:
    """A caption, without what is empty."""
    return " ".join(sentence for sentence in sentences if sentence)
