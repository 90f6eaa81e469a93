"""Finds the range of an axis in which each strategy is best, and where two strategies cross."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from shardmark.base.statistics.intervals import log_ratios, t_quantile, trimmed_mean
from shardmark.bench.analysis.advise.groups import groups_of
from shardmark.bench.analysis.advise.selection import select, times_better
from shardmark.bench.analysis.compare.rows import Row, plain
from shardmark.bench.analysis.compare.verdicts import METRIC, common_repeats

PARAMETERS = "parameters"
RANKS = "world_size"
COMPARED = (METRIC, "peak_memory_bytes")
"""Metrics by which strategies are compared: throughput and memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """The value of an axis at which two strategies are equal, with its 95 % interval."""

    value: float
    low: float | None
    """None if the interval extends below the measured value before the crossing."""
    high: float | None
    """None if the interval extends above the measured value after the crossing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BestRange:
    """Consecutive values of an axis at which a strategy is best, or all if it is nowhere best."""

    strategy: str
    """The strategy with its options."""
    best_at: tuple[float, ...]
    """Measured values of the axis; empty if another strategy is better at all of them."""
    begins: Crossing | None
    """Crossing with the previous best strategy; None at the first value, or without a value of
    both strategies on both sides."""
    ahead: tuple[float, float] | None
    """Smallest and largest ratio to the next best strategy; below 1 if it is nowhere best.  None
    if no other strategy has a value."""
    rival: str | None
    """The next best strategy where the ratio is smallest; for one that is nowhere best, the best
    strategy where it is closest."""
    shown: bool
    """True if the strategy is significantly better than all others at each of the values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeLine:
    """The best strategy along an axis, under the same other conditions."""

    axis: str
    metric: str
    conditions: Mapping[str, str]
    """Values of the other axes that vary."""
    ranges: tuple[BestRange, ...]
    """In the order of the axis; then strategies that are nowhere best."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisLine(RangeLine):
    """Measured rows that differ in strategy and in one axis only."""

    rows: Mapping[str, Mapping[float, Row]]
    """Rows by strategy and value of the axis."""

    @property
    def values(self) -> list[float]:
        return sorted({value for by_value in self.rows.values() for value in by_value})


class Labelled(Protocol):
    """A row of a strategy."""

    @property
    def label(self) -> str:
        """Return the strategy with its options."""


Competitor = TypeVar("Competitor", bound=Labelled)


class Comparer(Protocol[Competitor]):
    """Compares strategies, at one value of an axis or between two."""

    def select(
        self, rows: Sequence[Competitor], previous: str | None
    ) -> tuple[Competitor, bool] | None:
        """Return the best row and whether that is shown; `previous` was best at the value before.

        None if nothing can be said.
        """

    def times_better(self, row: Competitor, other: Competitor) -> float | None:
        """Return how many times better the first row is."""

    def crossing(
        self,
        before: Mapping[float, Competitor],
        after: Mapping[float, Competitor],
        between: tuple[float, float],
    ) -> Crossing | None:
        """Return where two strategies, which have both values, are equal; None if nowhere."""


def axis_lines(rows: Sequence[Row]) -> list[AxisLine]:
    """Return a line for each axis, each combination of the other axes, and each metric.

    Only rows that may win are in a line: of an equivalent training with a finite loss.
    """
    candidates = [row for group in groups_of(rows) for row in group.candidates]
    lines = []
    for axis in _axes(candidates):
        contexts: dict[tuple[tuple[str, str], ...], dict[str, dict[float, Row]]] = {}
        sizes = sorted({row.world_size for row in candidates if not _alone(row, candidates)})
        for row in candidates:
            value = value_on(axis, row)
            if value is None:
                continue
            joins = sizes if _alone(row, candidates) and axis != RANKS else [row.world_size]
            for size in joins or [row.world_size]:
                context = tuple(_context(row, axis, size).items())
                contexts.setdefault(context, {}).setdefault(row.label, {}).setdefault(value, row)
        varying = {
            key
            for key in {key for context in contexts for key, _ in context}
            if len({dict(context).get(key) for context in contexts}) > 1
        }
        for context, by_strategy in contexts.items():
            conditions = {key: value for key, value in context if key in varying}
            lines += [
                AxisLine(
                    axis=axis,
                    metric=metric,
                    conditions=conditions,
                    rows=by_strategy,
                    ranges=ranges,
                )
                for metric in COMPARED
                if (ranges := best_ranges(by_strategy, _Measured(metric)))
            ]
    return lines


def value_on(axis: str, row: Row) -> float | None:
    """Return the row's value on an axis, or None if it is not a number."""
    if axis == RANKS:
        return float(row.world_size)
    if axis == PARAMETERS:
        size = row.metrics.get(PARAMETERS)
        return None if size is None else size.value
    value = row.varied.get(axis)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number else None  # type: ignore[arg-type]  # a number


