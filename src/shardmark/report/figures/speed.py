"""Throughput, scaling, and where a step's time goes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shardmark.analysis.compare.rows import Row
from shardmark.analysis.statistics.intervals import Estimate
from shardmark.analysis.trial.step_parts import StepParts, step_parts
from shardmark.report.figures.entry_series import estimates_series
from shardmark.report.figures.figure import Figure, Panel, Series
from shardmark.report.figures.grouping import Entry, Group, by_bars, in_parts, with_metric
from shardmark.report.figures.looks import REFERENCE
from shardmark.report.figures.sentences import entries_in, intervals, joined, not_equivalent
from shardmark.results.schema import RankRecord

_PARTS = (
    ("data", "data_seconds"),
    ("forward", "forward_seconds"),
    ("backward", "backward_seconds"),
    ("optimizer", "optimizer_seconds"),
    ("exposed communication", "exposed_communication_seconds"),
    ("rest", "rest_seconds"),
)
_RATE = "samples_per_second"
_WIDEST_LINEAR = 8
"""Largest ratio of numbers of ranks that an ordinary axis still shows well."""


def throughput_figures(groups: Sequence[Group]) -> list[Figure]:
    """One bar a row."""
    figures = []
    for part in by_bars(with_metric(groups, _RATE)):
        entries = entries_in(part.groups)
        caption = joined(
            "All ranks' samples over the slowest rank's measured windows.",
            intervals(entries),
            not_equivalent(entries),
        )
        panels = tuple(_throughput(group) for group in part.groups)
        figures.append(
            Figure(
                name=f"throughput{part.ending}",
                title="Throughput",
                caption=joined(caption, part.note),
                panels=panels,
            )
        )
    return figures


def _throughput(group: Group) -> Panel:
    return Panel(
        title=group.title,
        kind="horizontal_bars",
        x_label="",
        y_label="Throughput (samples/s)",
        y_unit="samples/s",
        series=tuple(
            estimates_series(
                entries[0],
                [entry.bar for entry in entries],
                [found for entry in entries if (found := entry.row.metrics[_RATE])],
                1,
            )
            for entries in _by_name(group.entries)
        ),
        category_order=tuple(entry.bar for entry in group.entries),
    )


def scaling_figures(groups: Sequence[Group]) -> list[Figure]:
    """Throughput and efficiency against the number of ranks, where there are several numbers."""
    scaled = [
        group
        for group in with_metric(groups, _RATE)
        if len({entry.row.world_size for entry in group.entries}) > 1
    ]
    figures = []
    for part in in_parts(scaled):
        entries = entries_in(part.groups)
        found = [(_scaling(group), _efficiency(group)) for group in part.groups]
        on_cpu = any(rank.device == "cpu" for rank in _ranks(entries))
        caption = joined(
            "Throughput against the number of ranks, the dashed line being as many times one"
            " rank's; and the efficiency: throughput per rank over that of the same strategy on its"
            " fewest ranks, or of `single`.",
            "Ranks on one machine share its cores." if on_cpu else "",
            intervals(entries),
            not_equivalent(entries),
        )
        figures.append(
            Figure(
                name=f"scaling{part.ending}",
                title="Scaling",
                caption=joined(caption, part.note),
                panels=tuple(panel for pair in found for panel in pair),
                columns=2,
            )
        )
    return figures


def _scaling(group: Group) -> Panel:
    series = [_over_ranks(entries, _RATE, 1) for entries in _by_name(group.entries)]
    ideal = _ideal(group.entries)
    return _ranks_panel(
        group,
        "Throughput (samples/s)",
        "samples/s",
        [*([ideal] if ideal else []), *(one for one in series if one)],
    )


def _efficiency(group: Group) -> Panel:
    sizes = sorted({entry.row.world_size for entry in group.entries})
    series = [_over_ranks(e, "scaling_efficiency", 100) for e in _by_name(group.entries)]
    ideal = Series(
        name="ideal",
        x=tuple(map(float, sizes)),
        y=(100.0,) * len(sizes),
        style=REFERENCE,
        dashed=True,
    )
    return _ranks_panel(
        group, "Scaling efficiency (%)", "%", [ideal, *(one for one in series if one)]
    )


def _ranks_panel(group: Group, y_label: str, y_unit: str, series: Sequence[Series]) -> Panel:
    sizes = sorted({entry.row.world_size for entry in group.entries})
    wide = sizes[-1] / sizes[0] > _WIDEST_LINEAR
    return Panel(
        title=group.title,
        kind="line",
        x_label="Ranks",
        y_label=y_label,
        x_unit="ranks",
        y_unit=y_unit,
        series=tuple(series),
        x_logarithmic=wide,
        y_logarithmic=wide and y_unit != "%",
        x_ticks=tuple(map(float, sizes)),
    )


def _over_ranks(entries: Sequence[Entry], metric: str, scale: float) -> Series | None:
    found = [(e.row.world_size, one) for e in entries if (one := e.row.metrics[metric])]
    if not found:
        return None
    return estimates_series(
        entries[0], [float(size) for size, _ in found], [one for _, one in found], scale
    )


def _ideal(entries: Sequence[Entry]) -> Series | None:
    """As many times the baseline's rate a rank; without one, the best rate a rank on the fewest."""
    rates = [(e.row, one.value / e.row.world_size) for e in entries if (one := _rate(e.row))]
    sizes = sorted({row.world_size for row, _ in rates})
    base = [rate for row, rate in rates if row.strategy == "single"]
    fewest = [rate for row, rate in rates if row.world_size == sizes[0]]
    a_rank = max(base or fewest)
    return Series(
        name="ideal",
        x=tuple(map(float, sizes)),
        y=tuple(a_rank * size for size in sizes),
        style=REFERENCE,
        dashed=True,
    )


