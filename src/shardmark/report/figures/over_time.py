"""Network, CPU and GPUs while one trial of each row trained."""

from __future__ import annotations

from collections.abc import Sequence

from shardmark.analysis.network.traffic import Interface, traffic_of
from shardmark.analysis.trial.series import OverTime, Sampled, sampled
from shardmark.report.figures.chart import Figure, Panel, Series, figure, rate_unit
from shardmark.report.figures.entries import (
    MOST_ROWS_READ,
    Entry,
    Group,
    entries_in,
    facets_of,
    having,
    references,
    rows_read,
)

_READ = "The first repeat of each row, from the first step to the end of the last epoch."


def over_time_figures(groups: Sequence[Group]) -> list[Figure]:
    """From raw files: one repeat of a limited number of rows."""
    entries = entries_in(groups)
    read = {e: series for e in entries[:MOST_ROWS_READ] if (series := sampled(e.row))}
    rates = [y for series in read.values() for y in series.network_bytes_per_second.y]
    unit, size = rate_unit(max(rates, default=0.0))
    facets = facets_of(having(groups, read.__contains__))
    remarks = (references(facets), rows_read(len(entries)))

    def panels(*quantities: tuple[str, str, str, float]) -> list[Panel]:
        return [_panel(facet, read, quantity) for facet in facets for quantity in quantities]

    return [
        *figure(
            "network-and-cpu",
            "Network and CPU over time",
            panels(
                ("network_bytes_per_second", f"Network, sent ({unit})", unit, 1 / size),
                ("cpu_percent", "CPU (% of one core)", "%", 1),
            ),
            _READ,
            "Network: sent over all interfaces of all nodes, loopback included. CPU: all ranks and"
            " their children, 100 % being one busy core.",
            *remarks,
            shared_y=len(groups) == 1,
        ),
        *figure(
            "gpu",
            "GPUs over time",
            panels(("gpu_percent", "GPU busy (%)", "%", 1), ("power_watts", "Power (W)", "W", 1)),
            _READ,
            "Busy: share of time in which some kernel ran, mean over the GPUs in use; power: their"
            " sum (NVML).",
            *remarks,
            shared_y=len(groups) == 1,
        ),
    ]


def _panel(
    facet: Group, read: dict[Entry, Sampled], quantity: tuple[str, str, str, float]
) -> Panel:
    """The quantity is an attribute of `Sampled`, its label, unit and scale."""
    attribute, label, unit, scale = quantity
    lines = []
    for entry in facet.entries:
        values: OverTime = getattr(read[entry], attribute)
        if values.x:
            lines.append(entry.line(values.x, [value * scale for value in values.y]))
    return _time_panel(facet.title, label, unit, lines)


def interface_figures(groups: Sequence[Group]) -> list[Figure]:
    """One panel a row; none where all went over one interface, which another figure shows."""
    pairs = [(group, entry) for group in groups for entry in group.entries]
    read = [(*pair, used) for pair in pairs[:MOST_ROWS_READ] if (used := _interfaces(pair[1]))]
    if len({name for *_, used in read for name in used}) < 2:
        return []
    rates = [y for *_, used in read for one in used.values() for y in one.sent.over_time.y]
    unit, size = rate_unit(max(rates, default=0.0))
    panels = []
    for group, entry, used in read:
        lines = [
            Series(
                name=name,
                x=interface.sent.over_time.x,
                y=[y / size for y in interface.sent.over_time.y],
                style=f"interface {number}",
                rows=(entry.number,),
            )
            for number, (name, interface) in enumerate(used.items())
        ]
        title = ", ".join(part for part in (entry.bar, group.title) if part)
        panels.append(_time_panel(title, f"Sent ({unit})", unit, lines))
    return figure(
        "bandwidth",
        "Bandwidth over time by interface",
        panels,
        _READ,
        "Sent, by the interfaces' own counters; lo is the loopback, which joins the ranks of one"
        " node.",
        rows_read(len(pairs)),
        shared_y=len(groups) == 1,
    )


def _interfaces(entry: Entry) -> dict[str, Interface]:
    """By name, with the node's number where there are several."""
    several = entry.row.nodes > 1
    return {
        f"node {interface.node}, {interface.name}" if several else interface.name: interface
        for interface in traffic_of(entry.row, repeats=1).interfaces
        if interface.sent.over_time.x
    }


def _time_panel(title: str, label: str, unit: str, lines: Sequence[Series]) -> Panel:
    return Panel(
        title=title,
        kind="line",
        x_label="Time since the first step (s)",
        y_label=label,
        x_unit="s",
        y_unit=unit,
        series=tuple(lines),
        x_from_zero=True,
    )
