"""Figures and page part of a published study: its values, dashed or grey, beside measured ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import isfinite
from typing import Any

from shardmark.base.cells import ranks_and_nodes
from shardmark.bench.analysis.compare.comparison import Comparison
from shardmark.bench.analysis.compare.rows import can_be_disturbed
from shardmark.bench.report.figures.chart import (
    Figure,
    Panel,
    Series,
    figure,
    readable,
    with_shared_axis,
)
from shardmark.bench.report.figures.drawing import REFERENCE
from shardmark.bench.report.figures.entries import (
    Entry,
    entries_in,
    epoch_estimates,
    estimates_series,
    groups_of,
    reliability,
)
from shardmark.bench.report.figures.over_time import BY_EPOCH
from shardmark.bench.report.page.page import PagePart
from shardmark.extras.studies.against import (
    RELATIVE_PEAK,
    RELATIVE_TIME,
    SPEEDUP,
    Against,
    ClaimPair,
    Pair,
    conditions_text,
    set_against,
)
from shardmark.extras.studies.against_view import against_tables, cells_of, name_of, range_text
from shardmark.extras.studies.study import Claim, Figures, load_study


def published_figures(against: Against) -> list[Figure]:
    """Return the study's curves by epoch, its other values as ratios, and its claims."""
    entries = entries_in(groups_of(against.rows))
    metrics = dict.fromkeys(name for figures in against.study.figures for name in figures.epochs)
    return [
        *(curves for metric in metrics for curves in _curves(against, entries, metric)),
        *([] if metrics else _values(against, entries)),
        *_claims(against, entries),
    ]


def _curves(against: Against, entries: list[Entry], metric: str) -> list[Figure]:
    """Draw a panel for each number of ranks, with the same axis of values."""
    title, unit, scale = BY_EPOCH.get(metric, (metric, "", 1))
    published = [figures for figures in against.study.figures if metric in figures.epochs]
    titles = [figures.title for figures in against.study.figures]
    names = dict.fromkeys((*titles, *(_named(against, entry) for entry in entries)))
    styles = {name: number for number, name in enumerate(names)}  # a title is a strategy's name
    sizes = sorted({f.world_size for f in published} | {e.row.world_size for e in entries})

    def dashed(figures: Figures) -> Series:
        values = figures.epochs[metric]
        return Series(
            name=f"{figures.title}, published",
            x=tuple(map(float, range(1, len(values) + 1))),
            y=tuple(scale * value for value in values),
            style=styles[figures.title],
            dashed=True,
        )

    def measured(entry: Entry) -> Series:
        points = [
            (float(epoch.number), estimate)
            for epoch in entry.epochs.epochs
            if (estimate := epoch.metrics.get(metric)) is not None and isfinite(estimate.value)
        ]
        epochs, estimates = zip(*points, strict=True) if points else ((), ())
        name = _named(against, entry)
        timed = metric == "epoch_seconds"
        series = estimates_series([entry], epochs, estimates, scale, timed=timed)
        return replace(series, name=name, style=styles[name])

    panels = [
        Panel(
            title=ranks_and_nodes(size, 1),
            kind="line",
            x_label="Epoch",
            y_label=f"{title} ({unit})" if unit else title,
            y_unit=unit,
            series=tuple(
                series
                for series in (
                    *(dashed(figures) for figures in published if figures.world_size == size),
                    *(measured(entry) for entry in entries if entry.row.world_size == size),
                )
                if series.y
            ),
            x_whole=True,
            y_from_zero=metric == "epoch_seconds",
        )
        for size in sizes
    ]
    return figure(
        f"published-{metric.replace('_', '-')}",
        f"{title}: {against.study.cited} and measured",
        with_shared_axis(readable(panel for panel in panels if panel.series)),
        f"Dashed without marks: published, on {against.study.hardware}.",
        f"Measured on {against.measured_on}.",
        reliability(entries, epoch_estimates(entries, metric)),
    )


