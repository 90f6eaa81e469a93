"""Throughput, scaling, and where a step's time goes."""

from __future__ import annotations

from collections.abc import Sequence

from shardmark.analysis.compare.rows import main_rate
from shardmark.analysis.compare.step_time import step_time
from shardmark.core.metrics import METRICS
from shardmark.report.figures.chart import Figure, Panel, Series, figure, stacked_panel
from shardmark.report.figures.entries import (
    Entry,
    Group,
    entries_in,
    estimates_of,
    estimates_series,
    having,
    reliability,
)
from shardmark.report.figures.looks import REFERENCE

_RATE, _EFFICIENCY = "samples_per_second", "scaling_efficiency"
_WIDEST_LINEAR = 8
"""Largest ratio of numbers of ranks that an ordinary axis still shows well."""


def throughput_figures(groups: Sequence[Group]) -> list[Figure]:
    """One bar a row, the fastest first."""
    measured = having(groups, lambda entry: entry.row.metrics[_RATE])
    return figure(
        "throughput",
        "Throughput",
        [_throughput(group) for group in measured],
        "Work of all ranks over the slowest rank's measured windows; the fastest first.",
        reliability(entries_in(measured)),
    )


def _throughput(group: Group) -> Panel:
    rate = _rate_of(group)
    return Panel(
        title=group.title,
        kind="bars",
        x_label="",
        y_label=f"Throughput ({METRICS[rate].unit})",
        y_unit=METRICS[rate].unit,
        series=tuple(
            estimates_series(entries, [entry.bar for entry in entries], estimates_of(entries, rate))
            for entries in group.by_name()
        ),
        category_order=tuple(entry.bar for entry in sorted(group.entries, key=_rate, reverse=True)),
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
        [
            panel
            for group in scaled
            for panel in (
                _ranks_panel(group, _rate_of(group)),
                _ranks_panel(group, _EFFICIENCY),
            )
        ],
        "Throughput against the number of ranks, the dashed line being as many times one rank's;"
        " and the efficiency: throughput per rank over that of the same strategy on its fewest"
        " ranks, or of `single`.",
        "Ranks on one machine share its cores." if on_cpu else "",
        reliability(entries),
    )


def _ranks_panel(group: Group, metric: str) -> Panel:
    """The ideal throughput grows with the ranks; the ideal efficiency is 100 % everywhere."""
    is_rate = metric != _EFFICIENCY
    title, y_unit, scale = "Scaling efficiency", "%", 100
    if is_rate:
        title, y_unit, scale = "Throughput", METRICS[metric].unit, 1
    sizes = sorted({entry.row.world_size for entry in group.entries})
    wide = sizes[-1] / sizes[0] > _WIDEST_LINEAR
    best = _best_rate_per_rank(group, metric, sizes[0]) if is_rate else 0.0
    ideal = Series(
        name="ideal",
        x=tuple(map(float, sizes)),
        y=tuple(best * size if is_rate else 100.0 for size in sizes),
        style=REFERENCE,
        dashed=True,
    )
    lines = []
    for entries in group.by_name():
        known = [entry for entry in entries if entry.row.metrics[metric] is not None]
        if known:
            x = [float(entry.row.world_size) for entry in known]
            lines.append(estimates_series(known, x, estimates_of(known, metric), scale))
    return Panel(
        title=group.title,
        kind="line",
        x_label="Ranks",
        y_label=f"{title} ({y_unit})",
        x_unit="ranks",
        y_unit=y_unit,
        series=(ideal, *lines),
        x_logarithmic=wide,
        y_logarithmic=wide and is_rate,
        x_whole=True,
        x_ticks=tuple(map(float, sizes)),
    )


def _best_rate_per_rank(group: Group, rate: str, fewest: int) -> float:
    """That of `single`; without it the best on the fewest ranks."""
    entries = [entry for entry in group.entries if entry.row.strategy == "single"]
    entries = entries or [entry for entry in group.entries if entry.row.world_size == fewest]
    return max(estimates_of([e], rate)[0].value / e.row.world_size for e in entries)


def _rate_of(group: Group) -> str:
    return main_rate([entry.row for entry in group.entries])


def step_figures(groups: Sequence[Group]) -> list[Figure]:
    """One stacked bar a row."""
    parts = {e: known.parts() for e in entries_in(groups) if (known := step_time(e.row))}
    longest = max((sum(filter(None, known.values())) for known in parts.values()), default=0.0)
    unit, size = ("s", 1.0) if longest >= 10 else ("ms", 0.001)
    return figure(
        "step-time",
        "Where a step's time goes",
        [
            stacked_panel(
                group.title,
                f"Time of a step ({unit})",
                unit,
                [(entry.bar, entry.number, parts[entry]) for entry in group.entries],
                size,
            )
            for group in having(groups, parts.__contains__)
        ],
        "Median step, mean over ranks and repeats. Exposed communication, while nothing was"
        " computed, comes from a profiled step; it is taken out of forward, backward and optimizer"
        " in proportion to their lengths.",
    )


def _rate(entry: Entry) -> float:
    return estimates_of([entry], _RATE)[0].value
