"""Loss, quality and seconds of every epoch, against epochs and against time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import isfinite

from shardmark.analysis.compare.epochs import Epoch
from shardmark.report.figures.entry_series import estimates_series, having, readable
from shardmark.report.figures.figure import Figure, Panel, Series
from shardmark.report.figures.grouping import Entry, Group, in_parts
from shardmark.report.figures.sentences import entries_in, intervals, joined, references
from shardmark.report.figures.step_loss import step_loss_figures


@dataclass(frozen=True, slots=True, kw_only=True)
class _Quantity:
    """A metric of every epoch."""

    metric: str
    name: str
    title: str
    label: str
    unit: str = ""
    scale: float = 1.0
    from_zero: bool = False


_TRAIN_LOSS = _Quantity(
    metric="train_loss", name="training-loss", title="Training loss", label="Training loss"
)
_VALIDATION_LOSS = _Quantity(
    metric="validation_loss",
    name="validation-loss",
    title="Validation loss",
    label="Validation loss",
)
_QUALITIES = (
    _Quantity(
        metric="accuracy_top1",
        name="accuracy",
        title="Accuracy",
        label="Top-1 accuracy (%)",
        unit="%",
        scale=100,
    ),
    _Quantity(metric="map", name="map", title="Average precision", label="mAP of boxes"),
    _Quantity(metric="mask_map", name="mask-map", title="Precision of masks", label="mAP of masks"),
    _Quantity(metric="perplexity", name="perplexity", title="Perplexity", label="Perplexity"),
)
_SECONDS = _Quantity(
    metric="epoch_seconds",
    name="epoch-seconds",
    title="Seconds per epoch",
    label="Time of an epoch (s)",
    unit="s",
    from_zero=True,
)


def learning_figures(groups: Sequence[Group]) -> list[Figure]:
    """Loss by step where the recipe counts no epochs; made-up data have no quality."""
    real = [
        replace(group, entries=tuple(one for one in group.entries if not one.row.synthetic))
        for group in groups
    ]
    figures = _by_epoch_and_time(groups, _TRAIN_LOSS)
    figures += step_loss_figures(groups)
    figures += _by_epoch_and_time(real, _VALIDATION_LOSS)
    for quality in _QUALITIES:
        figures += _by_epoch_and_time(real, quality)
    return figures


def epoch_seconds_figures(groups: Sequence[Group]) -> list[Figure]:
    """Time of every epoch, where there is more than one, or how long a complete one takes."""
    facets = having(groups, lambda entry: bool(_series(entry, _SECONDS, _number)))
    figures = []
    for part in in_parts(facets):
        entries = entries_in(part.groups)
        warmup = any(entry.epochs.warmup_steps for entry in entries)
        caption = joined(
            "Training alone, on the slowest rank; evaluations are not in it.",
            "The first epoch includes the warm-up steps." if warmup else "",
            intervals(entries),
            references(part.groups),
        )
        panels = [_panel(facet, _SECONDS, "Epoch", _number) for facet in part.groups]
        figures.append(
            Figure(
                name=f"{_SECONDS.name}{part.ending}",
                title=_SECONDS.title,
                caption=joined(caption, part.note),
                panels=readable([panel for panel in panels if panel is not None]),
                columns=min(3, len(part.groups)),
                shared_y=part.one_condition,
            )
        )
    return figures


def _by_epoch_and_time(groups: Sequence[Group], quantity: _Quantity) -> list[Figure]:
    figures = []
    facets = having(groups, lambda entry: bool(_series(entry, quantity, _number)))
    for part in in_parts(facets):
        panels = [
            panel
            for facet in part.groups
            for panel in (
                _panel(facet, quantity, "Epoch", _number),
                _panel(facet, quantity, "Training time (s)", _elapsed),
            )
            if panel is not None
        ]
        entries = entries_in(part.groups)
        caption = joined(
            f"{quantity.title} by epoch and by training time, counted from the first step;"
            " evaluations are not in the time.",
            intervals(entries),
            references(part.groups),
        )
        figures.append(
            Figure(
                name=f"{quantity.name}{part.ending}",
                title=quantity.title,
                caption=joined(caption, part.note),
                panels=readable(panels),
                columns=2,
                shared_y=part.one_condition,
            )
        )
    return figures


def _panel(
    facet: Group, quantity: _Quantity, x_label: str, x_of: Callable[[Epoch], float | None]
) -> Panel | None:
    series = [_series(entry, quantity, x_of) for entry in facet.entries]
    drawn = tuple(one for one in series if one is not None)
    if not drawn:
        return None
    by_epoch = x_of is _number
    most = max((int(x) for one in drawn for x in one.x), default=0) if by_epoch else 0
    return Panel(
        title=facet.title,
        kind="line",
        x_label=x_label,
        y_label=quantity.label,
        series=drawn,
        x_unit="" if by_epoch else "s",
        y_unit=quantity.unit,
        x_ticks=tuple(range(1, most + 1)) if most <= 10 else (),
        x_from_zero=not by_epoch,
        y_from_zero=quantity.from_zero,
    )


def _series(
    entry: Entry, quantity: _Quantity, x_of: Callable[[Epoch], float | None]
) -> Series | None:
    found = [
        (x, estimate)
        for epoch in entry.epochs.epochs
        if (x := x_of(epoch)) is not None
        and (estimate := epoch.metrics.get(quantity.metric)) is not None
        and isfinite(estimate.value)
    ]
    if not found:
        return None
    return estimates_series(
        entry, [x for x, _ in found], [estimate for _, estimate in found], quantity.scale
    )


def _number(epoch: Epoch) -> float | None:
    return float(epoch.number)


def _elapsed(epoch: Epoch) -> float | None:
    found = epoch.metrics.get("elapsed_seconds")
    return None if found is None else found.value
