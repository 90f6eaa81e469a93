"""Computation of a trial's metrics from its ranks' records and raw files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shardmark.base.metrics import TRIAL_METRICS
from shardmark.base.results.schema import RankRecord, Summary
from shardmark.bench.analysis.trial.over_ranks import ON_CPU, Result, split, trial_value
from shardmark.bench.analysis.trial.rank_metrics import (
    communication_metrics,
    epoch_seconds,
    error_metrics,
    memory_metrics,
    peak_of_all,
    quality_metrics,
    rate_metrics,
    read_steps,
    server_metrics,
    slowest,
    time_metrics,
    windows_of,
)
from shardmark.bench.analysis.trial.raw_files import Line
from shardmark.bench.analysis.trial.sampled_metrics import (
    device_metrics,
    network_metrics,
    process_metrics,
)
from shardmark.ranks.trial import Trial


def summarise(
    trial: Trial,
    ranks: Sequence[RankRecord],
    steps: Iterable[Line],
    samples: Sequence[Line],
    *,
    launched_at_seconds: float,
    total_seconds: float,
    steps_per_epoch: int | None,
) -> tuple[dict[str, Summary | None], dict[str, str]]:
    """Return `metrics` and `missing` of a `TrialResult`.

    `steps` are the lines of `steps.jsonl`, `samples` those of `samples.jsonl` in order of time.
    `launched_at_seconds` is Unix time.  Samples are restricted to the windows of the slowest
    worker.
    """
    ranks = sorted(ranks, key=lambda rank: rank.rank)
    workers = [rank for rank in ranks if rank.role == "worker"]
    steps_taken, measured = read_steps(steps)
    no_window = _no_window_reason(workers, steps_taken)
    on_cpu = trial.device_type == "cpu"
    peak = peak_of_all(workers, trial.recipe.precision, tf32=trial.recipe.tf32)
    results: dict[str, Result] = {
        "total_seconds": trial_value(total_seconds),
        "epoch_seconds": epoch_seconds(trial, workers, steps_taken, steps_per_epoch, no_window),
        **time_metrics(workers, measured, launched_at_seconds, no_window),
        **rate_metrics(workers, trial.layout, ON_CPU if on_cpu else peak, no_window),
        **memory_metrics(ranks, trial.device_type),
        **communication_metrics(workers),
        **server_metrics(ranks),
        **quality_metrics(workers),
        **error_metrics(ranks),
    }
    windows = windows_of(slowest(workers))
    if windows.spans:
        results |= network_metrics(samples, windows)
        results |= process_metrics(samples, ranks, windows)
        results |= device_metrics(samples, windows, trial.device_type)
    names = dict.fromkeys((*TRIAL_METRICS, *results))
    return split({name: results.get(name, no_window) for name in names})


def _no_window_reason(workers: Sequence[RankRecord], steps_taken: int) -> str:
    if not workers:
        return "no rank that trains left a record"
    empty = [str(rank.rank) for rank in workers if not rank.windows]
    if len(empty) == len(workers):
        return f"all {steps_taken} steps that were taken are warm-up"
    return f"no window was measured on rank {', '.join(empty)}"
