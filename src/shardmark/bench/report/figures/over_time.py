"""Figures over the training: loss, quality, stale gradients, network, CPU and GPUs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from math import ceil, isfinite
from typing import Any

from shardmark.base.metrics import METRICS
from shardmark.base.table.table import byte_unit
from shardmark.bench.analysis.compare.epochs import Epoch
from shardmark.bench.analysis.compare.series import (
    NETWORK,
    SMOOTHED_READINGS,
    LossCurve,
    OverTime,
    loss_curve,
    readings_by_rank,
    sampled,
)
from shardmark.bench.analysis.network.traffic import Interface, traffic_of
from shardmark.bench.report.figures.chart import (
    Figure,
    Panel,
    Series,
    figure,
    rate_unit,
    readable,
    with_shared_axis,
)
from shardmark.bench.report.figures.entries import (
    MOST_ROWS_READ,
    Entry,
    Group,
    entries_in,
    epoch_estimates,
    estimates_series,
    facets_of,
    having,
    reliability,
    rows_read,
)

_MOST_BINS = 20
_FIRST_REPEAT = (
    "The first repeat of each row, from the first step to the end of the last epoch. Where many"
    f" readings were taken, a line is their running mean of {SMOOTHED_READINGS} (median of"
    " threads, processes and memory), and a faint line has them all."
)
_MOST_WITH_READINGS = 3
"""Largest number of rows whose readings are drawn in one panel."""
BY_EPOCH = {
    "train_loss": ("Training loss", "", 1),
    "validation_loss": ("Validation loss", "", 1),
    "accuracy_top1": ("Top-1 accuracy", "%", 100),
    "map": ("mAP of boxes", "", 1),
    "mask_map": ("mAP of masks", "", 1),
    "bits_per_byte": ("Bits per byte", "", 1),
    "perplexity": ("Perplexity", "", 1),
    "epoch_seconds": ("Time of an epoch", "s", 1),
}
"""Metric of an epoch -> title, unit, and factor from the base unit."""


# By epoch and step


def epoch_figures(groups: Sequence[Group]) -> list[Figure]:
    """Draw metrics by epoch and by training time; no quality for synthetic data."""
    recorded = (
        name for e in entries_in(groups) for epoch in e.epochs.epochs for name in epoch.metrics
    )
    user_defined = dict.fromkeys(
        name for name in recorded if name not in (*METRICS, "elapsed_seconds")
    )
    return [
        drawn for metric in (*BY_EPOCH, *user_defined) for drawn in _epoch_figure(groups, metric)
    ]


def _epoch_figure(groups: Sequence[Group], metric: str) -> list[Figure]:
    title, unit, scale = BY_EPOCH.get(metric, (metric, "", 1))
    # Losses may diverge, so their axis may become logarithmic.
    rises = any(entry.row.better(metric) == "higher" for entry in entries_in(groups))
    is_time = metric == "epoch_seconds"
    is_quality = not is_time and metric != "train_loss"

    def line(entry: Entry, x_of: Callable[[Epoch], float | None]) -> list[Series]:
        points = [
            (x, estimate)
            for epoch in entry.epochs.epochs
            if (x := x_of(epoch)) is not None
            and (estimate := epoch.metrics.get(metric)) is not None
            and isfinite(estimate.value)
        ]
        if not points:
            return []
        xs, estimates = zip(*points, strict=True)
        timed = is_time or x_of is _epoch_end
        return [estimates_series([entry], xs, estimates, scale, timed=timed)]

    def panel(facet: Group, x_of: Callable[[Epoch], float | None]) -> Panel:
        by_epoch = x_of is _epoch_number
        return Panel(
            title=facet.title,
            kind="line",
            x_label="Epoch" if by_epoch else "Training time (s)",
            y_label=f"{title} ({unit})" if unit else title,
            series=tuple(series for entry in facet.entries for series in line(entry, x_of)),
            x_unit="" if by_epoch else "s",
            y_unit=unit,
            x_whole=by_epoch,
            x_from_zero=not by_epoch,
            y_from_zero=is_time or rises,
        )

    shown = having(
        groups,
        lambda entry: line(entry, _epoch_number) and not (is_quality and entry.row.synthetic),
    )
    facets = facets_of(shown)
    axes = (_epoch_number,) if is_time else (_epoch_number, _epoch_end)
    panels = [panel(facet, x_of) for facet in facets for x_of in axes]
    return figure(
        metric.replace("_", "-"),
        title,
        with_shared_axis(panels if rises else readable(panels)),
        "Time is that of training alone, on the slowest rank; evaluations are not in it.",
        "The first epoch includes the warm-up steps." if is_time else "",
        reliability(entries_in(facets), epoch_estimates(entries_in(facets), metric)),
    )


def _epoch_number(epoch: Epoch) -> float | None:
    return float(epoch.number)


def _epoch_end(epoch: Epoch) -> float | None:
    elapsed = epoch.metrics.get("elapsed_seconds")
    return None if elapsed is None else elapsed.value


def step_loss_figures(groups: Sequence[Group]) -> list[Figure]:
    """Draw the loss by step if the recipe has no epochs, from one repeat of each row."""
    counted = [entry for entry in entries_in(groups) if not entry.epochs.epochs]
    curves = {entry: loss_curve(entry.row) for entry in counted[:MOST_ROWS_READ]}
    facets = facets_of(having(groups, lambda entry: entry in curves and curves[entry].by_step.x))
    axes: dict[str, Callable[[LossCurve], Sequence[float]]] = {
        "Step": lambda curve: curve.by_step.x,
        "Tokens (millions)": lambda curve: [count / 1e6 for count in curve.tokens],
        "Time since the first step (s)": lambda curve: curve.seconds,
    }
    return figure(
        "loss-by-step",
        "Training loss by step",
        with_shared_axis(
            readable(
                Panel(
                    title=facet.title,
                    kind="line",
                    x_label=label,
                    y_label="Training loss",
                    series=tuple(
                        entry.line(x, curves[entry].by_step.y)
                        for entry in facet.entries
                        if (x := x_of(curves[entry]))
                    ),
                    x_unit="s" if label.endswith("(s)") else "",
                    x_whole=label == "Step",
                    x_from_zero=label != "Step",
                    y_from_zero=False,
                )
                for facet in facets
                for label, x_of in axes.items()
            )
        ),
        "Training loss by optimizer step, by tokens where there are any, and by time, in the first"
        " repeat: mean over the samples or tokens of all ranks. Long series are thinned to each"
        " stretch's extremes.",
        rows_read(len(counted)),
    )


def staleness_figures(groups: Sequence[Group]) -> list[Figure]:
    """Draw the fraction of gradients by staleness, if parameter servers counted it."""
    counts = {entry: count for entry in entries_in(groups) if (count := _staleness(entry))}
    largest = max((max(count) for count in counts.values()), default=0)
    width = ceil((largest + 1) / _MOST_BINS)
    starts = range(0, largest + 1, width)

    def binned(entry: Entry) -> Series:
        count = counts[entry]
        sums = [sum(count[at] for at in range(start, start + width)) for start in starts]
        return entry.line(starts, [100 * bin_sum / count.total() for bin_sum in sums])

    return figure(
        "staleness",
        "Staleness of gradients",
        with_shared_axis(
            Panel(
                title=facet.title,
                kind="line",
                x_label=f"Staleness (updates{f', in bins of {width}' if width > 1 else ''})",
                y_label="Gradients (%)",
                y_unit="%",
                series=tuple(map(binned, facet.entries)),
                x_whole=True,
            )
            for facet in facets_of(having(groups, counts.__contains__))
        ),
        "How many updates a server took between handing out parameters and using the gradient that"
        " was computed from them; all repeats and servers together.",
    )


def _staleness(entry: Entry) -> Counter[int]:
    counts: Counter[int] = Counter()
    for trial in entry.row.ok_trials:
        for rank in trial.ranks:
            if rank.role == "server" and rank.exchange is not None:
                counts.update({int(key): n for key, n in rank.exchange.staleness.items()})
    return +counts


# Values that were sampled during training, from raw files of one repeat of each row


def sampled_figures(groups: Sequence[Group]) -> list[Figure]:
    entries = entries_in(groups)
    read = {e: series for e in entries[:MOST_ROWS_READ] if (series := sampled(e.row))}
    unit, size = rate_unit(_largest(of_row["network_bytes_per_second"] for of_row in read.values()))
    facets = facets_of(having(groups, read.__contains__))

    def panels(*quantities: tuple[str, str, str, float]) -> list[Panel]:
        """Draw a panel for each metric of `sampled`, given with label, unit and unit size."""
        return with_shared_axis(
            _panel(
                facet.title,
                f"{label} ({unit})",
                unit,
                [
                    line
                    for entry in facet.entries
                    for line in _lines(entry, read[entry][name], size, timed=True)
                    if not line.raw or len(facet.entries) <= _MOST_WITH_READINGS
                ],
            )
            for facet in facets
            for name, label, unit, size in quantities
        )

    return [
        *figure(
            "network-and-cpu",
            "Network and CPU over time",
            panels(
                ("network_bytes_per_second", "Network, sent", unit, size),
                ("cpu_percent", "CPU, all ranks", "%", 1),
            ),
            _FIRST_REPEAT,
            "Network: sent over all interfaces of all nodes, loopback included. CPU: all ranks and"
            " their children, 100 % being one busy core.",
            rows_read(len(entries)),
        ),
        *figure(
            "gpu",
            "GPUs over time",
            panels(("gpu_percent", "GPU busy", "%", 1), ("power_watts", "Power", "W", 1)),
            _FIRST_REPEAT,
            "Busy: share of time in which some kernel ran, mean over the GPUs in use; power: their"
            " sum (NVML).",
            rows_read(len(entries)),
        ),
    ]


def interface_figures(groups: Sequence[Group]) -> list[Figure]:
    """Draw bytes and errors of each interface: a panel for each row, a line for each interface.

    Bytes are not drawn again if there is one interface, which another figure shows.
    """
    pairs = [(group, entry) for group in groups for entry in group.entries]
    read = [(*pair, _interfaces(pair[1])) for pair in pairs[:MOST_ROWS_READ]]
    names = list(dict.fromkeys(name for *_, interfaces in read for name in interfaces))
    shown = [used for *_, interfaces in read for used in interfaces.values()]
    unit, size = rate_unit(_largest(used.sent.over_time for used in shown))

    def panels(label: str, unit: str, size: float, way: str) -> list[Panel]:
        return [
            _panel(
                ", ".join(filter(None, (entry.bar, group.title))),
                f"{label} ({unit})",
                unit,
                [
                    line
                    for name, used in interfaces.items()
                    for line in _lines(
                        entry,
                        getattr(used, way).over_time,
                        size,
                        timed=True,
                        name=name,
                        style=names.index(name),
                    )
                ],
            )
            for group, entry, interfaces in read
        ]

    figures = []
    if len(names) > 1:
        figures += figure(
            "bandwidth",
            "Bandwidth over time by interface",
            with_shared_axis(panels("Sent", unit, size, "sent")),
            _FIRST_REPEAT,
            "Sent, by the interfaces' own counters; lo is the loopback, which connects ranks of one"
            " node.",
            rows_read(len(pairs)),
        )
    if _largest(used.errors.over_time for used in shown) > 0:
        figures += figure(
            "network-errors",
            "Errors over time by interface",
            panels("Lost or dropped", "packets/s", 1, "errors"),
            _FIRST_REPEAT,
            "Packets that an interface could not send or receive, or dropped, by its own counters.",
            rows_read(len(pairs)),
        )
    return figures


_RANK_READINGS = {
    "threads": ("Threads of each rank", "Threads"),
    "processes": ("Processes of each rank", "Processes"),
    "rss_bytes": ("Memory of each rank over time", "Resident memory"),
    NETWORK: ("Network of each rank over time", "Sent"),
}
"""Field of a sample -> title of its figure, and label of its axis."""
_UNITS = {"rss_bytes": byte_unit, NETWORK: rate_unit}


def rank_figures(groups: Sequence[Group]) -> list[Figure]:
    """Draw what was sampled of each rank: a panel for each row, a line for each rank."""
    pairs = [(group, entry) for group in groups for entry in group.entries]
    read = [(*pair, readings_by_rank(pair[1].row)) for pair in pairs[:MOST_ROWS_READ]]
    figures = []
    for field, (title, label) in _RANK_READINGS.items():
        drawn = [(group, entry, by_field.get(field, {})) for group, entry, by_field in read]
        largest = _largest(series for *_, by_rank in drawn for series in by_rank.values())
        unit, size = _UNITS[field](largest) if field in _UNITS else ("", 1.0)
        panels = [
            _panel(
                ", ".join(filter(None, (entry.bar, group.title))),
                f"{label} ({unit})" if unit else label,
                unit,
                [
                    line
                    for rank, values in by_rank.items()
                    for line in _lines(
                        entry,
                        values,
                        size,
                        timed=field == NETWORK,
                        name=f"rank {rank} (server)" if rank in _servers(entry) else f"rank {rank}",
                        style=rank,
                    )
                ],
            )
            for group, entry, by_rank in drawn
            if field != NETWORK or entry.row.world_size > 1  # alone it writes files only
        ]
        caption = "A rank's process and its children, sampled from outside."
        if field == NETWORK:
            caption = (
                "What its processes wrote into sockets (gloo) and files; of a GPU, its NVLinks."
            )
        name = f"{field.removesuffix('_bytes')}-by-rank"
        shared = with_shared_axis(panels)
        figures += figure(name, title, shared, _FIRST_REPEAT, caption, rows_read(len(pairs)))
    return figures


def _servers(entry: Entry) -> set[int]:
    """Return the ranks that are parameter servers."""
    return {rank.rank for rank in entry.row.ok_trials[0].ranks if rank.role == "server"}


def _interfaces(entry: Entry) -> dict[str, Interface]:
    """Return the interfaces by name; names have the node's number if there are several."""
    several = entry.row.nodes > 1
    return {
        f"node {used.node}, {used.name}" if several else used.name: used
        for used in traffic_of(entry.row, repeats=1).interfaces
        if used.sent.over_time.x
    }


def _largest(values: Iterable[OverTime]) -> float:
    return max((y for over_time in values for y in over_time.y), default=0.0)


def _lines(
    entry: Entry, values: OverTime, size: float, *, timed: bool, **changes: Any
) -> list[Series]:
    """Return the smoothed line and a faint one of the readings; of few readings, a line alone."""
    line = entry.line(values.x, [y / size for y in values.y])
    readings = replace(line, faint=(timed and entry.row.disturbed is not None,), **changes)
    if values.smooth is None:
        return [readings]
    x, y = values.smooth
    return [
        replace(readings, x=x, y=tuple(value / size for value in y)),
        replace(readings, raw=True),
    ]


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
