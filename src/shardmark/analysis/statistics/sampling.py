"""What chance alone makes of an accuracy: guessing, and few validation samples."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist, fmean
from typing import Any

from shardmark.analysis.compare.rows import Row
from shardmark.analysis.statistics.intervals import CONFIDENCE

NORMAL_QUANTILE = NormalDist().inv_cdf(0.5 + CONFIDENCE / 2)

ACCURACY = "accuracy_top1"
CLASSES = {"digits": 10, "mnist": 10, "cifar10": 10}
"""Of the data sets that have always the same; another's are known where the recipe states them."""
VALIDATION_SAMPLES = {"digits": 360, "mnist": 10_000, "cifar10": 10_000}
"""Evaluated where the recipe does not limit them."""


def samples_evaluated(row: Row) -> int | None:
    """Validation samples that each quality of the row rests on; None where that is not known."""
    workload = _workload(row)
    stated = workload.get("validation_samples")
    return stated or VALIDATION_SAMPLES.get(str(workload.get("dataset")))


def chance_of(row: Row) -> float | None:
    """Top-1 accuracy of guessing among equally frequent classes; None where they are unknown."""
    workload = _workload(row)
    classes = workload.get("classes") or CLASSES.get(str(workload.get("dataset")))
    return 1 / classes if classes else None


def is_chance(row: Row, metric: str, value: float) -> bool | None:
    """Whether guessing reaches the row's accuracy in 2.5 % of all draws of so many samples.

    Normal approximation of the binomial distribution.  None where the classes or the samples are
    not known, and could make it so: there are two classes at least, and one sample.
    """
    if metric != ACCURACY:
        return False
    chance, samples = chance_of(row), samples_evaluated(row)
    if chance is not None and samples is not None:
        return value <= _guessed(chance, samples)
    return None if value <= _guessed(chance or 1 / 2, samples or 1) else False


def _guessed(chance: float, samples: int) -> float:
    return chance + NORMAL_QUANTILE * math.sqrt(chance * (1 - chance) / samples)


def beyond_sampling(row: Row, other: Row, metric: str, difference: float) -> bool:
    """Whether other validation samples would hardly turn the difference round.

    An accuracy's must exceed 1.96 sqrt((p (1 - p) + q (1 - q)) / n), what independent samples
    differ by through chance in 5 % of cases; it does not where n is unknown.  The sampling of other
    qualities has no such formula, and is not judged.
    """
    if not metric.startswith("accuracy"):
        return True
    counts = [samples_evaluated(one) for one in (row, other)]
    known = [count for count in counts if count]
    if len(known) < len(counts):
        return False
    shares = [fmean(one.values[metric].values()) for one in (row, other)]
    return abs(difference) > sampling_error(shares, min(known))


def sampling_error(shares: Sequence[float], samples: int) -> float:
    """Half of the 95 % interval of the difference of two accuracies on so many samples each."""
    return NORMAL_QUANTILE * math.sqrt(sum(share * (1 - share) for share in shares) / samples)


def seeds_of(row: Row) -> int:
    """How many different seeds the trials that ended ok had; repeats of one share their luck."""
    return len({trial.trial.get("recipe", {}).get("seed") for trial in row.ok_trials})


def _workload(row: Row) -> Mapping[str, Any]:
    return dict(row.trials[0].trial.get("workload", {})) if row.trials else {}