def _axes(rows: Sequence[Row]) -> list[str]:
    """Return the axes with two or more numbers; the size of the model if the model varies."""
    keys = dict.fromkeys((RANKS, *(key for row in rows for key in row.varied)))
    axes = [key for key in keys if len({value_on(key, row) for row in rows} - {None}) > 1]
    models = {plain(_of_workload(row)) for row in rows}
    sizes = {value_on(PARAMETERS, row) for row in rows} - {None}
    return [*axes, PARAMETERS] if len(models) > 1 and len(sizes) > 1 else axes


def _of_workload(row: Row) -> dict[str, object]:
    return {key: value for key, value in row.varied.items() if key.startswith("workload.")}


def _alone(row: Row, rows: Sequence[Row]) -> bool:
    """Return whether the strategy ran on one rank only, and others on more."""
    sizes = {other.world_size for other in rows if other.label == row.label}
    return sizes == {1} and any(other.world_size > 1 for other in rows)


def _context(row: Row, axis: str, size: int) -> dict[str, str]:
    """Return the row's conditions on all other axes."""
    with_model = axis != PARAMETERS
    varied = {
        key: plain(value)
        for key, value in row.varied.items()
        if key != axis and (with_model or not key.startswith("workload."))
    }
    ranks = {} if axis == RANKS else {"ranks": str(size)}
    workload = {"workload": row.workload} if with_model and not _of_workload(row) else {}
    fixed = {"experiment": row.experiment, **workload, "precision": row.precision}
    return {**fixed, **ranks, **varied}


def best_ranges(
    by_strategy: Mapping[str, Mapping[float, Competitor]], comparer: Comparer[Competitor]
) -> tuple[BestRange, ...]:
    """Return the ranges of a line; empty if nothing can be compared."""
    values = sorted({value for rows in by_strategy.values() for value in rows})
    best: dict[float, Competitor] = {}
    shown: dict[float, bool] = {}
    previous = None
    for value in values:
        rows = [rows[value] for rows in by_strategy.values() if value in rows]
        chosen = comparer.select(rows, previous)
        if chosen is not None:
            best[value], shown[value] = chosen
            previous = best[value].label
    compared = {row.label for rows in by_strategy.values() for row in rows.values()}
    widest = max((len(rows) for rows in by_strategy.values()), default=0)
    if min(len(best), len(compared), widest) < 2:
        return ()
    parts: list[list[float]] = []
    for value, row in best.items():
        if parts and best[parts[-1][-1]].label == row.label:
            parts[-1].append(value)
        else:
            parts.append([value])
    ends = [None, *(before[-1] for before in parts[:-1])]
    ranges = []
    for part, end in zip(parts, ends, strict=True):
        label = best[part[0]].label
        ratios = [_lead(by_strategy, value, best[value], comparer) for value in part]
        leads = [ratio for ratio in ratios if ratio is not None]
        begins = None
        if end is not None:
            before, after = by_strategy[best[end].label], by_strategy[label]
            if all(value in rows for rows in (before, after) for value in (end, part[0])):
                begins = comparer.crossing(before, after, (end, part[0]))
        ranges.append(
            BestRange(
                strategy=label,
                best_at=tuple(part),
                begins=begins,
                ahead=(min(leads)[0], max(leads)[0]) if leads else None,
                rival=min(leads)[1] if leads else None,
                shown=all(shown[value] for value in part),
            )
        )
    winners = {best[value].label for value in best}
    for label, rows_of_label in by_strategy.items():
        behind = [
            (ratio, best[value].label)
            for value, row in rows_of_label.items()
            if value in best and (ratio := comparer.times_better(row, best[value])) is not None
        ]
        if label not in winners and behind:
            nearest = max(behind)
            ranges.append(
                BestRange(
                    strategy=label,
                    best_at=(),
                    begins=None,
                    ahead=(min(behind)[0], nearest[0]),
                    rival=nearest[1],
                    shown=False,
                )
            )
    return tuple(ranges)


