"""Bandwidth over time of each row, by interface and node, where more than one of them is used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardmark.analysis.network.traffic import Interface, traffic_of
from shardmark.report.figures.figure import Figure, Panel, Series
from shardmark.report.figures.grouping import MOST_FIGURES, MOST_ROWS_READ, Entry, Group
from shardmark.report.figures.sentences import joined
from shardmark.report.figures.units import rate_unit

MOST_PANELS = 12
"""Rows in one figure; more make a second one."""
COLUMNS = 3

_CAPTION = (
    "Sent, by the interfaces' own counters, in the first repeat of each row, from the first step to"
    " the end of the last epoch. lo is the loopback, which joins the ranks of one node."
)


def interface_figures(groups: Sequence[Group]) -> list[Figure]:
    """One panel a row; none where all went over one interface, which another figure shows."""
    entries = [(group, entry) for group in groups for entry in group.entries]
    read = [
        (group, entry, found)
        for group, entry in entries[:MOST_ROWS_READ]
        if (found := _interfaces(entry))
    ]
    if len({name for _, _, found in read for name in found}) < 2:
        return []
    unit, size = rate_unit(_largest([found for _, _, found in read]))
    panels = [_panel(_title(group, entry), found, unit, size) for group, entry, found in read]
    portions = [panels[at : at + MOST_PANELS] for at in range(0, len(panels), MOST_PANELS)]
    limit = ""
    if len(entries) > MOST_ROWS_READ:
        limit = f"Of {len(entries)} rows the first {MOST_ROWS_READ} were read."
    return [
        Figure(
            name="bandwidth" if number == 1 else f"bandwidth-{number}",
            title="Bandwidth over time by interface",
            caption=joined(_CAPTION, limit),
            panels=tuple(portion),
            columns=min(COLUMNS, len(portion)),
            shared_y=len(groups) == 1,
        )
        for number, portion in enumerate(portions[:MOST_FIGURES], start=1)
    ]


def _interfaces(entry: Entry) -> dict[str, Interface]:
    """By name, with the node's number where there are several."""
    found = traffic_of(entry.row, repeats=1).interfaces
    several = entry.row.nodes > 1
    return {
        f"node {one.node}, {one.name}" if several else one.name: one
        for one in found
        if one.sent.over_time.x
    }


def _largest(read: Sequence[Mapping[str, Interface]]) -> float:
    rates = [y for found in read for one in found.values() for y in one.sent.over_time.y]
    return max(rates, default=0.0)


def _title(group: Group, entry: Entry) -> str:
    return ", ".join(part for part in (entry.bar, group.title) if part)


def _panel(title: str, found: Mapping[str, Interface], unit: str, size: float) -> Panel:
    return Panel(
        title=title,
        kind="line",
        x_label="Time since the first step (s)",
        y_label=f"Sent ({unit})",
        x_unit="s",
        y_unit=unit,
        series=tuple(
            Series(
                name=name,
                x=one.sent.over_time.x,
                y=[y / size for y in one.sent.over_time.y],
                style=f"interface {number}",
            )
            for number, (name, one) in enumerate(found.items())
        ),
        marked=False,
        x_from_zero=True,
    )
