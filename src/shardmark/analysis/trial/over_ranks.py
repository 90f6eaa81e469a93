"""One number of a trial from the numbers of its ranks, or the reason why there is none."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from shardmark.core.metrics import METRICS
from shardmark.results.schema import RankRecord, Summary

Value = float | str
"""A number, or why there is none."""
Result = Summary | str
OfRank = Callable[[RankRecord], Value]

ON_CPU = "the device is a CPU"


def derived(function: Callable[..., Value], *values: Value) -> Value:
    """The function of the values, or the reason of the first that is missing."""
    reasons = [value for value in values if isinstance(value, str)]
    return reasons[0] if reasons else function(*values)


def trial_value(value: Value | None, otherwise: str = "it was not recorded") -> Result:
    """A metric that was never a rank's."""
    if value is None or isinstance(value, str):
        return otherwise if value is None else value
    return (
        Summary(value=value, over="trial") if math.isfinite(value) else "it is not a finite number"
    )


def over_all(name: str, values: Sequence[Value]) -> Result:
    """The metric's own way over ranks or devices; a reason as soon as one value is missing."""
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
    """Each metric from its value of a rank.

    Every worker must have one; a rank that only holds parameters counts where it has one.
    """
    results = {}
    for name, of_rank in value_of.items():
        values = [(rank.role == "worker", of_rank(rank)) for rank in ranks]
        results[name] = over_all(name, [v for must, v in values if must or not isinstance(v, str)])
    return results


def split(results: Mapping[str, Result]) -> tuple[dict[str, Summary | None], dict[str, str]]:
    """Values with None for the missing, and the reasons of those."""
    metrics = {
        name: None if isinstance(result, str) else result for name, result in results.items()
    }
    return metrics, {name: text for name, text in results.items() if isinstance(text, str)}
