"""Figures of results: speed against memory, throughput, scaling, memory by kind, step time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from shardmark.base.cells import ranks_and_nodes
from shardmark.base.metrics import METRICS
from shardmark.base.results.schema import RankRecord
from shardmark.base.table.table import byte_unit
from shardmark.base.text import counted
from shardmark.bench.analysis.compare.rows import main_rate
from shardmark.bench.analysis.compare.step_time import division_of
from shardmark.bench.analysis.parts import Division
from shardmark.bench.analysis.taken_away import Explanation
from shardmark.bench.report.figures.chart import Figure, Panel, Series, figure, stacked_panel
from shardmark.bench.report.figures.drawing import REFERENCE
from shardmark.bench.report.figures.entries import (
    Entry,
    Group,
    entries_in,
    estimates_of,
    estimates_series,
    having,
    reliability,
)
from shardmark.bench.report.table.row_columns import ranks_of

_RATE, _PEAK, _EFFICIENCY = "samples_per_second", "peak_memory_bytes", "scaling_efficiency"
_MOST_NAMED = 12
"""Largest number of points with strategy names; with more points, texts are rank counts."""
_WIDEST_LINEAR = 8
"""Largest ratio of numbers of ranks that an ordinary axis still shows well."""
_STATE = {
    "parameters": "parameter_bytes",
    "gradients": "gradient_bytes",
    "optimizer state": "optimizer_state_bytes",
}


def _rate_of(group: Group) -> str:
    return main_rate([entry.row for entry in group.entries])


# Throughput against peak memory: a mark for each cell, and the frontier


def trade_off_figures(groups: Sequence[Group]) -> list[Figure]:
    both = having(groups, lambda entry: entry.row.metrics[_RATE] and entry.row.metrics[_PEAK])
    drawn = [group for group in both if len(group.entries) > 1]
    entries = entries_in(drawn)
    unit, size = byte_unit(max((peak.value for peak in estimates_of(entries, _PEAK)), default=0.0))
    different = any(e.row.equivalent is False or e.row.guarantee or e.row.diverged for e in entries)
    return figure(
        "speed-and-memory",
        "Speed against memory",
        [_trade_off(group, unit, size) for group in drawn],
        "Throughput against the peak memory of the fullest rank. Better is up and to the left:"
        " nothing measured beats the dashed frontier in both.",
        "What trains something else, or has no finite loss, is not on it." if different else "",
        reliability(entries),
    )


def _trade_off(group: Group, unit: str, size: float) -> Panel:
    cells, same_training = [], []
    metric = _rate_of(group)
    for entries in group.by_name():
        rates = estimates_of(entries, metric)
        peaks = [peak.value / size for peak in estimates_of(entries, _PEAK)]
        points = estimates_series(entries, peaks, rates, timed=True)
        texts = tuple(_text(entry, group) for entry in entries)
        places = tuple(entry.bar for entry in entries)
        cells.append(replace(points, text=texts, places=places))
        same_training += [
            (peak, rate.value)
            for entry, peak, rate in zip(entries, peaks, rates, strict=True)
            if entry.row.equivalent is not False
            and entry.row.guarantee is None
            and entry.row.diverged is None
        ]
    return trade_off_panel(group.title, cells, same_training, unit, METRICS[metric].unit)


def trade_off_panel(
    title: str,
    cells: Sequence[Series],
    candidates: Iterable[tuple[float, float]],
    unit: str,
    rate_unit: str = METRICS[_RATE].unit,
) -> Panel:
    """Draw throughput against memory in `unit`, with the frontier of the `candidates`."""
    peaks = [float(x) for series in cells for x in series.x]
    corners = _frontier(candidates)
    if corners:  # It extends to the outermost cells, so that a single corner is visible.
        lowest = min(y for series in cells for y in series.y if y is not None)
        corners = [(corners[0][0], lowest), *corners, (max(peaks), corners[-1][1])]
    frontier = Series(
        name="frontier",
        x=tuple(x for x, _ in corners),
        y=tuple(y for _, y in corners),
        style=REFERENCE,
        dashed=True,
    )
    return Panel(
        title=title,
        kind="points",
        x_label=f"Peak memory ({unit})",
        y_label=f"Throughput ({rate_unit})",
        x_unit=unit,
        y_unit=rate_unit,
        series=(frontier, *cells),
        x_from_zero=min(peaks) < max(peaks) / 2,
    )


def _text(entry: Entry, group: Group) -> str:
    ranks = ranks_of(entry.row)
    if len(group.entries) > _MOST_NAMED:
        return ranks
    several = sum(other.name == entry.name for other in group.entries) > 1
    return f"{entry.name}, {ranks}" if several else entry.name


def _frontier(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return a step line through the points that no other point beats in both values."""
    corners: list[tuple[float, float]] = []
    for x, y in sorted(points, key=lambda point: (point[0], -point[1])):
        if not corners or y > corners[-1][1]:
            corners += [(x, corners[-1][1]), (x, y)] if corners else [(x, y)]
    return corners


