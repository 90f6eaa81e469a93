"""How each strategy gains from more ranks: speed-up and efficiency over its own fewest ranks."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass

from shardmark.analysis.compare.comparison import ratio_between
from shardmark.analysis.compare.rows import Row, plain
from shardmark.analysis.statistics.intervals import Estimate
from shardmark.config.axes import NODES

RATE = "samples_per_second"


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One number of ranks."""

    row: Row
    speedup: Estimate | None
    """Samples per second over those on the fewest ranks, repeat by repeat."""
    efficiency: Estimate | None
    """The speed-up over the growth in ranks; 1 is ideal.  Servers are no ranks here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """One strategy under fixed conditions, on growing numbers of ranks."""

    points: tuple[Point, ...]
    """By ranks; the first is what the others refer to."""

    @property
    def reference(self) -> Row:
        """On the fewest ranks that have a throughput."""
        return self.points[0].row

    @property
    def weak(self) -> bool:
        """Each rank keeps its batch; otherwise the ranks share one global batch."""
        return self.reference.weak_scaling

    @property
    def scales(self) -> bool:
        """Whether there is more than one number of ranks."""
        return len(self.points) > 1


def scalings_of(rows: Sequence[Row]) -> tuple[Scaling, ...]:
    """Every strategy's scaling, in the order of the rows; rows without a throughput are left out.

    Runs, workloads, precisions, options and varied keys are never mixed; nodes are, where each
    number of them has ranks of its own.
    """
    measured = [row for row in rows if row.values.get(RATE)]
    return tuple(
        _scaling(part)
        for group in _grouped(measured, {NODES})
        for part in ([group] if _is_one(group) else _grouped(group, set()))
    )


def _grouped(rows: Sequence[Row], without: Set[str]) -> list[list[Row]]:
    """By their conditions, those varied keys aside."""
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        varied = {key: value for key, value in row.varied.items() if key not in without}
        conditions = (row.experiment, row.workload, row.precision, row.label, plain(varied))
        groups.setdefault((*conditions, row.weak_scaling), []).append(row)
    return list(groups.values())


def _is_one(rows: Sequence[Row]) -> bool:
    """Whether more nodes only are how there come to be more ranks; else each number of nodes has
    its own scaling."""
    return len({row.world_size for row in rows}) == len(rows)


def _scaling(rows: Sequence[Row]) -> Scaling:
    ordered = sorted(rows, key=lambda row: row.world_size)
    return Scaling(points=tuple(_point(row, ordered[0]) for row in ordered))


def _point(row: Row, reference: Row) -> Point:
    if row is reference:
        one = Estimate(value=1.0, low=None, high=None, n=len(row.values[RATE]))
        return Point(row=row, speedup=one, efficiency=one)
    speedup = ratio_between(row, reference, RATE)
    growth = row.world_size / reference.world_size
    return Point(row=row, speedup=speedup, efficiency=scaled(speedup, 1 / growth))


def scaled(estimate: Estimate | None, factor: float) -> Estimate | None:
    """The estimate times an exact number."""
    if estimate is None:
        return None
    low, high = (None if end is None else end * factor for end in (estimate.low, estimate.high))
    return Estimate(value=estimate.value * factor, low=low, high=high, n=estimate.n)
