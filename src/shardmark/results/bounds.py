"""Between which values a stored number must lie to be believed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from shardmark.core.metrics import METRICS
from shardmark.results.schema import RankRecord, Stored, Summary, TrialResult


@dataclass(frozen=True, slots=True)
class Bounds:
    """What is possible, ends included."""

    low: float
    high: float
    tiny: float = 1e-15
    """What is nearer to zero and not zero is no measurement, and a ratio to it overflows."""

    def allow(self, value: float) -> bool:
        """False for what is not a number, too."""
        return self.low <= value <= self.high and (value == 0 or abs(value) >= self.tiny)

    def __str__(self) -> str:
        return f"{self.low:g} to {self.high:g}"


_AMOUNT = Bounds(0.0, 1e18)
_ABOVE_ZERO = Bounds(_AMOUNT.tiny, 1e18)
_SHARE = Bounds(0.0, 1.0)
_SIGNED = Bounds(-1e18, 1e18, tiny=0.0)
_FLOPS = Bounds(0.0, 1e24)
_DIVERGED = Bounds(-1e100, 1e100, tiny=1e-100)
"""Losses, and what a workload records of its own: a training that diverges goes far, and what is
exponential in a loss, as perplexity is, farther."""

_OF_METRIC = {
    **dict.fromkeys(
        (
            "epoch_seconds",
            "step_seconds",
            "step_seconds_p95",
            "step_seconds_p99",
            "total_seconds",
            "samples_per_second",
            "samples_per_second_per_rank",
        ),
        _ABOVE_ZERO,
    ),
    "startup_seconds": _SIGNED,  # between the clocks of two machines
    "temperature_celsius": _SIGNED,
}
_OF_UNIT = {"loss": _DIVERGED, "fraction": _SHARE, "FLOP/s": _FLOPS}
_OF_FIELD = {
    "train_loss": _DIVERGED,
    "flops_per_sample": _FLOPS,
    "window_seconds": _ABOVE_ZERO,
}
_FREE = frozenset({"settings", "reasons"})
"""Fields of a rank that hold no measurement."""


def bounds_of(metric: str) -> Bounds:
    """Of a trial's metric; wide ones where it is not of the catalogue."""
    if metric not in METRICS:
        return _DIVERGED
    return _OF_METRIC.get(metric) or _OF_UNIT.get(METRICS[metric].unit, _AMOUNT)


def out_of_bounds(result: TrialResult) -> str | None:
    """The first number that no run measures, by its place in the file; None where there is none."""
    for place, value, bounds in _numbers(result):
        if not bounds.allow(value):
            return f"{place} is {_short(value)}; possible is {bounds}"
    return None


def _short(value: float) -> str:
    return f"{value:.4g}" if isinstance(value, float) else f"{value!s:.40}"


def _numbers(result: TrialResult) -> Iterator[tuple[str, float, Bounds]]:
    yield "world_size", result.world_size, Bounds(1, 1e9)
    yield "total_seconds", result.total_seconds, _AMOUNT
    yield "started_at_seconds", result.started_at_seconds, _AMOUNT
    for name, summary in result.metrics.items():
        if summary is not None:
            yield from _of_summary(f"metrics.{name}", summary, bounds_of(name))
    for number, rank in enumerate(result.ranks):
        yield from _of_record(f"ranks.{number}", rank)


def _of_summary(
    place: str, summary: Summary, bounds: Bounds
) -> Iterator[tuple[str, float, Bounds]]:
    """The mean or largest of ranks may be zero where the value over them is not."""
    yield f"{place}.value", summary.value, bounds
    of_ranks = Bounds(min(0.0, bounds.low), bounds.high)
    for name in ("mean", "maximum"):
        value = getattr(summary, name)
        if value is not None:
            yield f"{place}.{name}", value, of_ranks
    if summary.imbalance is not None:
        yield f"{place}.imbalance", summary.imbalance, _SIGNED


def _of_record(place: str, record: RankRecord | Stored) -> Iterator[tuple[str, float, Bounds]]:
    """Every number of a rank, however deep."""
    for name, value in record:
        if name == "quality" and isinstance(value, Mapping):
            for metric, found in value.items():
                if found is not None:
                    yield f"{place}.quality.{metric}", found, bounds_of(metric)
        elif name not in _FREE:
            yield from _of_value(f"{place}.{name}", value, _OF_FIELD.get(name, _AMOUNT))


def _of_value(place: str, value: object, bounds: Bounds) -> Iterator[tuple[str, float, Bounds]]:
    if isinstance(value, int | float):
        yield place, value, bounds
    elif isinstance(value, Stored):
        yield from _of_record(place, value)
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from _of_value(f"{place}.{key}", one, bounds)
    elif isinstance(value, tuple):
        for number, one in enumerate(value):
            yield from _of_value(f"{place}.{number}", one, bounds)
