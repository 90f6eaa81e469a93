"""Tables of speed-up and efficiency over the number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

from shardmark.base.cells import NODES
from shardmark.base.statistics.intervals import Estimate
from shardmark.base.table.table import Table, for_items, metric, metric_column
from shardmark.bench.analysis.compare.comparison import Comparison, ratio_between, single_baseline
from shardmark.bench.analysis.compare.rows import Row, main_rate, plain
from shardmark.bench.analysis.compare.verdicts import METRIC
from shardmark.bench.report.table.notes import left_out
from shardmark.bench.report.table.row_columns import table_by_row

_TITLES = {
    False: "Strong scaling: the ranks share one global batch",
    True: "Weak scaling: every rank keeps its batch, so more ranks do more in a step",
}


class ScalingPoint(NamedTuple):
    """A strategy on one number of ranks under fixed conditions."""

    row: Row
    reference: Row
    """The strategy on its fewest ranks, or `single` if that has fewer ranks."""
    speedup: Estimate | None
    """Ratio of samples per second to the reference's, repeat by repeat."""
    efficiency: Estimate | None
    """The speed-up divided by the growth in devices; 1 is ideal.  Servers do not count."""


def scaling_tables(comparison: Comparison) -> list[Table]:
    """Return the tables of strong and weak scaling."""
    points = _points(comparison.rows)
    tables = [
        _table(comparison, part, weak=weak)
        for weak in (False, True)
        if (part := [point for point in points if point.row.weak_scaling is weak])
    ]
    notes = ("No trial has a throughput.", *left_out(comparison.rows))
    return tables or [Table(title="Scaling", notes=notes)]


def _points(rows: Sequence[Row]) -> list[ScalingPoint]:
    """Return the points in the order of the rows, without rows that have no throughput.

    A group never mixes runs, workloads, precisions, options or varied keys.  It mixes numbers of
    nodes if each number of ranks has one row.
    """
    measured = [row for row in rows if row.values.get(METRIC)]
    points: list[ScalingPoint] = []
    for group in _grouped(measured, NODES):
        several_rows_a_size = len({row.world_size for row in group}) < len(group)
        for part in _grouped(group) if several_rows_a_size else [group]:
            points += _scaling(part, measured)
    return points


def _grouped(rows: Sequence[Row], without: str = "") -> list[list[Row]]:
    """Group the rows by their conditions, except for the varied key `without`."""
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        varied = plain({key: value for key, value in row.varied.items() if key != without})
        conditions = (row.experiment, row.workload, row.precision, row.label, varied)
        groups.setdefault((*conditions, row.weak_scaling), []).append(row)
    return list(groups.values())


def _scaling(group: Sequence[Row], measured: Sequence[Row]) -> list[ScalingPoint]:
    ordered = sorted(group, key=attrgetter("devices"))
    single = single_baseline(ordered[0], measured)
    starts_later = single is not None and single.devices < ordered[0].devices
    reference = single if single is not None and starts_later else ordered[0]
    unity = Estimate(value=1.0, low=None, high=None, n=len(reference.values[METRIC]))

    def over_reference(row: Row, *, per_device: bool) -> Estimate | None:
        if row is reference:
            return unity
        return ratio_between(row, reference, METRIC, per_device=per_device)

    return [
        ScalingPoint(
            row,
            reference,
            *(over_reference(row, per_device=by_device) for by_device in (False, True)),
        )
        for row in ordered
    ]


def _table(comparison: Comparison, points: Sequence[ScalingPoint], *, weak: bool) -> Table:
    fewest = metric_column("fewest_ranks", title="from", unit="ranks", estimated=False)
    efficiency = metric_column("scaling_efficiency", key="efficiency_over_fewest")
    other_columns = [metric("epoch_seconds", interval="±"), metric("peak_memory_bytes")]
    return table_by_row(
        _TITLES[weak],
        [(point.row, point) for point in points],
        [
            *for_items([metric(main_rate([point.row for point in points]))], attrgetter("row")),
            (fewest, lambda point: point.reference.world_size),
            (metric_column("speedup", key="speedup_over_fewest"), attrgetter("speedup")),
            (efficiency, attrgetter("efficiency")),
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
    notes.append(
        "Speed-up: throughput divided by that on the fewest ranks (from), or by that of `single` if"
        " the strategy needs more. Efficiency (eff.): speed-up divided by growth in ranks."
    )
    repeats = max(len(point.row.ok_trials) for point in points)
    interval = "± and brackets: 95 % interval, over the repeats that both numbers of ranks have."
    return [*notes, interval if repeats > 1 else "One repeat: no interval."]
