"""Plausible ranges of stored numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from shardmark.base.metrics import METRICS
from shardmark.base.results.schema import TrialResult


@dataclass(frozen=True, slots=True)
class Bounds:
    """A range of plausible values, including its ends."""

    low: float
    high: float
    min_nonzero: float = 1e-15
    """Smallest plausible absolute value other than 0; ratios to smaller values overflow."""

    def __str__(self) -> str:
        return f"{self.low:g} to {self.high:g}"


_AMOUNT = Bounds(0.0, 1e18)
_ABOVE_ZERO = Bounds(_AMOUNT.min_nonzero, 1e18)
_SIGNED = Bounds(-1e18, 1e18, min_nonzero=0.0)
_FLOPS = Bounds(0.0, 1e24)
_DIVERGED = Bounds(-1e100, 1e100, min_nonzero=1e-100)
"""Range of losses and of a workload's own metrics, which can be huge in a diverging training."""

_OF_METRIC = {
    **dict.fromkeys(
        ("epoch_seconds", "step_seconds", "step_seconds_p95", "step_seconds_p99"), _ABOVE_ZERO
    ),
    **dict.fromkeys(
        ("total_seconds", "samples_per_second", "samples_per_second_per_rank"), _ABOVE_ZERO
    ),
    "startup_seconds": _SIGNED,  # between the clocks of two machines
    "temperature_celsius": _SIGNED,
}
_OF_UNIT = {
    "loss": _DIVERGED,
    "perplexity": _DIVERGED,
    "bits/byte": _DIVERGED,
    "fraction": Bounds(0.0, 1.0),
    "FLOP/s": _FLOPS,
}
_OF_FIELD = {
    "world_size": Bounds(1, 1e9),
    "train_loss": _DIVERGED,
    **dict.fromkeys(("flops_per_sample", "hardware_flops_per_sample"), _FLOPS),
    "window_seconds": _ABOVE_ZERO,
}
_SETTING = Bounds(-1e300, 1e300, min_nonzero=0.0)
"""Range of the user's settings: finite numbers."""
_MEASURED = {"world_size", "total_seconds", "started_at_seconds", "metrics", "ranks"}
_SETTINGS = "settings"
"""Key in a rank's record of values that are not measurements."""


def bounds_of(metric: str) -> Bounds:
    """Return the range of a trial's metric; a wide one if it is not in the catalogue."""
    if metric not in METRICS:
        return _DIVERGED
    return _OF_METRIC.get(metric) or _OF_UNIT.get(METRICS[metric].unit, _AMOUNT)


def check_bounds(result: TrialResult) -> None:
    """Raise `ValueError` for the first implausible number, with its place in the file."""
    for place, value in _numbers((), result.model_dump(exclude={"files"})):
        bounds = _bounds_at(place)
        in_range = bounds.low <= value <= bounds.high  # NaN is in no range
        if not in_range or 0 < abs(value) < bounds.min_nonzero:
            shown = f"{value:.4g}" if isinstance(value, float) else f"{value!s:.40}"
            raise ValueError(f"{'.'.join(place)} is {shown}; possible is {bounds}")


def _numbers(place: tuple[str, ...], value: object) -> Iterator[tuple[tuple[str, ...], float]]:
    if isinstance(value, int | float):
        yield place, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _numbers((*place, str(key)), inner)
    elif isinstance(value, tuple | list):
        for number, inner in enumerate(value):
            yield from _numbers((*place, str(number)), inner)


def _bounds_at(place: tuple[str, ...]) -> Bounds:
    *parents, field = place
    if place[0] not in _MEASURED or _SETTINGS in parents:
        return _SETTING
    if "quality" in parents:
        return bounds_of(field)
    if parents[:1] != ["metrics"]:
        return _OF_FIELD.get(field, _AMOUNT)
    if field == "imbalance":
        return _SIGNED
    bounds = bounds_of(parents[1])
    # The mean or maximum over ranks can be zero even if the trial's value is not.
    return bounds if field == "value" else Bounds(min(0.0, bounds.low), bounds.high)
