"""A trial's metrics from its ranks' records and raw files, as often as one likes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from shardmark.analysis.trial.over_ranks import (
    ON_CPU,
    Found,
    Result,
    over_ranks,
    split,
    train_loss,
    trial_value,
)
from shardmark.analysis.trial.server_metrics import exchange_metrics
from shardmark.analysis.trial.system_metrics import (
    device_metrics,
    device_uuids,
    network_metrics,
    process_metrics,
)
from shardmark.analysis.trial.training_metrics import (
    communication_metrics,
    epoch_seconds,
    memory_metrics,
    peak_of_all,
    rate_metrics,
    read_steps,
    slowest,
    time_metrics,
    windows_of,
)
from shardmark.analysis.trial.windows import Windows
from shardmark.core.layout import Layout
from shardmark.core.metrics import METRICS, NO_CHECKPOINTS, NO_SUCH_METRIC, TRIAL_METRICS
from shardmark.results.schema import RankRecord, Summary

EVALUATED = tuple(
    metric.name
    for metric in METRICS.values()
    if metric.group == "quality" and metric.name != "train_loss"
)
"""Metrics that a workload's evaluation gives, each workload some of them."""


def summarise(
    ranks: Sequence[RankRecord],
    steps: Iterable[Mapping[str, object]],
    samples: Sequence[Mapping[str, object]],
    *,
    launched_at_seconds: float,
    total_seconds: float,
    device_type: str,
    precision: str,
    tf32: bool,
    layout: Layout,
    warmup_steps: int,
    steps_per_epoch: int | None,
    samples_per_step: int | None = None,
    restarts: int = 0,
) -> tuple[dict[str, Summary | None], dict[str, str]]:
    """`metrics` and `missing` of a `TrialResult`: each metric that is None has its reason there.

    `steps` are the lines of `steps.jsonl`, `samples` those of `samples.jsonl` in order of time.
    `launched_at_seconds` is Unix time.  What was sampled from outside is cut to the slowest rank's
    windows.
    """
    ranks = sorted((r for r in ranks if r.lost is None), key=lambda rank: rank.rank)
    workers = [rank for rank in ranks if rank.role == "worker"]
    taken = read_steps(steps)
    no_window = _why_no_window(workers, taken.steps_taken, warmup_steps)
    peak = peak_of_all(workers, len(device_uuids(samples)), precision, tf32)
    results = {
        "total_seconds": trial_value(total_seconds),
        **time_metrics(workers, taken, launched_at_seconds, no_window),
        "epoch_seconds": epoch_seconds(
            workers,
            taken,
            steps_per_epoch,
            no_window,
            layout=layout,
            samples_per_step=samples_per_step,
        ),
        **rate_metrics(workers, layout, ON_CPU if device_type == "cpu" else peak, no_window),
        **_of_ranks(ranks, workers, device_type),
        **_sampled(samples, ranks, windows_of(slowest(workers)), device_type),
        **_errors(ranks, restarts),
    }
    return split({name: results.get(name, no_window) for name in TRIAL_METRICS})


def _of_ranks(
    ranks: Sequence[RankRecord], workers: Sequence[RankRecord], device_type: str
) -> dict[str, Result]:
    """What the ranks' records hold ready."""
    return {
        **memory_metrics(ranks, device_type),
        **communication_metrics(workers),
        **exchange_metrics(ranks),
        **_quality(workers),
    }


def _sampled(
    samples: Sequence[Mapping[str, object]],
    ranks: Sequence[RankRecord],
    windows: Windows,
    device_type: str,
) -> dict[str, Result]:
    if not windows.spans:
        return {}
    return {
        **network_metrics(samples, windows),
        **process_metrics(samples, ranks, windows),
        **device_metrics(samples, windows, device_type),
    }


def _why_no_window(workers: Sequence[RankRecord], steps_taken: int, warmup_steps: int) -> str:
    if not workers:
        return "no rank that trains left a record"
    if steps_taken <= warmup_steps:
        return f"the recipe took {steps_taken} steps, all within the {warmup_steps} of the warm-up"
    empty = [str(rank.rank) for rank in workers if not rank.windows]
    return f"no window was measured on rank {', '.join(empty)}"


def _quality(workers: Sequence[RankRecord]) -> dict[str, Result]:
    """Of the last epoch that has each; all ranks store the same quality, so the first's counts."""
    epochs = workers[0].epochs if workers else ()
    loss = train_loss(workers, len(epochs) - 1)
    evaluated = [epoch.quality for epoch in epochs if epoch.quality is not None]

    def last(name: str) -> Found:
        if not evaluated:
            return "the validation set was not evaluated"
        having = [quality[name] for quality in evaluated if name in quality]
        if not having:
            return NO_SUCH_METRIC
        value = having[-1]
        return "the evaluation gave no finite number" if value is None else value

    return {
        "train_loss": trial_value(loss),
        **{name: trial_value(last(name)) for name in EVALUATED},
    }


def _errors(ranks: Sequence[RankRecord], restarts: int) -> dict[str, Result]:
    return {
        "nonfinite_steps": over_ranks("nonfinite_steps", ranks, lambda rank: rank.nonfinite_steps),
        "skipped_steps": over_ranks("skipped_steps", ranks, lambda rank: rank.skipped_steps),
        "data_errors": over_ranks("data_errors", ranks, lambda rank: len(rank.data_errors)),
        "restarts": trial_value(restarts),
        "lost_seconds": over_ranks(
            "lost_seconds", ranks, lambda rank: sum(one.lost_seconds for one in rank.resumes)
        ),
        "checkpoint_seconds": over_ranks(
            "checkpoint_seconds", ranks, lambda rank: _mean(c.seconds for c in rank.checkpoints)
        ),
        "checkpoint_bytes": over_ranks(
            "checkpoint_bytes", ranks, lambda rank: _mean(c.written_bytes for c in rank.checkpoints)
        ),
    }


def _mean(values: Iterable[float]) -> Found:
    found = list(values)
    return sum(found) / len(found) if found else NO_CHECKPOINTS
