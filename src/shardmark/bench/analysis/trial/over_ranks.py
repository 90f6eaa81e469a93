"""Aggregation of a metric's values over ranks, or the reason for a missing value."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from shardmark.base.metrics import METRICS
from shardmark.base.results.schema import RankRecord, Summary

Value = float | str
"""A number, or the reason why it is missing."""
Result = Summary | str
OfRank = Callable[[RankRecord], Value]

ON_CPU = "the device is a CPU"


def derived(function: Callable[..., Value], *values: Value) -> Value:
    """Apply the function to the values, or return the reason of the first missing value."""
    reasons = [value for value in values if isinstance(value, str)]
    return reasons[0] if reasons else function(*values)


def trial_value(value: Value | None, otherwise: str = "it was not recorded") -> Result:
    """Summarise a metric that is not computed for each rank."""
    if value is None or isinstance(value, str):
        return otherwise if value is None else value
    return (
        Summary(value=value, over="trial") if math.isfinite(value) else "it is not a finite number"
    )


def over_all(name: str, values: Sequence[Value]) -> Result:
    """Aggregate a metric's values over ranks or devices; any missing value gives its reason."""
    numbers = [value for value in values if not isinstance(value, str)]
    if len(numbers) < len(values):
        return next(value for value in values if isinstance(value, str))
    if not numbers:
        return "no rank left a record"
    if not all(math.isfinite(number) for number in numbers):
        return "it is not a finite number on some rank"
    over = METRICS[name].over
    assert over != "trial", f"{name} is not a rank's"
    total, maximum = math.fsum(numbers), max(numbers)
    mean = total / len(numbers)
    return Summary(
        value={"maximum": maximum, "sum": total, "mean": mean}[over],
        over=over,
        mean=mean,
        maximum=maximum,
        imbalance=maximum / mean - 1 if mean > 0 else None,
    )


def over_ranks(ranks: Sequence[RankRecord], **value_of: OfRank) -> dict[str, Result]:
    """Aggregate metrics over ranks, from functions that return the value of a rank.

    Every worker must have a value; a parameter server counts only if it has one.
    """
    results = {}
    for name, of_rank in value_of.items():
        values = [(rank.role == "worker", of_rank(rank)) for rank in ranks]
        results[name] = over_all(
            name, [value for required, value in values if required or not isinstance(value, str)]
        )
    return results


def split(results: Mapping[str, Result]) -> tuple[dict[str, Summary | None], dict[str, str]]:
    """Return the metrics, with None for missing ones, and the reasons of the missing ones."""
    metrics = {
        name: None if isinstance(result, str) else result for name, result in results.items()
    }
    return metrics, {name: text for name, text in results.items() if isinstance(text, str)}
