"""Which strategy on how many ranks: for speed, for memory, for quality soon."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from shardmark.analysis.advise.candidates import Field, fields_of, headline_qualities
from shardmark.analysis.advise.selection import Selection, is_shown, select
from shardmark.analysis.compare.comparison import Comparison, ratio_between
from shardmark.analysis.compare.quality_in_time import QualityInTime, quality_in_time
from shardmark.analysis.compare.rows import Row
from shardmark.analysis.compare.time_to_quality import (
    TimeTo,
    common_target,
    ends_below,
    time_to_quality,
)
from shardmark.analysis.statistics.intervals import Estimate, estimate_ratio
from shardmark.analysis.statistics.sampling import is_chance

Goal = Literal["speed", "memory", "quality"]

RATE, PEAK, TOTAL = "samples_per_second", "peak_memory_bytes", "total_memory_bytes"

_Values = Callable[[Row], Mapping[int, float]]
_Advantage = Callable[[Row, Row], Estimate | None]


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
    """A metric of the catalogue, `total_memory_bytes` of all ranks on one device, or
    `seconds_to_target`."""
    target: float | None = None
    """Quality that every candidate reached; the value is then the seconds until it."""
    target_is_chance: bool | None = False
    """Guessing could reach the target, too; None where that is not known."""
    ended_below: tuple[Row, ...] = ()
    """Candidates that reached the target and lost it again by the end."""
    quality: str | None = None
    """Metric of `target`, and of what the rows learned."""
    in_time: QualityInTime | None = None
    """What is learned while the fastest candidate trains."""
    selection: Selection | None
    reason: str | None
    """Why there is no selection."""
    weaker: tuple[Weaker, ...] = ()


def recommend(comparison: Comparison) -> tuple[Recommendation, ...]:
    """For each group of comparable rows, the goals in the order speed, memory, quality.

    Speed and the fullest rank's memory are answered over all numbers of ranks and, where there are
    several, for each.  The memory of all ranks together is answered where some share a device.
    """
    return tuple(one for field in fields_of(comparison.rows) for one in _of_field(field))


def _of_field(field: Field) -> list[Recommendation]:
    sizes = sorted({row.world_size for row in field.candidates})
    each = sizes if len(sizes) > 1 else []
    speed = _by_metric(field, RATE, None)
    found = [speed, *(_by_metric(field, RATE, size) for size in each)]
    found += [_by_metric(field, PEAK, size) for size in (None, *each)]
    if any(total_memory(row) for row in field.candidates if row.world_size > 1):
        found.append(_by_metric(field, TOTAL, None))
    fastest = None if speed.selection is None else speed.selection.best
    return [*found, _quality(field, fastest)]


def total_memory(row: Row) -> Mapping[int, float]:
    """Sum of all ranks' peaks by repeat, servers too; none unless they share one device.

    The ranks' peaks need not fall together, so that it is what they need at most.
    """
    found = {}
    for trial in row.ok_trials:
        peak = trial.metrics.get(PEAK)
        devices = {(rank.host, rank.device) for rank in trial.ranks}
        if peak is not None and peak.mean is not None and len(devices) == 1:
            found[trial.repeat] = peak.mean * len(trial.ranks)
    return found if len(found) == len(row.ok_trials) else {}


def _by_metric(field: Field, metric: str, size: int | None) -> Recommendation:
    lower = metric != RATE

    def values_of(row: Row) -> Mapping[int, float]:
        return total_memory(row) if metric == TOTAL else row.values.get(metric, {})

    def advantage(row: Row, other: Row) -> Estimate | None:
        above, below = (other, row) if lower else (row, other)
        if metric == TOTAL:
            return _paired(values_of(above), values_of(below))
        return ratio_between(above, below, metric)

    rows = [row for row in field.candidates if size in (None, row.world_size)]
    selection = select(rows, values_of, advantage, lower_is_better=lower)
    quality = next(iter(headline_qualities(field.rows)), None)
    weaker = [row for row in field.weaker if size in (None, row.world_size)]
    return Recommendation(
        goal="memory" if lower else "speed",
        field=field,
        world_size=size,
        metric=metric,
        quality=quality,
        selection=selection,
        reason=None if selection else _why_none(field, metric),
        weaker=_beside(weaker, values_of, selection, advantage, quality),
    )


def _beside(
    rows: Sequence[Row],
    values_of: _Values,
    selection: Selection | None,
    advantage: _Advantage,
    quality: str | None,
) -> tuple[Weaker, ...]:
    found = []
    for row in rows:
        values = values_of(row)
        ratio = None if selection is None or not values else advantage(row, selection.best)
        found.append(
            Weaker(
                row=row,
                value=fmean(values.values()) if values else None,
                advantage=ratio,
                shown_better=is_shown(ratio, len(rows)),
                quality=None if quality is None else row.metrics.get(quality),
            )
        )
    return tuple(found)


def _why_none(field: Field, metric: str) -> str:
    if not field.candidates:
        if not any(row.ok_trials for row in field.rows):
            return "no trial ended ok"
        return "no row is proven to train what the reference trains"
    return next(
        (row.missing[metric] for row in field.candidates if metric in row.missing), "not measured"
    )


def _quality(field: Field, fastest: Row | None) -> Recommendation:
    """Training time to the best quality that every candidate reaches."""
    quality = next(iter(headline_qualities(field.rows)), None)
    target = None if quality is None else common_target(field.candidates, quality)
    times: dict[int, TimeTo] = {}
    below: tuple[Row, ...] = ()
    chance: bool | None = False
    if quality is not None and target is not None:
        rows = (*field.candidates, *field.weaker)
        times = {id(row): time_to_quality(row, quality, target) for row in rows}
        chance = is_chance(field.candidates[0], quality, target)
        below = tuple(row for row in field.candidates if ends_below(row, quality, target))

    def values_of(row: Row) -> Mapping[int, float]:
        found = times.get(id(row))
        return {} if found is None or found.estimate is None else found.seconds_by_repeat

    def advantage(row: Row, other: Row) -> Estimate | None:
        return _paired(values_of(other), values_of(row))

    selection = select(field.candidates, values_of, advantage, lower_is_better=True)
    return Recommendation(
        goal="quality",
        field=field,
        world_size=None,
        metric="seconds_to_target",
        target=target,
        target_is_chance=chance,
        ended_below=below,
        quality=quality,
        in_time=None if quality is None else quality_in_time(field, quality, fastest),
        selection=selection,
        reason=None if selection else _why_no_quality(field, quality, times),
        weaker=_beside(field.weaker, values_of, selection, advantage, quality),
    )


def _paired(above: Mapping[int, float], below: Mapping[int, float]) -> Estimate | None:
    """Ratio of two rows' values, over the repeats that both have."""
    common = sorted(above.keys() & below.keys())
    if not above or not below or any(value <= 0 for value in below.values()):
        return None
    if len(common) >= 2:
        return estimate_ratio([above[one] for one in common], [below[one] for one in common])
    value = fmean(above.values()) / fmean(below.values())
    return Estimate(value=value, low=None, high=None, n=min(len(above), len(below)))


def _why_no_quality(field: Field, quality: str | None, times: dict[int, TimeTo]) -> str:
    if not field.candidates:
        return _why_none(field, "validation_loss")
    if any(row.synthetic for row in field.rows):
        return "the data are made up, so that quality means nothing"
    if quality is None:
        return "the validation set was not evaluated"
    reasons = [found.reason for found in times.values() if found.reason is not None]
    return reasons[0] if reasons else "no quality was recorded by epoch"
