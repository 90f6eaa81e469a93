"""Speed-up and efficiency over the numbers of ranks."""

from __future__ import annotations

from collections.abc import Sequence

from shardmark.analysis.compare.comparison import Comparison
from shardmark.analysis.compare.rows import Row
from shardmark.analysis.compare.scaling import Point, Scaling, scalings_of
from shardmark.report.table.columns import for_items, metric, metric_column, row_columns
from shardmark.report.table.gaps import left_out
from shardmark.report.table.table import Table, table_of

_TITLES = {
    False: "Strong scaling: the ranks share one global batch",
    True: "Weak scaling: every rank keeps its batch, so more ranks do more in a step",
}


def scaling_tables(comparison: Comparison) -> list[Table]:
    """Strong scaling, then weak."""
    scalings = scalings_of(comparison.rows)
    tables = [
        _table(comparison, part, weak=weak)
        for weak in (False, True)
        if (part := [scaling for scaling in scalings if scaling.weak is weak])
    ]
    notes = ["No trial has a throughput.", *left_out(comparison.rows)]
    return tables or [table_of("Scaling", (), (), notes)]


def _table(comparison: Comparison, scalings: Sequence[Scaling], *, weak: bool) -> Table:
    points = [point for scaling in scalings for point in scaling.points]
    speedup = metric_column("speedup", key="speedup_over_fewest")
    efficiency = metric_column("scaling_efficiency", key="efficiency_over_fewest")
    fewest = metric_column("fewest_ranks", title="from", unit="ranks", estimated=False)
    failed = [row for row in comparison.rows if row.weak_scaling is weak]
    return table_of(
        _TITLES[weak],
        points,
        [
            *for_items(row_columns([point.row for point in points]), _row_of),
            *for_items([metric("samples_per_second")], _row_of),
            (fewest, lambda point: point.reference.world_size),
            (speedup, lambda point: point.speedup),
            (efficiency, lambda point: point.efficiency),
            *for_items(
                [metric("epoch_seconds", interval="±"), metric("peak_memory_bytes")],
                _row_of,
            ),
        ],
        [*_notes(scalings), *left_out(failed)],
    )


def _row_of(point: Point) -> Row:
    return point.row


def _notes(scalings: Sequence[Scaling]) -> list[str]:
    points = [point for scaling in scalings for point in scaling.points]
    notes = [
        *_growth([point for scaling in scalings for point in scaling.later]),
        "Speed-up: samples/s over those on the fewest ranks (from), where `single` stands in for"
        " a strategy that needs more. Efficiency (eff.): speed-up over growth in ranks.",
    ]
    alone = [scaling.reference.place for scaling in scalings if not scaling.later]
    if alone:
        notes.append(f"On one number of ranks only: {'; '.join(alone)}.")
    if any(point.row.servers for point in points):
        notes.append("Parameter servers stand behind the + and are not counted as ranks.")
    repeats = max(len(point.row.ok_trials) for point in points)
    interval = "± and brackets: 95 % interval, over the repeats that both numbers of ranks have."
    return [*notes, interval if repeats > 1 else "One repeat: no interval."]


def _growth(points: Sequence[Point]) -> list[str]:
    """Where more ranks are shown to be slower, and where nothing is shown."""
    sure = [(point.row.place, point.speedup) for point in points if point.speedup is not None]
    slower = [place for place, gain in sure if gain.high is not None and gain.high < 1]
    unclear = [
        place
        for place, gain in sure
        if gain.too_noisy
        or (gain.low is not None and gain.high is not None and gain.low <= 1 <= gain.high)
    ]
    return [
        *([f"More ranks are slower: {'; '.join(slower)}."] if slower else []),
        *([f"No difference shown to the fewest ranks: {'; '.join(unclear)}."] if unclear else []),
    ]
