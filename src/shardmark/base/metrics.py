"""Catalogue of the metrics of trials and comparisons, from which tables and docs are generated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import yaml

Group = Literal[
    "time", "rate", "memory", "network", "processes", "device", "quality", "servers", "errors"
]
Over = Literal["maximum", "sum", "mean", "trial"]
Better = Literal["lower", "higher"]


@dataclass(frozen=True, slots=True)
class Metric:
    """Definition of a metric, as `shardmark list metrics` shows it."""

    name: str
    definition: str
    source: str
    """Source of the number: clock, allocator, /proc, NVML, ..."""
    group: Group
    over: Over
    """Aggregation over the ranks; `trial` for a metric that is not computed for each rank."""
    better: Better | None
    unit: str
    """Base units: seconds, bytes, samples/s, FLOP/s, ratio, percent, watts, joules, ..."""

    @property
    def is_timed(self) -> bool:
        """True for what other work on the machine changes: times, rates and readings of use.

        Memory, traffic and qualities do not depend on it.
        """
        timed_groups = ("time", "rate", "processes", "device", "servers")
        return self.group in timed_groups or self.unit.endswith("/s")


FEW_STEPS = 10
"""Tables add a note to a rate from fewer measured steps."""


def _catalogue() -> Iterator[Metric]:
    """Yield the metrics of `metrics.yaml`, where `each` has the usual fields of a group."""
    content = Path(__file__).with_name("metrics.yaml").read_bytes()
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the one in C is ten times as fast
    for group, metrics in yaml.load(content, loader).items():
        usual = {"group": group} | metrics.pop("each")
        for name, fields in metrics.items():
            yield Metric(name=name, **usual | fields)


METRICS: Mapping[str, Metric] = MappingProxyType({metric.name: metric for metric in _catalogue()})
"""Metrics by name, in the order in which tables show them."""

NO_PIPELINE = "the strategy has no pipeline"
NO_SERVERS = "the strategy has no parameter server"
"""Reason for missing staleness metrics, which tables do not show."""
NO_SUCH_METRIC = "the workload has no such metric"
"""Reason for missing quality metrics of other tasks, which tables do not show."""
NOT_COMPILED = "recipe.compile is none"
"""Reason for a missing compile_seconds, which tables do not show."""

RATES = ("tokens_per_second", "samples_per_second")
"""Throughput metrics in order of preference; every workload has the last one."""
QUALITIES = ("accuracy_top1", "map", "bits_per_byte", "perplexity", "validation_loss", "train_loss")
"""Quality metrics in order of preference, among those that most rows have."""

COMPARISON_METRICS = frozenset({"speedup", "scaling_efficiency", "memory_ratio", "parameters"})
"""Metrics of a comparison's rows, which trials do not have; `analysis.compare` computes them."""

TRIAL_METRICS = tuple(name for name in METRICS if name not in COMPARISON_METRICS)
"""Metrics in `TrialResult.metrics`: each is a value, or None with a reason in `missing`."""
