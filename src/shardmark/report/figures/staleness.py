"""How stale the gradients were that parameter servers used."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil

from shardmark.report.figures.figure import Figure, Panel, Series
from shardmark.report.figures.grouping import Entry, Group, facets_of, in_parts
from shardmark.report.figures.sentences import entries_in, joined

_MOST_BINS = 20


def staleness_figures(groups: Sequence[Group]) -> list[Figure]:
    """Share of gradients by their staleness, where servers counted any."""
    counts = {id(one): found for one in entries_in(groups) if (found := _staleness(one))}
    kept = [
        replace(group, entries=tuple(entry for entry in group.entries if id(entry) in counts))
        for group in groups
    ]
    figures = []
    for part in in_parts(facets_of([group for group in kept if group.entries])):
        drawn = [counts[id(entry)] for entry in entries_in(part.groups)]
        width = ceil((max(max(one) for one in drawn) + 1) / _MOST_BINS)
        last = max(max(one) for one in drawn) // width
        panels = [
            Panel(
                title=facet.title,
                kind="bars",
                x_label="Staleness (updates)",
                y_label="Gradients (%)",
                y_unit="%",
                series=tuple(
                    _binned(entry, counts[id(entry)], width, last) for entry in facet.entries
                ),
            )
            for facet in part.groups
        ]
        figures.append(
            Figure(
                name=f"staleness{part.ending}",
                title="Staleness of gradients",
                caption=joined(
                    "How many updates a server took between handing out parameters and using"
                    " the gradient that was computed from them; all repeats and servers together.",
                    part.note,
                ),
                panels=tuple(panels),
                columns=min(3, len(panels)),
                shared_y=part.one_condition,
            )
        )
    return figures


def _binned(entry: Entry, counts: Mapping[int, int], width: int, last: int) -> Series:
    """Percent of the gradients in bins of so many updates, from 0 to the last bin."""
    total = sum(counts.values())
    binned: Counter[int] = Counter()
    for staleness, count in counts.items():
        binned[staleness // width] += count
    names = [
        str(one * width) if width == 1 else f"{one * width}-{(one + 1) * width - 1}"
        for one in range(last + 1)
    ]
    return Series(
        name=entry.name,
        x=tuple(names),
        y=tuple(100 * binned[one] / total for one in range(last + 1)),
        style=entry.style,
        variant=entry.variant,
    )


def _staleness(entry: Entry) -> dict[int, int]:
    counts: Counter[int] = Counter()
    for trial in entry.row.ok_trials:
        for rank in trial.ranks:
            if rank.role == "server" and rank.exchange is not None:
                for staleness, count in rank.exchange.staleness.items():
                    counts[int(staleness)] += count
    return {staleness: count for staleness, count in counts.items() if count > 0}
