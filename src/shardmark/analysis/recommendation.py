"""Which strategy on how many ranks: for speed, for memory, for quality in time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from shardmark.analysis.candidates import Field, fields_of
from shardmark.analysis.comparison import Comparison, ratio_between
from shardmark.analysis.rows import Row
from shardmark.analysis.selection import Selection, is_shown, select
from shardmark.analysis.statistics import Estimate, estimate_ratio
from shardmark.analysis.time_to_quality import TimeTo, common_target, time_to_quality

Goal = Literal["speed", "memory", "quality"]

_Advantage = Callable[[Row, Row], Estimate | None]

HEADLINE_QUALITIES = ("accuracy_top1", "map", "perplexity", "validation_loss")
"""The first one that was evaluated stands for quality."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weaker:
    """A row that promises less than equivalence, beside what is recommended."""

    row: Row
    value: float | None
    """Of the goal's metric; None where it has none, for example a target that it missed."""
    advantage: Estimate | None
    """How many times better than the recommended row."""
    shown_better: bool
    quality: Estimate | None
    """What it learned, which is the price to look at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """The answer to one question about rows that train the same thing."""

    goal: Goal
    field: Field
    world_size: int | None
    """The question is about this number of ranks; None where ranks compete, too."""
    metric: str
    target: float | None = None
    """Quality that every candidate reached; the value is then the seconds until it."""
    quality: str | None = None
    """Metric of `target`, and of what the rows learned."""
    selection: Selection | None
    reason: str | None
    """Why there is no selection."""
    weaker: tuple[Weaker, ...] = ()


def recommend(comparison: Comparison) -> tuple[Recommendation, ...]:
    """For each group of comparable rows, the goals in the order speed, memory, quality.

    Speed is also answered for each number of ranks, where there are several.
    """
    return tuple(one for field in fields_of(comparison.rows) for one in _of_field(field))


def headline_quality(rows: Sequence[Row]) -> str | None:
    """The metric that stands for quality; None where nothing was evaluated, or means nothing."""
    if any(row.synthetic for row in rows):
        return None
    return next(
        (name for name in HEADLINE_QUALITIES if any(row.metrics.get(name) for row in rows)), None
    )


def _of_field(field: Field) -> list[Recommendation]:
    sizes = sorted({row.world_size for row in field.candidates})
    speed, memory = "samples_per_second", "peak_memory_bytes"
    found = [_by_metric("speed", field, speed, None)]
    if len(sizes) > 1:
        found += [_by_metric("speed", field, speed, size) for size in sizes]
    return [*found, _by_metric("memory", field, memory, None), _quality(field)]


def _by_metric(goal: Goal, field: Field, metric: str, size: int | None) -> Recommendation:
    lower = metric == "peak_memory_bytes"

    def values_of(row: Row) -> Mapping[int, float]:
        return row.values.get(metric, {})

    def advantage(row: Row, other: Row) -> Estimate | None:
        return ratio_between(other, row, metric) if lower else ratio_between(row, other, metric)

    rows = [row for row in field.candidates if size in (None, row.world_size)]
    selection = select(rows, values_of, advantage, lower_is_better=lower)
    quality = headline_quality(field.rows)
    weaker = [row for row in field.weaker if size in (None, row.world_size)]
    return Recommendation(
        goal=goal,
        field=field,
        world_size=size,
        metric=metric,
        quality=quality,
        selection=selection,
        reason=None if selection else _why_none(field, metric),
        weaker=tuple(
            _weaker(
                row, values_of(row), selection, advantage, quality=quality, comparisons=len(weaker)
            )
            for row in weaker
        ),
    )


def _weaker(
    row: Row,
    values: Mapping[int, float],
    selection: Selection | None,
    advantage: _Advantage,
    *,
    quality: str | None,
    comparisons: int,
) -> Weaker:
    ratio = None if selection is None or not values else advantage(row, selection.best)
    return Weaker(
        row=row,
        value=fmean(values.values()) if values else None,
        advantage=ratio,
        shown_better=is_shown(ratio, comparisons),
        quality=None if quality is None else row.metrics.get(quality),
    )


def _why_none(field: Field, metric: str) -> str:
    if not field.candidates:
        if not any(row.ok_trials for row in field.rows):
            return "no trial ended ok"
        return "no row is proven to train what the reference trains"
    return next(
        (row.missing[metric] for row in field.candidates if metric in row.missing), "not measured"
    )


def _quality(field: Field) -> Recommendation:
    """Training time to the best quality that every candidate reaches."""
    quality = headline_quality(field.rows)
    target = None if quality is None else common_target(field.candidates, quality)
    times: dict[int, TimeTo] = {}
    if quality is not None and target is not None:
        rows = (*field.candidates, *field.weaker)
        times = {id(row): time_to_quality(row, quality, target) for row in rows}

    def values_of(row: Row) -> Mapping[int, float]:
        found = times.get(id(row))
        return {} if found is None or found.estimate is None else found.seconds_by_repeat

    def advantage(row: Row, other: Row) -> Estimate | None:
        return _seconds_ratio(times[id(other)], times[id(row)])

    selection = select(field.candidates, values_of, advantage, lower_is_better=True)
    return Recommendation(
        goal="quality",
        field=field,
        world_size=None,
        metric="seconds_to_target",
        target=target,
        quality=quality,
        selection=selection,
        reason=None if selection else _why_no_quality(field, quality, times),
        weaker=tuple(
            _weaker(
                row,
                values_of(row),
                selection,
                advantage,
                quality=quality,
                comparisons=len(field.weaker),
            )
            for row in field.weaker
        ),
    )


def _seconds_ratio(above: TimeTo, below: TimeTo) -> Estimate | None:
    """Of two rows' times to one target, paired by the repeats that both have."""
    if above.estimate is None or below.estimate is None:
        return None
    one, other = above.seconds_by_repeat, below.seconds_by_repeat
    common = sorted(one.keys() & other.keys())
    if len(common) >= 2 and all(other[repeat] > 0 for repeat in common):
        return estimate_ratio(
            [one[repeat] for repeat in common], [other[repeat] for repeat in common]
        )
    if below.estimate.value <= 0:
        return None
    value = above.estimate.value / below.estimate.value
    return Estimate(value=value, low=None, high=None, n=min(len(one), len(other)))


def _why_no_quality(field: Field, quality: str | None, times: dict[int, TimeTo]) -> str:
    if not field.candidates:
        return _why_none(field, "validation_loss")
    if any(row.synthetic for row in field.rows):
        return "the data are made up, so that quality means nothing"
    if quality is None:
        return "the validation set was not evaluated"
    reasons = [found.reason for found in times.values() if found.reason is not None]
    return reasons[0] if reasons else "no quality was recorded by epoch"
