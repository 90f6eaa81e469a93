"""What speed the memory buys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shardmark.report.figures.entry_series import estimates_series
from shardmark.report.figures.figure import Figure, Panel, Series
from shardmark.report.figures.grouping import Entry, Group, in_parts, with_metric
from shardmark.report.figures.looks import REFERENCE
from shardmark.report.figures.sentences import entries_in, intervals, joined, not_equivalent
from shardmark.report.figures.units import byte_unit


def trade_off_figures(groups: Sequence[Group]) -> list[Figure]:
    """Throughput against peak memory, with the border of what no other row beats in both."""
    both = with_metric(with_metric(groups, "samples_per_second"), "peak_memory_bytes")
    figures = []
    for part in in_parts([group for group in both if len(group.entries) > 1]):
        entries = entries_in(part.groups)
        unit, size = byte_unit(max(_peak_of(entry) for entry in entries))
        caption = joined(
            "Each row's throughput against the peak memory of its fullest rank; numbers are ranks."
            " Better is up and to the left: nothing lies above the dashed border's corners at as"
            " little memory.",
            intervals(entries),
            not_equivalent(entries),
        )
        figures.append(
            Figure(
                name=f"speed-and-memory{part.ending}",
                title="Speed against memory",
                caption=joined(caption, part.note),
                panels=tuple(_trade_off(group, unit, size) for group in part.groups),
                columns=min(2, len(part.groups)),
            )
        )
    return figures


def _trade_off(group: Group, unit: str, size: float) -> Panel:
    peaks = [_peak_of(entry) for entry in group.entries]
    border = _border(
        [(_peak_of(one) / size, _rate_of(one)) for one in group.entries],
    )
    series = [
        Series(
            name="not beaten in both",
            x=tuple(x for x, _ in border),
            y=tuple(y for _, y in border),
            style=REFERENCE,
            dashed=True,
        )
    ]
    for name in dict.fromkeys(entry.name for entry in group.entries):
        entries = [entry for entry in group.entries if entry.name == name]
        found = [rate for one in entries if (rate := one.row.metrics["samples_per_second"])]
        points = estimates_series(entries[0], [_peak_of(one) / size for one in entries], found, 1)
        text = tuple(one.ranks.partition(" ")[0] for one in entries)
        series.append(replace(points, text=text))
    return Panel(
        title=group.title,
        kind="points",
        x_label=f"Peak memory ({unit})",
        y_label="Throughput (samples/s)",
        x_unit=unit,
        y_unit="samples/s",
        series=tuple(series),
        x_from_zero=min(peaks) < max(peaks) / 2,
    )


def _border(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Steps through the points that no other beats in both, from the left up."""
    corners: list[tuple[float, float]] = []
    for x, y in sorted(points, key=lambda point: (point[0], -point[1])):
        if not corners or y > corners[-1][1]:
            if corners:
                corners.append((x, corners[-1][1]))
            corners.append((x, y))
    return corners


def _peak_of(entry: Entry) -> float:
    found = entry.row.metrics["peak_memory_bytes"]
    assert found is not None, "only rows that have it are drawn"
    return found.value


def _rate_of(entry: Entry) -> float:
    found = entry.row.metrics["samples_per_second"]
    assert found is not None, "only rows that have it are drawn"
    return found.value