# Throughput as bars, the fastest first, and over the number of ranks


def throughput_figures(groups: Sequence[Group]) -> list[Figure]:
    measured = having(groups, lambda entry: entry.row.metrics[_RATE])
    return figure(
        "throughput",
        "Throughput",
        map(_throughput, measured),
        "Work of all ranks over the slowest rank's measured windows; the fastest first.",
        reliability(entries_in(measured)),
    )


def _throughput(group: Group) -> Panel:
    rate = _rate_of(group)
    fastest = sorted(group.entries, key=lambda e: -estimates_of([e], _RATE)[0].value)
    return Panel(
        title=group.title,
        kind="bars",
        y_label=f"Throughput ({METRICS[rate].unit})",
        y_unit=METRICS[rate].unit,
        series=tuple(
            estimates_series(
                entries, [entry.bar for entry in entries], estimates_of(entries, rate), timed=True
            )
            for entries in group.by_name()
        ),
        category_order=tuple(entry.bar for entry in fastest),
    )


def scaling_figures(groups: Sequence[Group]) -> list[Figure]:
    """Draw throughput and efficiency if a strategy has several numbers of ranks."""
    scaled = [
        group
        for group in having(groups, lambda entry: entry.row.metrics[_RATE])
        if any(len(entries) > 1 for entries in group.by_name())
    ]
    entries = entries_in(scaled)
    ranks = [rank for entry in entries for trial in entry.row.ok_trials for rank in trial.ranks]
    return figure(
        "scaling",
        "Scaling",
        [
            _scaling_panel(group, metric)
            for group in scaled
            for metric in (_rate_of(group), _EFFICIENCY)
        ],
        "Throughput against the number of ranks, the dashed line being as many times one rank's;"
        " and the efficiency: throughput per rank over that of the same strategy on its fewest"
        " ranks, or of `single`.",
        "Ranks on one machine share its cores." if any(r.device == "cpu" for r in ranks) else "",
        reliability(entries),
    )


def _scaling_panel(group: Group, metric: str) -> Panel:
    """Return a metric over ranks, with its ideal: proportional throughput or 100 % efficiency."""
    is_rate = metric != _EFFICIENCY
    title, unit, scale = "Scaling efficiency", "%", 100
    if is_rate:
        title, unit, scale = "Throughput", METRICS[metric].unit, 1
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
        measured = [entry for entry in entries if entry.row.metrics[metric] is not None]
        if measured:
            x = [float(entry.row.world_size) for entry in measured]
            estimates = estimates_of(measured, metric)
            lines.append(estimates_series(measured, x, estimates, scale, timed=True))
    return Panel(
        title=group.title,
        kind="line",
        x_label="Ranks",
        y_label=f"{title} ({unit})",
        x_unit="ranks",
        y_unit=unit,
        series=(ideal, *lines),
        x_logarithmic=wide,
        y_logarithmic=wide and is_rate,
        x_whole=True,
        x_ticks=tuple(map(float, sizes)),
    )


def _best_rate_per_rank(group: Group, rate: str, fewest: int) -> float:
    """Return the rate of `single`, or the best rate on the fewest ranks."""
    entries = [entry for entry in group.entries if entry.row.strategy == "single"]
    entries = entries or [entry for entry in group.entries if entry.row.world_size == fewest]
    return max(estimates_of([e], rate)[0].value / e.row.world_size for e in entries)


# Stacked bars: parts of a rank's memory and of a step's time


