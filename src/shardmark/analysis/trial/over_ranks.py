"""One number of a trial from the numbers of its ranks, or the reason why there is none."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from shardmark.core.metrics import METRICS
from shardmark.results.schema import RankRecord, Summary

Found = float | str
"""A value, or why there is none."""
Result = Summary | str

ON_CPU = "the device is a CPU"
NO_PROBE = "no untimed steps were taken after the training: the probe was switched off"


def trial_value(value: Found | None, otherwise: str = "it was not recorded") -> Result:
    """A metric that was never a rank's."""
    if value is None:
        return otherwise
    if isinstance(value, str):
        return value
    if not math.isfinite(value):
        return "it is not a finite number"
    return Summary(value=value, over="trial")


def over_all(name: str, values: Sequence[Found]) -> Result:
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
    mean, maximum = math.fsum(numbers) / len(numbers), max(numbers)
    value = {"maximum": maximum, "sum": math.fsum(numbers), "mean": mean}[over]
    imbalance = maximum / mean - 1 if mean > 0 else None
    return Summary(value=value, over=over, mean=mean, maximum=maximum, imbalance=imbalance)


def over_ranks(
    name: str, ranks: Sequence[RankRecord], value_of: Callable[[RankRecord], Found]
) -> Result:
    """Every worker must have a value; a rank that only holds parameters counts where it has one."""
    found = [(rank, value_of(rank)) for rank in ranks]
    return over_all(
        name,
        [value for rank, value in found if rank.role == "worker" or not isinstance(value, str)],
    )


def train_loss(workers: Sequence[RankRecord], epoch: int) -> Found:
    """Mean over the epoch's steps on all workers, each with the samples that it trained on."""
    total = steps = 0.0
    for rank in workers:
        record = rank.epochs[epoch] if 0 <= epoch < len(rank.epochs) else None
        taken = record.end_step - record.first_step if record is not None else 0
        if record is None or taken == 0:
            continue  # faster workers may have taken all shares of an epoch
        if record.train_loss is None:
            return "a loss was not a finite number"
        total += record.train_loss * taken
        steps += taken
    return total / steps if steps else "no epoch ended"


def number(value: object) -> float | None:
    """A JSON number as a float; None for anything else."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def split(results: Mapping[str, Result]) -> tuple[dict[str, Summary | None], dict[str, str]]:
    """Values with None for the missing, and the reasons of those."""
    metrics = {
        name: None if isinstance(result, str) else result for name, result in results.items()
    }
    return metrics, {name: text for name, text in results.items() if isinstance(text, str)}
