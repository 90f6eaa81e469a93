"""What few validation samples alone make of an accuracy, and which repeats share their luck."""

from __future__ import annotations

import math
from statistics import NormalDist, fmean

from shardmark.analysis.compare.rows import Row
from shardmark.analysis.statistics.intervals import CONFIDENCE

NORMAL_QUANTILE = NormalDist().inv_cdf(0.5 + CONFIDENCE / 2)
VALIDATION_SAMPLES = {"digits": 360, "mnist": 10_000, "cifar10": 10_000}
"""Evaluated where the recipe does not limit them."""


def beyond_sampling(row: Row, other: Row, metric: str, difference: float) -> bool:
    """Whether other validation samples would hardly turn the difference round.

    An accuracy's must exceed 1.96 sqrt((p (1 - p) + q (1 - q)) / n), what independent samples
    differ by through chance in 5 % of cases; it does not where n is unknown.  The sampling of other
    qualities has no such formula, and is not judged.
    """
    if not metric.startswith("accuracy"):
        return True
    samples = [_samples_evaluated(one) for one in (row, other)]
    known = [count for count in samples if count]
    if len(known) < len(samples):
        return False
    shares = [fmean(one.values[metric].values()) for one in (row, other)]
    variance = sum(share * (1 - share) for share in shares) / min(known)
    return abs(difference) > NORMAL_QUANTILE * math.sqrt(variance)


def seeds_of(row: Row) -> int:
    """How many different seeds the trials that ended ok had; repeats of one share their luck."""
    return len({trial.trial.get("recipe", {}).get("seed") for trial in row.ok_trials})


def _samples_evaluated(row: Row) -> int | None:
    workload = row.trials[0].trial.get("workload", {}) if row.trials else {}
    stated: int | None = workload.get("validation_samples")
    return stated or VALIDATION_SAMPLES.get(str(workload.get("dataset")))