def memory_figures(groups: Sequence[Group]) -> list[Figure]:
    """Draw a bar for each row, and another for the row's parameter servers."""
    bars = {
        entry: entry_bars for entry in entries_in(groups) if (entry_bars := _memory_bars(entry))
    }
    peaks = [sum(parts.values()) for entry_bars in bars.values() for *_, parts in entry_bars]
    unit, size = byte_unit(max(peaks, default=0.0))
    return figure(
        "memory",
        "Peak memory by kind",
        [
            stacked_panel(
                group.title,
                "Peak memory",
                unit,
                [bar for entry in group.entries for bar in bars[entry]],
                size,
            )
            for group in having(groups, bars.__contains__)
        ],
        "The most that tensors held at once on the fullest rank, mean over the repeats."
        " Activations and other: the peak without parameters, gradients and optimizer state, which"
        " are counted in an untimed step.",
    )


def _memory_bars(entry: Entry) -> list[tuple[str, int, Mapping[str, float]]]:
    """Return name, row and bytes by kind for the fullest worker and the fullest server."""
    bars: list[tuple[str, int, Mapping[str, float]]] = []
    size = ranks_and_nodes(entry.row.world_size, 1)
    for role in ("worker", "server"):
        fullest = []
        for trial in entry.row.ok_trials:
            ranks = [rank for rank in trial.ranks if rank.role == role]
            if ranks:
                fullest.append(max(ranks, key=lambda rank: peak_bytes(rank) or 0))
        if parts := _memory_parts(fullest):
            name = entry.bar if role == "worker" else f"{entry.name}, server of {size}"
            bars.append((name, entry.number, parts))
    return bars


def _memory_parts(ranks: Sequence[RankRecord]) -> dict[str, float]:
    """Return mean bytes by kind; the rest of the peak only if the peak and all kinds are known."""
    probes = [rank.probe for rank in ranks if rank.probe is not None]
    parts = {}
    for kind, attribute in _STATE.items():
        values = [value for probe in probes if (value := getattr(probe, attribute)) is not None]
        if values:
            parts[kind] = fmean(values)
    peaks = [peak for rank in ranks if (peak := peak_bytes(rank)) is not None]
    if peaks and len(parts) == len(_STATE):
        parts["activations and other"] = max(0.0, fmean(peaks) - sum(parts.values()))
    return parts


def peak_bytes(rank: RankRecord) -> int | None:
    """Return the rank's own peak; on a CPU that of the probe."""
    if rank.peak_memory_bytes is not None:
        return rank.peak_memory_bytes
    return None if rank.probe is None else rank.probe.peak_memory_bytes


def step_figures(groups: Sequence[Group]) -> list[Figure]:
    """Draw a bar for each row: the parts of its step, those that repeats leave open, too."""
    parts = {
        entry: _parts_of_step(division)
        for entry in entries_in(groups)
        if (division := division_of(entry.row))
    }
    longest = max((sum(of_row.values()) for of_row in parts.values()), default=0.0)
    unit, size = ("s", 1.0) if longest >= 10 else ("ms", 0.001)
    return figure(
        "step-time",
        "Where a step's time goes",
        [
            stacked_panel(
                group.title,
                "Time of a step",
                unit,
                [(entry.bar, entry.number, parts[entry]) for entry in group.entries],
                size,
                faint=[entry.number for entry in group.entries if entry.row.disturbed],
            )
            for group in having(groups, parts.__contains__)
        ],
        "Mean step, over ranks and repeats. Communication is what nothing hides: in"
        " a profiled step, nothing was computed meanwhile. The update is apart where it calls no"
        " collective.",
    )


def parts_by_ranks(explanations: Sequence[Explanation]) -> list[Figure]:
    """Draw a bar for each number of ranks of a script: where the speed-up goes."""
    bars = []
    for number, one in enumerate(explanations):
        seconds = {"computing": one.computing_seconds}
        for part in one.all_parts:
            kind = part.kind.replace("_", " ")
            seconds[kind] = seconds.get(kind, 0.0) + part.seconds.value
        bars.append((counted(one.ranks, "rank"), number, seconds))
    return figure(
        "parts-by-ranks",
        "Where the time of a step goes",
        [stacked_panel("", "A step", "ms", bars, 1e-3)],
        "Each part is what a step takes less without it.  Parts that overlap add up to more than "
        "the step.",
    )


def _parts_of_step(division: Division) -> dict[str, float]:
    measured = [part for part in (*division.parts, *division.undecided) if part.seconds.value > 0]
    parts = {part.kind.replace("_", " "): part.seconds.value for part in measured}
    computing = division.step.value - sum(parts.values())
    update = min(division.update.value, computing) if division.update else 0.0
    return {"computing": computing - update, "update": update, **parts}
