"""The catalogue: every metric that a trial or a comparison can have, each defined once."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from shardmark.core.metrics.learning import ERRORS, QUALITY, SERVERS
from shardmark.core.metrics.resources import DEVICE, MEMORY, NETWORK, PROCESSES
from shardmark.core.metrics.speed import RATE, TIME

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardmark.core.metrics.catalogue import Metric

METRICS: Mapping[str, Metric] = MappingProxyType(
    {
        metric.name: metric
        for metric in (
            *TIME,
            *RATE,
            *MEMORY,
            *NETWORK,
            *PROCESSES,
            *DEVICE,
            *QUALITY,
            *SERVERS,
            *ERRORS,
        )
    }
)
"""By name, in the order in which tables show them."""

NO_SERVERS = "the strategy has no parameter server"
"""Why most strategies have no staleness; tables do not say it."""
NO_SUCH_METRIC = "the workload has no such metric"
"""Why a detector has no accuracy and a classifier no average precision; tables do not say it."""

NO_CHECKPOINTS = "no checkpoint was written"
"""Why a trial without `limits.max_restarts` has no checkpoint_seconds; tables do not say it."""

COMPARISON_METRICS = frozenset({"speedup", "scaling_efficiency", "memory_ratio"})
"""Relations between trials: only `analysis.comparison` computes them."""

TRIAL_METRICS = tuple(name for name in METRICS if name not in COMPARISON_METRICS)
"""What `TrialResult.metrics` holds: a value, or None with a reason in `missing`."""
