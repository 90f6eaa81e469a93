"""Speed-up and efficiency of each strategy over its numbers of ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import NamedTuple

from shardmark.base.cells import NODES
from shardmark.base.statistics.intervals import Estimate
from shardmark.bench.analysis.compare.comparison import ratio_between, single_baseline
from shardmark.bench.analysis.compare.rows import Row, gathered, plain
from shardmark.bench.analysis.compare.verdicts import METRIC


class ScalingPoint(NamedTuple):
    """A strategy on one number of ranks under fixed conditions."""

    row: Row
    reference: Row
    """The strategy on its fewest ranks, or `single` if that has fewer ranks."""
    speedup: Estimate | None
    """Ratio of samples per second to the reference's, repeat by repeat."""
    efficiency: Estimate | None
    """The speed-up divided by the growth in devices; 1 is ideal.  Servers do not count."""


def scaling_points(rows: Sequence[Row]) -> list[ScalingPoint]:
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


def ranks_vary(points: Iterable[ScalingPoint]) -> bool:
    """True if a strategy has several numbers of ranks, all else being the same."""
    sizes: dict[tuple[int, str], set[int]] = {}
    for point in points:
        sizes.setdefault((id(point.reference), point.row.label), set()).add(point.row.devices)
    return any(len(several) > 1 for several in sizes.values())


def _grouped(rows: Sequence[Row], without: str = "") -> list[list[Row]]:
    """Group the rows by their conditions, except for the varied key `without`."""

    def conditions(row: Row) -> tuple[object, ...]:
        varied = plain({key: value for key, value in row.varied.items() if key != without})
        return row.experiment, row.workload, row.precision, row.label, varied, row.weak_scaling

    return [*gathered((conditions(row), row) for row in rows).values()]


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