def _lead(
    by_strategy: Mapping[str, Mapping[float, Competitor]],
    value: float,
    best: Competitor,
    comparer: Comparer[Competitor],
) -> tuple[float, str] | None:
    """Return the smallest ratio to another strategy at a value of the axis, and the strategy."""
    ratios = [
        (ratio, label)
        for label, rows in by_strategy.items()
        if label != best.label
        and value in rows
        and (ratio := comparer.times_better(best, rows[value])) is not None
    ]
    return min(ratios, default=None)


def interpolated(between: tuple[float, float], part: float) -> float:
    """Return the value at a part of the way, on a logarithmic axis if its values are positive."""
    start, end = between
    if start > 0:
        return start * math.exp(part * math.log(end / start))
    return start + part * (end - start)


@dataclass(frozen=True, slots=True)
class _Measured:
    """Judges rows by the repeats of a metric."""

    metric: str

    def select(self, rows: Sequence[Row], previous: str | None) -> tuple[Row, bool] | None:
        chosen = select(rows, self.metric)
        if chosen is None or chosen.state == "disturbed":
            return None
        # A lead ends where another strategy is shown to be better.
        stays = [row for row in chosen.ties if row.label == previous]
        return (stays[0] if stays else chosen.best), chosen.decided

    def times_better(self, row: Row, other: Row) -> float | None:
        ratio = times_better(row, other, self.metric)
        return None if ratio is None else ratio.value

    def crossing(
        self,
        before: Mapping[float, Row],
        after: Mapping[float, Row],
        between: tuple[float, float],
    ) -> Crossing | None:
        """Return where the log ratio of two strategies is zero, between two values of the axis.

        The log ratio is interpolated linearly over the logarithm of the axis.  Its value at either
        end is the mean over common repeats.  The interval has the points at which it does not
        differ from zero by Student's t test.
        Source: Fieller, J. Royal Statistical Society B 16 (1954), 175-185.
        """
        means = []
        for value in between:
            above, below = after[value], before[value]
            repeats = common_repeats(above, below, self.metric)
            samples = [[row.values[self.metric][r] for r in repeats] for row in (above, below)]
            if not repeats or min(map(min, samples)) <= 0:
                return None
            ratios = log_ratios(*samples)
            means.append(
                (ratios[0], math.inf, 1)
                if len(ratios) < 2
                else ((mean := trimmed_mean(ratios)).value, mean.standard_error, mean.degrees)
            )
        (left, left_error, left_degrees), (right, right_error, right_degrees) = means
        if left * right > 0 or left == right:
            return None
        zero = left / (left - right)
        if math.isinf(left_error + right_error):
            return Crossing(value=interpolated(between, zero), low=None, high=None)
        quantile = t_quantile(min(left_degrees, right_degrees))
        left_width, right_width = (quantile * left_error) ** 2, (quantile * right_error) ** 2
        slope = right - left
        # The interval is where the quadratic is negative.
        square = slope**2 - left_width - right_width
        linear = 2 * left * slope + 2 * left_width
        constant = left**2 - left_width
        root = math.sqrt(max(0.0, linear**2 - 4 * square * constant))
        roots = [(-linear + sign * root) / (2 * square) for sign in (-1, 1)] if square else []
        low = [root for root in roots if 0 < root <= zero]
        high = [root for root in roots if zero <= root < 1]
        return Crossing(
            value=interpolated(between, zero),
            low=interpolated(between, max(low)) if constant > 0 and low else None,
            high=interpolated(between, min(high)) if right**2 > right_width and high else None,
        )
