"""What every candidate has learned when the fastest one is done."""

from __future__ import annotations

from dataclasses import dataclass

from shardmark.analysis.advise.candidates import Field
from shardmark.analysis.compare.rows import Row
from shardmark.analysis.compare.time_to_quality import quality_after, training_seconds
from shardmark.analysis.statistics.sampling import is_chance, samples_evaluated, sampling_error
from shardmark.core.metrics import METRICS


@dataclass(frozen=True, slots=True, kw_only=True)
class QualityInTime:
    """Best quality after the same seconds of training.

    Repeats share a seed, so that no order of these is shown to be real.
    """

    fastest: Row
    """Its whole training, in the repeat that took longest, is the time."""
    seconds: float
    metric: str
    values: tuple[tuple[Row, float], ...]
    """Means over the repeats, the best first."""
    too_early: tuple[Row, ...]
    """Candidates that had not finished their first epoch in some repeat."""
    is_chance: bool | None
    """Guessing could reach the best of them, too; None where that is not known."""
    within_sampling: tuple[Row, ...] | None
    """Rows that the validation samples cannot tell from the first; None where that is not known."""


def quality_in_time(field: Field, metric: str, fastest: Row | None) -> QualityInTime | None:
    """None where the fastest row's training was not timed, or none evaluated the metric by then."""
    seconds = None if fastest is None else training_seconds(fastest)
    if fastest is None or seconds is None:
        return None
    found = [(row, quality_after(row, metric, seconds)) for row in field.candidates]
    known = [(row, value) for row, value in found if value is not None]
    if not known:
        return None
    known.sort(key=lambda one: one[1], reverse=METRICS[metric].better == "higher")
    return QualityInTime(
        fastest=fastest,
        seconds=seconds,
        metric=metric,
        values=tuple(known),
        too_early=tuple(row for row, value in found if value is None),
        is_chance=is_chance(known[0][0], metric, known[0][1]),
        within_sampling=_like_the_first(known, metric),
    )


def _like_the_first(values: list[tuple[Row, float]], metric: str) -> tuple[Row, ...] | None:
    """By the binomial error of an accuracy; other qualities have no such formula."""
    samples = samples_evaluated(values[0][0])
    if samples is None or not metric.startswith("accuracy"):
        return None
    best = values[0][1]
    return tuple(
        row
        for row, value in values[1:]
        if abs(best - value) <= sampling_error((best, value), samples)
    )
