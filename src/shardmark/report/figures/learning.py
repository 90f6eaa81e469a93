"""Loss, quality and seconds of every epoch, loss by step and token, and stale gradients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, isfinite

from shardmark.analysis.compare.epochs import Epoch
from shardmark.analysis.compare.series import LossCurve, loss_curve
from shardmark.report.figures.chart import Figure, Panel, Series, figure, readable
from shardmark.report.figures.entries import (
    MOST_ROWS_READ,
    Entry,
    Group,
    entries_in,
    estimates_series,
    facets_of,
    having,
    reliability,
    rows_read,
)

_MOST_BINS = 20


@dataclass(frozen=True, slots=True)
class _Quantity:
    """A metric of every epoch."""

    metric: str
    figure: str
    title: str
    label: str
    unit: str = ""
    scale: float = 1.0


_TRAIN_LOSS = _Quantity("train_loss", "training-loss", "Training loss", "Training loss")
_QUALITIES = (
    _Quantity("validation_loss", "validation-loss", "Validation loss", "Validation loss"),
    _Quantity("accuracy_top1", "accuracy", "Accuracy", "Top-1 accuracy (%)", "%", 100),
    _Quantity("map", "map", "Average precision", "mAP of boxes"),
    _Quantity("mask_map", "mask-map", "Precision of masks", "mAP of masks"),
    _Quantity("bits_per_byte", "bits-per-byte", "Bits per byte", "Bits per byte"),
    _Quantity("perplexity", "perplexity", "Perplexity", "Perplexity"),
)
_SECONDS = _Quantity("epoch_seconds", "epoch-seconds", "Seconds per epoch", "Time (s)", "s")


def learning_figures(groups: Sequence[Group]) -> list[Figure]:
    """Loss by step where the recipe counts no epochs; made-up data have no quality."""
    real = having(groups, lambda entry: not entry.row.synthetic)
    return [
        *_by_epoch(groups, _TRAIN_LOSS),
        *_step_loss(groups),
        *(drawn for quality in _QUALITIES for drawn in _by_epoch(real, quality)),
        *_by_epoch(groups, _SECONDS),
    ]


def _by_epoch(groups: Sequence[Group], quantity: _Quantity) -> list[Figure]:
    """By training time, too, save what is a time itself."""
    facets = facets_of(having(groups, lambda entry: _series(entry, quantity, _number)))
    is_time = quantity is _SECONDS
    axes = [("Epoch", _number), *([] if is_time else [("Training time (s)", _elapsed)])]
    caption = (
        "Training alone, on the slowest rank; evaluations are not in it. The first epoch includes"
        " the warm-up steps."
        if is_time
        else f"{quantity.title} by epoch and by training time, counted from the first step;"
        " evaluations are not in the time."
    )
    return figure(
        quantity.figure,
        quantity.title,
        readable(_panel(facet, quantity, label, x_of) for facet in facets for label, x_of in axes),
        caption,
        reliability(entries_in(facets)),
    )


def _panel(
    facet: Group, quantity: _Quantity, x_label: str, x_of: Callable[[Epoch], float | None]
) -> Panel:
    drawn = (_series(entry, quantity, x_of) for entry in facet.entries)
    by_epoch = x_of is _number
    return Panel(
        title=facet.title,
        kind="line",
        x_label=x_label,
        y_label=quantity.label,
        series=tuple(series for series in drawn if series is not None),
        x_unit="" if by_epoch else "s",
        y_unit=quantity.unit,
        x_whole=by_epoch,
        x_from_zero=not by_epoch,
        y_from_zero=quantity is _SECONDS,
    )


def _series(
    entry: Entry, quantity: _Quantity, x_of: Callable[[Epoch], float | None]
) -> Series | None:
    known = [
        (x, estimate)
        for epoch in entry.epochs.epochs
        if (x := x_of(epoch)) is not None
        and (estimate := epoch.metrics.get(quantity.metric)) is not None
        and isfinite(estimate.value)
    ]
    if not known:
        return None
    xs, estimates = zip(*known, strict=True)
    return estimates_series([entry], xs, estimates, quantity.scale)


def _number(epoch: Epoch) -> float | None:
    return float(epoch.number)


def _elapsed(epoch: Epoch) -> float | None:
    elapsed = epoch.metrics.get("elapsed_seconds")
    return None if elapsed is None else elapsed.value


def _step_loss(groups: Sequence[Group]) -> list[Figure]:
    """From raw files: one repeat each, and of a limited number of rows."""
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
        readable(
            Panel(
                title=facet.title,
                kind="line",
                x_label=label,
                y_label="Training loss",
                series=series,
                x_unit="s" if label.endswith("(s)") else "",
                x_whole=label == "Step",
                x_from_zero=label != "Step",
                y_from_zero=False,
            )
            for facet in facets
            for label, x_of in axes.items()
            if (series := _loss_lines({e: curves[e] for e in facet.entries}, x_of))
        ),
        "Training loss by optimizer step, by tokens where there are any, and by time, in the first"
        " repeat: mean over the samples or tokens of all ranks. Long series are thinned to each"
        " stretch's extremes.",
        rows_read(len(counted)),
    )


def _loss_lines(
    curves: Mapping[Entry, LossCurve], x_of: Callable[[LossCurve], Sequence[float]]
) -> tuple[Series, ...]:
    return tuple(entry.line(x, c.by_step.y) for entry, c in curves.items() if (x := x_of(c)))


def staleness_figures(groups: Sequence[Group]) -> list[Figure]:
    """Share of gradients by their staleness, where servers counted any."""
    counts = {entry: count for entry in entries_in(groups) if (count := _staleness(entry))}
    largest = max((max(count) for count in counts.values()), default=0)
    width = ceil((largest + 1) / _MOST_BINS)
    bins = f", in bins of {width}" if width > 1 else ""
    return figure(
        "staleness",
        "Staleness of gradients",
        [
            Panel(
                title=facet.title,
                kind="line",
                x_label=f"Staleness (updates{bins})",
                y_label="Gradients (%)",
                y_unit="%",
                series=tuple(_binned(e, counts[e], width, largest) for e in facet.entries),
                x_whole=True,
            )
            for facet in facets_of(having(groups, counts.__contains__))
        ],
        "How many updates a server took between handing out parameters and using the gradient that"
        " was computed from them; all repeats and servers together.",
    )


def _binned(entry: Entry, counts: Counter[int], width: int, largest: int) -> Series:
    """Percent of the gradients in bins of so many updates, by each bin's first."""
    starts = range(0, largest + 1, width)
    binned = [sum(counts[at] for at in range(start, start + width)) for start in starts]
    return entry.line(starts, [100 * count / counts.total() for count in binned])


def _staleness(entry: Entry) -> Counter[int]:
    counts: Counter[int] = Counter()
    for trial in entry.row.ok_trials:
        for rank in trial.ranks:
            if rank.role == "server" and rank.exchange is not None:
                counts.update({int(key): n for key, n in rank.exchange.staleness.items()})
    return +counts
