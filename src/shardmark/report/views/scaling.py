"""Speed-up and efficiency over the numbers of ranks, from the fewest that exist."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from operator import attrgetter

from shardmark.analysis.compare.comparison import Comparison, ratio_between, single_baseline
from shardmark.analysis.compare.rows import Row, plain
from shardmark.analysis.statistics.intervals import Estimate
from shardmark.analysis.statistics.verdicts import METRIC
from shardmark.config.axes import NODES
from shardmark.report.table.columns import for_items, metric, metric_column, row_columns
from shardmark.report.table.gaps import left_out
from shardmark.report.table.table import Table, table_of

_TITLES = {
    False: "Strong scaling: the ranks share one global batch",
    True: "Weak scaling: every rank keeps its batch, so more ranks do more in a step",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One number of ranks of one strategy under fixed conditions."""

    row: Row
    reference: Row
    """The strategy itself on the fewest ranks, or `single` where that is on fewer."""
    speedup: Estimate | None
    """Samples per second over the reference's, repeat by repeat."""
    efficiency: Estimate | None
    """The speed-up over the growth in devices; 1 is ideal.  Servers are no devices here."""
    alone: bool
    """No other number of ranks was measured."""


def scaling_tables(comparison: Comparison) -> list[Table]:
    """Strong scaling, then weak."""
    points = _points(comparison.rows)
    tables = [
        _table(comparison, part, weak=weak)
        for weak in (False, True)
        if (part := [point for point in points if point.row.weak_scaling is weak])
    ]
    notes = ["No trial has a throughput.", *left_out(comparison.rows)]
    return tables or [table_of("Scaling", (), (), notes)]


def _points(rows: Sequence[Row]) -> list[Point]:
    """In the order of the rows; rows without a throughput are left out.

    Runs, workloads, precisions, options and varied keys are never mixed; nodes are, where each
    number of them has ranks of its own.
    """
    measured = [row for row in rows if row.values.get(METRIC)]
    return [
        point
        for group in _grouped(measured, {NODES})
        for part in ([group] if _one_row_a_size(group) else _grouped(group, set()))
        for point in _scaling(part, measured)
    ]


def _grouped(rows: Sequence[Row], without: Set[str]) -> list[list[Row]]:
    """By their conditions, those varied keys aside."""
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        varied = {key: value for key, value in row.varied.items() if key not in without}
        conditions = (row.experiment, row.workload, row.precision, row.label, plain(varied))
        groups.setdefault((*conditions, row.weak_scaling), []).append(row)
    return list(groups.values())


def _one_row_a_size(rows: Sequence[Row]) -> bool:
    """Whether more nodes only are how there come to be more ranks."""
    return len({row.world_size for row in rows}) == len(rows)


def _scaling(group: Sequence[Row], measured: Sequence[Row]) -> list[Point]:
    ordered = sorted(group, key=lambda row: row.devices)
    single = single_baseline(ordered[0], measured)
    starts_later = single is not None and single.devices < ordered[0].devices
    reference = single if single is not None and starts_later else ordered[0]
    unity = Estimate(value=1.0, low=None, high=None, n=len(reference.values[METRIC]))

    def over_reference(row: Row, *, per_device: bool) -> Estimate | None:
        if row is reference:
            return unity
        return ratio_between(row, reference, METRIC, per_device=per_device)

    return [
        Point(
            row=row,
            reference=reference,
            speedup=over_reference(row, per_device=False),
            efficiency=over_reference(row, per_device=True),
            alone=ordered == [reference],
        )
        for row in ordered
    ]


def _table(comparison: Comparison, points: Sequence[Point], *, weak: bool) -> Table:
    fewest = metric_column("fewest_ranks", title="from", unit="ranks", estimated=False)
    failed = [row for row in comparison.rows if row.weak_scaling is weak]
    own = [metric("epoch_seconds", interval="±"), metric("peak_memory_bytes")]
    return table_of(
        _TITLES[weak],
        points,
        [
            *for_items(row_columns([point.row for point in points]), attrgetter("row")),
            *for_items([metric("samples_per_second")], attrgetter("row")),
            (fewest, lambda point: point.reference.world_size),
            (metric_column("speedup", key="speedup_over_fewest"), lambda point: point.speedup),
            (
                metric_column("scaling_efficiency", key="efficiency_over_fewest"),
                lambda point: point.efficiency,
            ),
            *for_items(own, attrgetter("row")),
        ],
        [*_notes(points), *left_out(failed)],
    )


def _notes(points: Sequence[Point]) -> list[str]:
    notes = [
        *_growth([point for point in points if point.row is not point.reference]),
        "Speed-up: samples/s over those on the fewest ranks (from), where `single` stands in for"
        " a strategy that needs more. Efficiency (eff.): speed-up over growth in ranks.",
    ]
    alone = [point.row.place for point in points if point.alone]
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