def _values(against: Against, entries: list[Entry]) -> list[Figure]:
    """Draw bars of the ratios that compare between machines, a panel for each."""
    reference = against.study.reference
    titles = {
        RELATIVE_TIME: f"Time for the same samples over {reference}",
        RELATIVE_PEAK: f"Peak memory over {reference}",
        SPEEDUP: "Speed-up over the fewest ranks",
    }
    pairs = [pair for pair in against.pairs if pair.figures is not None]

    def bars(ratio: str, conditions: str) -> tuple[Series, ...]:
        series: dict[str, Series] = {}
        for pair in (pair for pair in pairs if pair.conditions == conditions):
            assert pair.figures is not None, "only published trainings have bars"
            place = pair.figures.label or f"{pair.title}, {pair.world_size} ranks"
            value, estimate = pair.published.get(ratio), pair.measured.get(ratio)
            entry = _entry_of(entries, pair)
            if value is not None:
                series[f"{place}, publ."] = _published_bar(f"{place}, publ.", value)
            if estimate is not None and entry is not None:
                unnamed = f"{pair.world_size} GPUs with {entry.name}"
                named = place if pair.figures.strategy else unnamed
                name = f"{named}, {_source(against, entry) or 'meas.'}"
                timed = ratio != RELATIVE_PEAK
                series[name] = estimates_series([entry], [name], [estimate], timed=timed)
        return tuple(series.values())

    return figure(
        "published-ratios",
        f"Ratios: {against.study.cited} and measured",
        with_shared_axis(
            _bar_panel(conditions, titles[name], bars(name, conditions))
            for conditions in dict.fromkeys(pair.conditions for pair in pairs)
            for name in against.ratios
        ),
        f"Grey: published, on {against.study.hardware}. Measured on {against.measured_on}.",
        _left_out(entries),
        reliability(entries),
    )


def _claims(against: Against, entries: list[Entry]) -> list[Figure]:
    """Draw the claimed ratios as grey bars with their ranges, and the measured intervals."""

    def bars(claim: Claim) -> tuple[Series, ...]:
        series: list[Series] = []
        for pair in against.claims:
            entry = _entry_of(entries, pair)
            if pair.claim != claim or entry is None or pair.measured is None:
                continue
            if not series:
                series.append(_claimed_bar(pair))
            conditions = conditions_text(entry.row, against.rows)
            details = "; ".join(filter(None, (conditions, _source(against, entry))))
            # A long name breaks at its last comma.
            place = cells_of(pair, ", over ") + (f" ({details})" if details else "")
            timed = can_be_disturbed(claim.metric)
            series.append(estimates_series([entry], [place], [pair.measured], timed=timed))
        return tuple(series)

    # Panels of one claim on other numbers of ranks have one axis.
    panels: dict[tuple[object, ...], list[Panel]] = {}
    for claim in against.study.claims:
        if claim.relation == "ratio" and not claim.cannot_mean:
            panel = _bar_panel(claim.says, f"Ratio: {name_of(claim.metric)}", bars(claim))
            panels.setdefault((claim.metric, claim.strategies, claim.over), []).append(panel)
    return figure(
        "claims",
        f"Claims of {against.study.cited}, as ratios",
        [panel for same in panels.values() for panel in with_shared_axis(same)],
        "Grey: the claimed ratio, or the end of the claimed range; its whisker is the range.",
        f"Measured on {against.measured_on}.",
        _left_out(entries),
        reliability(entries, [pair.measured for pair in against.claims if pair.measured]),
    )


def _left_out(entries: list[Entry]) -> str:
    disturbed = any(entry.row.disturbed for entry in entries)
    return "Ratios of times that other work disturbed are left out." if disturbed else ""


def _bar_panel(title: str, label: str, series: tuple[Series, ...]) -> Panel:
    return Panel(title=title, kind="bars", y_label=label, series=series)


def _published_bar(name: str, value: float, **ends: Any) -> Series:
    return Series(name=name, x=(name,), y=(value,), style=REFERENCE, **ends)


def _claimed_bar(pair: ClaimPair) -> Series:
    claim, name = pair.claim, f"claimed: {range_text(pair.claim)}"
    if claim.low is None or claim.high is None:
        end = next(end for end in (claim.value, claim.low, claim.high) if end is not None)
        return _published_bar(name, end)
    return _published_bar(name, claim.high, low=(claim.low,), high=(claim.high,))


def _entry_of(entries: list[Entry], pair: Pair | ClaimPair) -> Entry | None:
    return next((entry for entry in entries if entry.row is pair.row), None)


def _source(against: Against, entry: Entry) -> str:
    """Return the name of the entry's run, if there are several."""
    several = len(against.sources) > 1
    return against.sources[entry.row.experiment] if several else ""


def _named(against: Against, entry: Entry) -> str:
    return ", ".join(filter(None, (entry.name, _source(against, entry))))


def study_part(name: str, option: str) -> Callable[[Comparison], PagePart]:
    """Return a function that compares with the study.  Raises `InputError` for an unknown name."""
    study = load_study(name, option)

    def part(comparison: Comparison) -> PagePart:
        against = set_against(comparison, study)
        return PagePart(
            title=f"Against {study.cited}",
            figures=published_figures(against),
            tables=against_tables(against),
        )

    return part
