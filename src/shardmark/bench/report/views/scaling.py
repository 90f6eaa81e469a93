"""Tables of speed-up and efficiency over the number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

from shardmark.base.table.table import Table, for_items, metric, metric_column
from shardmark.bench.analysis.compare.comparison import Comparison
from shardmark.bench.analysis.compare.rows import main_rate
from shardmark.bench.analysis.compare.scaling import ScalingPoint, scaling_points
from shardmark.bench.report.table.comparison import EFFICIENCY, SPEEDUP
from shardmark.bench.report.table.notes import left_out
from shardmark.bench.report.table.row_columns import table_by_row

_TITLES = {
    False: "Strong scaling: the ranks share one global batch",
    True: "Weak scaling: every rank keeps its batch, so more ranks do more in a step",
}


def scaling_tables(comparison: Comparison) -> list[Table]:
    """Return the tables of strong and weak scaling."""
    points = scaling_points(comparison.rows)
    tables = [
        _table(comparison, part, weak=weak)
        for weak in (False, True)
        if (part := [point for point in points if point.row.weak_scaling is weak])
    ]
    notes = ("No trial has a throughput.", *left_out(comparison.rows))
    return tables or [Table(title="Scaling", notes=notes)]


def _table(comparison: Comparison, points: Sequence[ScalingPoint], *, weak: bool) -> Table:
    fewest = metric_column("fewest_ranks", title="from", unit="ranks", estimated=False)
    other_columns = [metric("epoch_seconds", interval="±"), metric("peak_memory_bytes")]
    return table_by_row(
        _TITLES[weak],
        [(point.row, point) for point in points],
        [
            *for_items([metric(main_rate([point.row for point in points]))], attrgetter("row")),
            (fewest, lambda point: point.reference.world_size),
            (SPEEDUP, attrgetter("speedup")),
            (EFFICIENCY, attrgetter("efficiency")),
            *for_items(other_columns, attrgetter("row")),
        ],
        [*_notes(points), *left_out([r for r in comparison.rows if r.weak_scaling is weak])],
    )


def _notes(points: Sequence[ScalingPoint]) -> list[str]:
    """Return notes: rows that more ranks slow down, undecided rows, and the columns' meaning."""
    slower, unclear = [], []
    for point in points:
        gain = point.speedup
        if point.row is point.reference or gain is None:
            continue
        if gain.too_noisy or (gain.low is not None and gain.low <= 1 <= (gain.high or 1)):
            unclear.append(point.row.place)
        elif gain.high is not None and gain.high < 1:
            slower.append(point.row.place)
    notes = [f"More ranks are slower: {'; '.join(slower)}."] if slower else []
    if unclear:
        notes.append(f"No difference shown to the fewest ranks: {'; '.join(unclear)}.")
    other = any(point.reference.strategy != point.row.strategy for point in points)
    notes.append(
        "Speed-up: throughput divided by that on the fewest ranks (from)"
        f"{', or by that of `single` if the strategy needs more' * other}."
        " Efficiency (eff.): speed-up divided by growth in ranks."
    )
    repeats = max(len(point.row.ok_trials) for point in points)
    interval = "± and brackets: 95 % interval, over the repeats that both numbers of ranks have."
    return [*notes, interval if repeats > 1 else "One repeat: no interval."]
