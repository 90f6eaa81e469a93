"""Throughput, scaling, and where a step's time goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardmark.analysis.trial.step_time import step_time
from shardmark.report.figures.chart import Figure, Panel, Series, figure
from shardmark.report.figures.entries import (
    Entry,
    Group,
    entries_in,
    estimates_series,
    having,
    intervals,
    not_equivalent,
)
from shardmark.report.figures.looks import REFERENCE

_RATE = "samples_per_second"
_WIDEST_LINEAR = 8
"""Largest ratio of numbers of ranks that an ordinary axis still shows well."""


def throughput_figures(groups: Sequence[Group]) -> list[Figure]:
    """One bar a row, the fastest first."""
    measured = having(groups, lambda entry: entry.row.metrics[_RATE])
    entries = entries_in(measured)
    return figure(
        "throughput",
        "Throughput",
        [_throughput(group) for group in measured],
        "All ranks' samples over the slowest rank's measured windows; the fastest first.",
        intervals(entries),
        not_equivalent(entries),
    )


def _throughput(group: Group) -> Panel:
    fastest_first = sorted(group.entries, key=lambda entry: -_rate(entry))
    return Panel(
        title=group.title,
        kind="bars",
        x_label="",
        y_label="Throughput (samples/s)",
        y_unit="samples/s",
        series=tuple(
            estimates_series(
                entries,
                [entry.bar for entry in entries],
                [rate for entry in entries if (rate := entry.row.metrics[_RATE])],
            )
            for entries in group.by_name()
        ),
        category_order=tuple(entry.bar for entry in fastest_first),
    )


def scaling_figures(groups: Sequence[Group]) -> list[Figure]:
    """Throughput and efficiency against the number of ranks, where there are several numbers."""
    scaled = [
        group
        for group in having(groups, lambda entry: entry.row.metrics[_RATE])
        if len({entry.row.world_size for entry in group.entries}) > 1
    ]
    entries = entries_in(scaled)
    on_cpu = any(
        rank.device == "cpu" for e in entries for trial in e.row.ok_trials for rank in trial.ranks
    )
    return figure(
        "scaling",
        "Scaling",
        [panel for group in scaled for panel in (_scaling(group), _efficiency(group))],
        "Throughput against the number of ranks, the dashed line being as many times one rank's;"
        " and the efficiency: throughput per rank over that of the same strategy on its fewest"
        " ranks, or of `single`.",
        "Ranks on one machine share its cores." if on_cpu else "",
        intervals(entries),
        not_equivalent(entries),
    )


def _scaling(group: Group) -> Panel:
    """Ideal is as many times `single`'s rate; without it, the best rate per rank on the fewest."""
    sizes = sorted({entry.row.world_size for entry in group.entries})
    per_rank = [(entry.row, _rate(entry) / entry.row.world_size) for entry in group.entries]
    single = [rate for row, rate in per_rank if row.strategy == "single"]
    fewest = [rate for row, rate in per_rank if row.world_size == sizes[0]]
    best = max(single or fewest)
    return _ranks_panel(group, _RATE, "Throughput (samples/s)", "samples/s", ideal_a_rank=best)


def _efficiency(group: Group) -> Panel:
    return _ranks_panel(group, "scaling_efficiency", "Scaling efficiency (%)", "%", scale=100)


def _ranks_panel(
    group: Group,
    metric: str,
    y_label: str,
    y_unit: str,
    *,
    scale: float = 1,
    ideal_a_rank: float | None = None,
) -> Panel:
    """Ideal is the same everywhere, 100 %, where it does not grow with the ranks."""
    sizes = sorted({entry.row.world_size for entry in group.entries})
    wide = sizes[-1] / sizes[0] > _WIDEST_LINEAR
    ideal = Series(
        name="ideal",
        x=tuple(map(float, sizes)),
        y=tuple(100.0 if ideal_a_rank is None else ideal_a_rank * size for size in sizes),
        style=REFERENCE,
        dashed=True,
    )
    lines = []
    for entries in group.by_name():
        known = [entry for entry in entries if entry.row.metrics[metric] is not None]
        if known:
            estimates = [found for entry in known if (found := entry.row.metrics[metric])]
            x = [float(entry.row.world_size) for entry in known]
            lines.append(estimates_series(known, x, estimates, scale))
    return Panel(
        title=group.title,
        kind="line",
        x_label="Ranks",
        y_label=y_label,
        x_unit="ranks",
        y_unit=y_unit,
        series=(ideal, *lines),
        x_logarithmic=wide,
        y_logarithmic=wide and y_unit != "%",
        x_whole=True,
        x_ticks=tuple(map(float, sizes)),
    )


def step_figures(groups: Sequence[Group]) -> list[Figure]:
    """One stacked bar a row."""
    parts = {e: known.parts() for e in entries_in(groups) if (known := step_time(e.row))}
    longest = max((sum(filter(None, known.values())) for known in parts.values()), default=0.0)
    unit, scale = ("s", 1.0) if longest >= 10 else ("ms", 1000.0)
    return figure(
        "step-time",
        "Where a step's time goes",
        [_step_panel(group, parts, unit, scale) for group in having(groups, parts.__contains__)],
        "Median step, mean over ranks and repeats. Exposed communication, while nothing was"
        " computed, comes from a profiled step; it is taken out of forward, backward and optimizer"
        " in proportion to their lengths.",
    )


def _step_panel(
    group: Group, parts: Mapping[Entry, Mapping[str, float | None]], unit: str, scale: float
) -> Panel:
    series = []
    for name in parts[group.entries[0]]:
        values = [(entry, parts[entry][name]) for entry in group.entries]
        known = [(entry, value * scale) for entry, value in values if value is not None]
        if any(value > 0 for _, value in known):
            series.append(
                Series(
                    name=name,
                    x=tuple(entry.bar for entry, _ in known),
                    y=tuple(value for _, value in known),
                    style=name,
                    rows=tuple(entry.number for entry, _ in known),
                )
            )
    return Panel(
        title=group.title,
        kind="stacked",
        x_label="",
        y_label=f"Time of a step ({unit})",
        y_unit=unit,
        series=tuple(series),
        category_order=tuple(entry.bar for entry in group.entries),
    )


def _rate(entry: Entry) -> float:
    estimate = entry.row.metrics[_RATE]
    assert estimate is not None, "only rows that have it are drawn"
    return estimate.value
