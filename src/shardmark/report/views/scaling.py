"""Speed-up and efficiency over the numbers of ranks, as tables and for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shardmark.analysis.compare.comparison import Comparison
from shardmark.analysis.compare.rows import Row
from shardmark.analysis.compare.scaling import Point, Scaling, scalings_of
from shardmark.analysis.statistics.intervals import Estimate
from shardmark.report.table.data import estimate_columns, estimate_of, flat, format_csv, identity_of
from shardmark.report.table.quantities import Quantity, quantity
from shardmark.report.table.sections import Section, View
from shardmark.report.table.tables import Column, Table, number, row_names
from shardmark.report.views.epochs import left_out

_RATE = Quantity("samples/s")
_SPEEDUP = Quantity("speed-up", decimals=2)
_EFFICIENCY = Quantity("eff.\n%", scale=100, decimals=0)
_EPOCH = Quantity("epoch\ns")
_PEAK = Quantity("peak\nMiB", scale=quantity("peak_memory_bytes").scale)
_METRICS = ("samples_per_second", "epoch_seconds", "peak_memory_bytes")
_OVER_FEWEST = ("speedup_over_fewest", "efficiency_over_fewest")


def scaling_view(comparison: Comparison) -> View:
    return View(
        key="scaling",
        sections=lambda: scaling_sections(comparison),
        data=lambda: scaling_json(comparison),
        csv=lambda: scaling_csv(comparison),
    )


def scaling_sections(comparison: Comparison) -> tuple[Section, ...]:
    """Strong scaling, then weak; a table that only explains itself where nothing was measured."""
    found = scalings_of(comparison.rows)
    parts = [
        (title, [one for one in found if one.weak is weak])
        for title, weak in (
            ("Strong scaling: the ranks share one global batch", False),
            ("Weak scaling: every rank keeps its batch, so more ranks do more in a step", True),
        )
    ]
    sections = [_section(title, part, comparison) for title, part in parts if part]
    if sections:
        return tuple(sections)
    notes = ("No trial has a throughput.", *left_out(comparison.rows))
    return (Section(title="Scaling", table=Table(columns=(), notes=notes)),)


def _section(title: str, scalings: Sequence[Scaling], comparison: Comparison) -> Section:
    points = [point for one in scalings for point in one.points]
    rows = [point.row for point in points]
    columns = (
        *row_names(rows),
        _column(_RATE, [row.metrics.get("samples_per_second") for row in rows]),
        _column(_SPEEDUP, [_plain(point.speedup) for point in points]),
        Column(title="95 %\ninterval", cells=tuple(_interval(one.speedup) for one in points)),
        _column(_EFFICIENCY, [_plain(point.efficiency) for point in points]),
        _column(_EPOCH, [row.metrics.get("epoch_seconds") for row in rows]),
        _column(_PEAK, [_plain(row.metrics.get("peak_memory_bytes")) for row in rows]),
    )
    weak = scalings[0].weak
    failed = left_out([row for row in comparison.rows if row.weak_scaling is weak])
    shown = tuple(column for column in columns if any(column.cells))
    return Section(title=title, table=Table(columns=shown, notes=(*_notes(scalings), *failed)))


def _column(shown_as: Quantity, found: Sequence[Estimate | None]) -> Column:
    return Column(title=shown_as.title, cells=tuple(shown_as.show(one) for one in found))


def _plain(estimate: Estimate | None) -> Estimate | None:
    """Without its interval."""
    return None if estimate is None else replace(estimate, low=None, high=None)


def _interval(estimate: Estimate | None) -> str:
    """A ratio's is longer above than below, so that one number would not do."""
    if estimate is None or estimate.low is None or estimate.high is None:
        return ""
    return f"{number(estimate.low, decimals=2)} to {number(estimate.high, decimals=2)}"


def _notes(scalings: Sequence[Scaling]) -> list[str]:
    points = [point for one in scalings for point in one.points]
    notes = [
        "Speed-up: samples/s over those of the same strategy on its fewest ranks. Efficiency"
        " (eff.): the speed-up over the growth in ranks; 100 % is ideal. Peak: the fullest rank's.",
        *_growth(scalings),
    ]
    alone = [one.reference.place for one in scalings if not one.scales]
    if alone:
        notes.append(f"On one number of ranks only, so without a speed-up: {'; '.join(alone)}.")
    if any(any(rank.role == "server" for rank in t.ranks) for p in points for t in p.row.trials):
        notes.append("Parameter servers stand behind the + and are not counted as ranks.")
    if max(len(point.row.ok_trials) for point in points) > 1:
        notes.append(
            "± and interval: 95 %, over the repeats. The speed-up is of those that both numbers of"
            " ranks have, pair by pair, so that it is not exactly the ratio of the means."
        )
    else:
        notes.append("One repeat: no interval.")
    return notes


def _growth(scalings: Sequence[Scaling]) -> list[str]:
    """Where more ranks are shown to be slower, and where nothing is shown."""
    later = [point for one in scalings for point in one.points[1:]]
    sure = [(point, point.speedup) for point in later if point.speedup is not None]
    slower = [_against(p) for p, s in sure if s.high is not None and s.high < 1]
    unclear = [
        _against(p)
        for p, s in sure
        if s.too_noisy or (s.low is not None and s.high is not None and s.low <= 1 <= s.high)
    ]
    return [
        *([f"More ranks are slower: {'; '.join(slower)}."] if slower else []),
        *([f"No difference shown to the fewest ranks: {'; '.join(unclear)}."] if unclear else []),
    ]


def _against(point: Point) -> str:
    return point.row.place


def scaling_json(comparison: Comparison) -> list[dict[str, object]]:
    """One mapping for each strategy and number of ranks."""
    return [
        identity_of(point.row)
        | {
            "fewest_ranks": one.reference.world_size,
            **{name: _or_none(point.row.metrics.get(name), name) for name in _METRICS},
            **{
                name: _or_none(found, "speedup")
                for name, found in zip(_OVER_FEWEST, (point.speedup, point.efficiency), strict=True)
            },
        }
        for one in scalings_of(comparison.rows)
        for point in one.points
    ]


def _or_none(estimate: Estimate | None, name: str) -> dict[str, object] | None:
    return None if estimate is None else estimate_of(estimate, name)


def scaling_csv(comparison: Comparison) -> str:
    """One line for each strategy and number of ranks; each metric is three columns."""
    found = scalings_of(comparison.rows)
    rows: list[Row] = [point.row for one in found for point in one.points]
    keys = dict.fromkeys(key for row in rows for key in identity_of(row))
    names = (*_METRICS, *_OVER_FEWEST)
    lines = []
    for one in found:
        for point in one.points:
            metrics = {name: point.row.metrics.get(name) for name in _METRICS}
            ratios = zip(_OVER_FEWEST, (point.speedup, point.efficiency), strict=True)
            line = identity_of(point.row) | {"fewest_ranks": one.reference.world_size}
            for name, estimate in (metrics | dict(ratios)).items():
                line |= dict(flat(name, estimate))
            lines.append(line)
    columns = [column for name in names for column in estimate_columns(name)]
    return format_csv(lines, [*keys, "fewest_ranks", *columns])