def step_figures(groups: Sequence[Group]) -> list[Figure]:
    """One stacked bar a row."""
    parts = {id(entry): found for entry in entries_in(groups) if (found := step_parts(entry.row))}
    kept = [
        replace(group, entries=tuple(one for one in group.entries if id(one) in parts))
        for group in groups
    ]
    figures = []
    for part in by_bars([group for group in kept if group.entries]):
        drawn = [[(entry.bar, parts[id(entry)]) for entry in one.entries] for one in part.groups]
        longest = max(one.total_seconds for bars in drawn for _, one in bars)
        unit, scale = ("s", 1.0) if longest >= 10 else ("ms", 1000.0)
        panels = tuple(
            _step_panel(group.title, bars, unit, scale)
            for group, bars in zip(part.groups, drawn, strict=True)
        )
        caption = (
            "Median step, mean over ranks and repeats. Exposed communication (while nothing was"
            " computed) comes from a profiled step and is known for the step as a whole: it is"
            " taken out of forward, backward and optimizer in proportion to their lengths."
        )
        figures.append(
            Figure(
                name=f"step-time{part.ending}",
                title="Where a step's time goes",
                caption=joined(caption, part.note),
                panels=panels,
            )
        )
    return figures


def _step_panel(
    title: str, bars: Sequence[tuple[str, StepParts]], unit: str, scale: float
) -> Panel:
    series = []
    for name, attribute in _PARTS:
        values = [(bar, getattr(parts, attribute)) for bar, parts in bars]
        known = [(bar, value * scale) for bar, value in values if value is not None]
        if any(value > 0 for _, value in known):
            x, y = zip(*known, strict=True)
            series.append(Series(name=name, x=x, y=y, style=name))
    return Panel(
        title=title,
        kind="stacked_horizontal",
        x_label="",
        y_label=f"Time of a step ({unit})",
        y_unit=unit,
        series=tuple(series),
        category_order=tuple(bar for bar, _ in bars),
    )


def _by_name(entries: Sequence[Entry]) -> list[list[Entry]]:
    found: dict[str, list[Entry]] = {}
    for entry in entries:
        found.setdefault(entry.name, []).append(entry)
    return list(found.values())


def _ranks(entries: Sequence[Entry]) -> list[RankRecord]:
    return [rank for one in entries for trial in one.row.ok_trials for rank in trial.ranks]


def _rate(row: Row) -> Estimate | None:
    return row.metrics[_RATE]
