"""Network, CPU and GPUs while one trial of each row trained."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from shardmark.analysis.compare.series import OverTime, sampled
from shardmark.analysis.network.traffic import traffic_of
from shardmark.report.figures.chart import Figure, Panel, Series, figure, rate_unit
from shardmark.report.figures.entries import (
    MOST_ROWS_READ,
    Entry,
    Group,
    entries_in,
    facets_of,
    having,
    rows_read,
)

_READ = "The first repeat of each row, from the first step to the end of the last epoch."


def over_time_figures(groups: Sequence[Group]) -> list[Figure]:
    """From raw files: one repeat of a limited number of rows."""
    entries = entries_in(groups)
    read = {e: series for e in entries[:MOST_ROWS_READ] if (series := sampled(e.row))}
    unit, size = rate_unit(_largest(series.network_bytes_per_second for series in read.values()))
    facets = facets_of(having(groups, read.__contains__))

    def panels(*quantities: tuple[str, str, str, float]) -> list[Panel]:
        """Each an attribute of `Sampled`, its label, unit and what one unit is."""
        return [
            _panel(
                facet.title,
                label,
                unit,
                [_line(entry, getattr(read[entry], name), size) for entry in facet.entries],
            )
            for facet in facets
            for name, label, unit, size in quantities
        ]

    return [
        *figure(
            "network-and-cpu",
            "Network and CPU over time",
            panels(
                ("network_bytes_per_second", f"Network, sent ({unit})", unit, size),
                ("cpu_percent", "CPU (% of one core)", "%", 1),
            ),
            _READ,
            "Network: sent over all interfaces of all nodes, loopback included. CPU: all ranks and"
            " their children, 100 % being one busy core.",
            rows_read(len(entries)),
        ),
        *figure(
            "gpu",
            "GPUs over time",
            panels(("gpu_percent", "GPU busy (%)", "%", 1), ("power_watts", "Power (W)", "W", 1)),
            _READ,
            "Busy: share of time in which some kernel ran, mean over the GPUs in use; power: their"
            " sum (NVML).",
            rows_read(len(entries)),
        ),
    ]


def interface_figures(groups: Sequence[Group]) -> list[Figure]:
    """One panel a row; none where all went over one interface, which another figure shows."""
    pairs = [(group, entry) for group in groups for entry in group.entries]
    read = [(*pair, _interfaces(pair[1])) for pair in pairs[:MOST_ROWS_READ]]
    if len({name for *_, interfaces in read for name in interfaces}) < 2:
        return []
    unit, size = rate_unit(_largest(sent for *_, known in read for sent in known.values()))
    return figure(
        "bandwidth",
        "Bandwidth over time by interface",
        [
            _panel(
                ", ".join(part for part in (entry.bar, group.title) if part),
                f"Sent ({unit})",
                unit,
                [
                    _line(entry, sent, size, name=name, style=f"interface {number}")
                    for number, (name, sent) in enumerate(interfaces.items())
                ],
            )
            for group, entry, interfaces in read
        ],
        _READ,
        "Sent, by the interfaces' own counters; lo is the loopback, which joins the ranks of one"
        " node.",
        rows_read(len(pairs)),
    )


def _interfaces(entry: Entry) -> dict[str, OverTime]:
    """Bytes per second sent over each, by name, with the node's number where there are several."""
    several = entry.row.nodes > 1
    return {
        f"node {used.node}, {used.name}" if several else used.name: used.sent.over_time
        for used in traffic_of(entry.row, repeats=1).interfaces
        if used.sent.over_time.x
    }


def _largest(values: Iterable[OverTime]) -> float:
    return max((y for over_time in values for y in over_time.y), default=0.0)


def _line(entry: Entry, values: OverTime, size: float, **changes: Any) -> Series:
    return replace(entry.line(values.x, [y / size for y in values.y]), **changes)


def _panel(title: str, label: str, unit: str, lines: Sequence[Series]) -> Panel:
    return Panel(
        title=title,
        kind="line",
        x_label="Time since the first step (s)",
        y_label=label,
        x_unit="s",
        y_unit=unit,
        series=tuple(line for line in lines if line.x),
        x_from_zero=True,
    )
