"""How each strategy gains from more ranks: speed-up and efficiency over the fewest that exist."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass

from shardmark.analysis.compare.comparison import ratio_between, single_baseline
from shardmark.analysis.compare.rows import Row, plain
from shardmark.analysis.statistics.intervals import Estimate
from shardmark.analysis.statistics.verdicts import METRIC
from shardmark.config.axes import NODES


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One number of ranks."""

    row: Row
    reference: Row
    speedup: Estimate | None
    """Samples per second over the reference's, repeat by repeat."""
    efficiency: Estimate | None
    """The speed-up over the growth in devices; 1 is ideal.  Servers are no devices here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """One strategy under fixed conditions, on growing numbers of ranks."""

    points: tuple[Point, ...]
    """By ranks."""

    @property
    def reference(self) -> Row:
        """The strategy itself on the fewest ranks, or `single` where that is on fewer."""
        return self.points[0].reference

    @property
    def weak(self) -> bool:
        """Each rank keeps its batch; otherwise the ranks share one global batch."""
        return self.reference.weak_scaling

    @property
    def later(self) -> tuple[Point, ...]:
        """Points on more ranks than the reference."""
        return tuple(point for point in self.points if point.row is not self.reference)


def scalings_of(rows: Sequence[Row]) -> tuple[Scaling, ...]:
    """Every strategy's scaling, in the order of the rows; rows without a throughput are left out.

    Runs, workloads, precisions, options and varied keys are never mixed; nodes are, where each
    number of them has ranks of its own.
    """
    measured = [row for row in rows if row.values.get(METRIC)]
    return tuple(
        _scaling(part, measured)
        for group in _grouped(measured, {NODES})
        for part in ([group] if _one_row_a_size(group) else _grouped(group, set()))
    )


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


def _scaling(group: Sequence[Row], measured: Sequence[Row]) -> Scaling:
    ordered = sorted(group, key=lambda row: row.devices)
    single = single_baseline(ordered[0], measured)
    starts_later = single is not None and single.devices < ordered[0].devices
    reference = single if single is not None and starts_later else ordered[0]
    return Scaling(points=tuple(_point(row, reference) for row in ordered))


def _point(row: Row, reference: Row) -> Point:
    if row is reference:
        unity = Estimate(value=1.0, low=None, high=None, n=len(row.values[METRIC]))
        return Point(row=row, reference=reference, speedup=unity, efficiency=unity)
    return Point(
        row=row,
        reference=reference,
        speedup=ratio_between(row, reference, METRIC),
        efficiency=ratio_between(row, reference, METRIC, per_device=True),
    )
