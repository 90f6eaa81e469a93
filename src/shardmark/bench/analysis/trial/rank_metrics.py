"""Metrics from the ranks' records: time, rate, memory, collectives, quality, errors."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING

from shardmark.base.layout import Layout
from shardmark.base.metrics import METRICS, NO_PIPELINE, NO_SERVERS, NO_SUCH_METRIC, NOT_COMPILED
from shardmark.base.peaks import peak_flops_per_second
from shardmark.base.results.schema import RankRecord, TrialResult
from shardmark.bench.analysis.trial.over_ranks import (
    ON_CPU,
    Result,
    Value,
    derived,
    over_ranks,
    trial_value,
)
from shardmark.bench.analysis.trial.raw_files import Line, number
from shardmark.bench.analysis.trial.sampled_metrics import Windows

if TYPE_CHECKING:
    from shardmark.ranks.trial import Trial

NO_PROBE = "no untimed steps were taken after the training: the probe was switched off"
TOO_FAST = "more than the peak: the table's peak, or the count of operations, is wrong"
NO_EVALUATION = "the validation set was not evaluated"
EMPTY_EVALUATION = "the validation set is empty, or the task's metrics are"

_QUANTILES = {
    "step_seconds": ("step_seconds", 0.5),
    "step_seconds_p95": ("step_seconds", 0.95),
    "step_seconds_p99": ("step_seconds", 0.99),
    "data_seconds": ("data_seconds", 0.5),
    "forward_seconds": ("forward_seconds", 0.5),
    "backward_seconds": ("backward_seconds", 0.5),
    "optimizer_seconds": ("optimizer_seconds", 0.5),
}
_RATES = (
    *("measured_steps", "samples_per_second", "samples_per_second_per_rank"),
    *("tokens_per_second", "tokens_per_second_per_rank"),
    *("model_flops_per_second", "mfu", "hfu"),
)
_STATE = ("parameter_bytes", "gradient_bytes", "optimizer_state_bytes")
_SERVER_METRICS = tuple(name for name, metric in METRICS.items() if metric.group == "servers")
_EVALUATED = tuple(
    name for name, metric in METRICS.items() if metric.group == "quality" and name != "train_loss"
)
"""Metrics of evaluations; a workload has some of them."""

_PIPELINE = "pipeline_seconds"
"""Span of all passes of a pipeline step, which contains the forward and backward spans."""

SpanSeconds = Mapping[tuple[int, str], Sequence[float]]
"""Seconds of each measured step, by rank and span."""


def read_steps(lines: Iterable[Line]) -> tuple[int, SpanSeconds]:
    """Return the number of steps with the warm-up, and the seconds of the measured steps."""
    spans = {_PIPELINE, *(span for span, _ in _QUANTILES.values())}
    steps_taken = 0
    seconds: dict[tuple[int, str], list[float]] = defaultdict(list)
    for line in lines:
        step, rank = number(line["step"]), number(line["rank"])
        assert step is not None, "a line of steps without its step"
        assert rank is not None, "a line of steps without its rank"
        steps_taken = max(steps_taken, int(step) + 1)
        for span in spans if line["measured"] is True else ():
            duration = number(line.get(span))
            if duration is not None:
                seconds[int(rank), span].append(duration)
    return steps_taken, seconds


def window_seconds(rank: RankRecord) -> float:
    return sum(window.window_seconds for window in rank.windows)


def workers_of(trial: TrialResult) -> list[RankRecord]:
    """Return the ranks that train, in order.  All store the same losses and qualities."""
    ordered = sorted(trial.ranks, key=lambda rank: rank.rank)
    return [rank for rank in ordered if rank.role == "worker"]


def measured_steps(rank: RankRecord) -> int:
    return sum(window.end_step - window.first_step for window in rank.windows)


def slowest(workers: Sequence[RankRecord]) -> RankRecord | None:
    """Return the worker with the longest windows; None if a worker has no window."""
    if not workers or not all(window_seconds(rank) > 0 for rank in workers):
        return None
    return max(workers, key=window_seconds)


def windows_of(rank: RankRecord | None) -> Windows:
    """Return the measured windows of a rank."""
    windows = () if rank is None else rank.windows
    return Windows(
        tuple((w.started_at_seconds, w.started_at_seconds + w.window_seconds) for w in windows)
    )


def time_metrics(
    workers: Sequence[RankRecord], measured: SpanSeconds, launched_at_seconds: float, no_window: str
) -> dict[str, Result]:
    """Time metrics; `no_window` is the reason for missing values if nothing was measured."""
    has_window = slowest(workers) is not None

    def startup(rank: RankRecord) -> Value:
        if rank.first_step_at_seconds is None:
            return f"rank {rank.rank} took no step"
        return rank.first_step_at_seconds - launched_at_seconds

    def compiled(rank: RankRecord, name: str) -> Value:
        value = number(getattr(rank, name))
        return NOT_COMPILED if value is None else value

    def quantile(rank: RankRecord, span: str, share: float) -> Value:
        """Return a quantile of a span, interpolated linearly between the nearest values."""
        if not has_window:
            return no_window
        seconds = sorted(measured.get((rank.rank, span), ()))
        if not seconds:
            return f"rank {rank.rank} marked no {span.removesuffix('_seconds')} span"
        below, part = divmod(share * (len(seconds) - 1), 1)
        pair = seconds[int(below) : int(below) + 2]
        return pair[0] + part * (pair[-1] - pair[0])

    def bubble(rank: RankRecord) -> Value:
        if not has_window:
            return no_window
        passes = sum(measured.get((rank.rank, _PIPELINE), ()))
        computing = (
            measured.get((rank.rank, f"{span}_seconds"), ()) for span in ("forward", "backward")
        )
        return max(0.0, 1 - sum(map(sum, computing)) / passes) if passes else NO_PIPELINE

    return over_ranks(
        workers,
        startup_seconds=startup,
        pipeline_bubble_fraction=bubble,
        evaluation_seconds=lambda rank: (
            fmean(rank.evaluation_seconds) if rank.evaluation_seconds else NO_EVALUATION
        ),
        **{name: partial(compiled, name=name) for name in ("compile_seconds", "recompilations")},
        **{name: partial(quantile, span=s, share=q) for name, (s, q) in _QUANTILES.items()},
    )


def epoch_seconds(
    trial: Trial,
    workers: Sequence[RankRecord],
    steps_taken: int,
    steps_per_epoch: int | None,
    no_window: str,
) -> Result:
    """Return the time of an epoch, from the slowest rank's measured steps."""
    rank = slowest(workers)
    if rank is None:
        return no_window
    if steps_per_epoch is None:
        return "the number of steps in one epoch is not known"
    if steps_taken < steps_per_epoch:
        epoch = f"one epoch ({steps_per_epoch} steps)"
        return f"{steps_taken} steps were taken, fewer than {epoch}"
    measured = float(measured_steps(rank))
    if trial.samples_per_step is not None and (samples := counted_samples(workers, trial.layout)):
        measured = samples / trial.samples_per_step  # ranks may take unequal numbers of steps
    return trial_value(window_seconds(rank) / measured * steps_per_epoch)


def counted_samples(workers: Sequence[RankRecord], layout: Layout) -> int:
    """Return the number of samples in the windows; ranks of one share count once."""
    return sum(rank.samples for rank in workers if layout.ranks[rank.rank].counts_loss)


def rate_metrics(
    workers: Sequence[RankRecord], layout: Layout, peak: Value, no_window: str
) -> dict[str, Result]:
    """Rate metrics and measured_steps.

    `peak` is the FLOP/s of all devices together, or the reason why it is unknown.
    """
    longest = slowest(workers)
    if longest is None:
        return dict.fromkeys(_RATES, no_window)
    seconds = window_seconds(longest)
    rate = counted_samples(workers, layout) / seconds
    # Workers that died have left their devices.
    devices = layout.devices * len(workers) / len(layout.training_ranks)
    tokens = [rank.tokens for rank in workers if layout.ranks[rank.rank].counts_loss]
    counts = [count for count in tokens if count is not None]
    token_rate: Value = sum(counts) / seconds if counts else NO_SUCH_METRIC
    model_flops, hardware_flops = (
        derived(lambda flops: flops * rate, from_probe(workers[0], name))
        for name in ("flops_per_sample", "hardware_flops_per_sample")
    )
    # The reason for an unknown peak comes first: it holds for every recipe on that device.
    mfu, hfu = (
        derived(lambda peak, flops: flops / peak if flops <= peak else TOO_FAST, peak, flops)
        for flops in (model_flops, hardware_flops)
    )
    values = (
        *(min(map(measured_steps, workers)), rate, rate / devices),
        *(token_rate, derived(lambda all_tokens: all_tokens / devices, token_rate)),
        *(model_flops, mfu, hfu),
    )
    return {name: trial_value(value) for name, value in zip(_RATES, values, strict=True)}


def peak_of_all(workers: Sequence[RankRecord], precision: str, *, tf32: bool) -> Value:
    """Return the dense peak FLOP/s of the distinct devices of all workers."""
    names = {
        uuid: rank.device
        for rank in workers
        for uuid in rank.device_uuids or (f"rank {rank.rank}",)
    }
    total = 0.0
    for name in names.values():
        peak, reason = peak_flops_per_second(name, precision, tf32=tf32)
        if peak is None:
            return reason
        total += peak
    return total


def memory_metrics(ranks: Sequence[RankRecord], device_type: str) -> dict[str, Result]:
    """Memory of tensors, from the allocator or the probe."""
    on_device = [rank for rank in ranks if device_type == "cpu" or rank.device != "cpu"]

    def peak(rank: RankRecord) -> Value:
        if rank.peak_memory_bytes is not None:
            return rank.peak_memory_bytes
        return from_probe(rank, "peak_memory_bytes")

    def reserved(rank: RankRecord) -> Value:
        if device_type != "cuda":
            return ON_CPU
        reserved_bytes = rank.peak_reserved_bytes
        return f"rank {rank.rank} did not record it" if reserved_bytes is None else reserved_bytes

    def activations(rank: RankRecord) -> Value:
        state = (from_probe(rank, name) for name in _STATE)
        return derived(lambda peak, *state: max(0.0, peak - sum(state)), peak(rank), *state)

    def on_host(rank: RankRecord) -> Value:
        if device_type != "cuda":
            return ON_CPU
        names = _STATE if rank.device == "cpu" else ("host_state_bytes",)
        return derived(lambda *state: sum(state), *(from_probe(rank, name) for name in names))

    return over_ranks(
        on_device,
        peak_memory_bytes=peak,
        peak_reserved_bytes=reserved,
        activation_peak_bytes=activations,
        **{name: partial(from_probe, name=name) for name in _STATE},
    ) | over_ranks(ranks, host_state_bytes=on_host)


def communication_metrics(ranks: Sequence[RankRecord]) -> dict[str, Result]:
    """Metrics of all collectives of a step."""

    def total(rank: RankRecord, count: str) -> Value:
        collectives = None if rank.probe is None else rank.probe.collectives
        if collectives is None:
            return _not_probed(rank, "collectives")
        return float(sum(getattr(collective, count) for collective in collectives.values()))

    return over_ranks(
        ranks,
        collective_calls=partial(total, count="calls"),
        collective_bytes=partial(total, count="payload_bytes"),
        exposed_communication_seconds=partial(from_probe, name="exposed_communication_seconds"),
    )


def from_probe(rank: RankRecord, name: str) -> Value:
    value = None if rank.probe is None else number(getattr(rank.probe, name))
    return _not_probed(rank, name) if value is None else value


def _not_probed(rank: RankRecord, name: str) -> str:
    if rank.probe is None:
        return NO_PROBE
    return rank.probe.reasons.get(name, "the untimed steps after the training could not count it")


def server_metrics(ranks: Sequence[RankRecord]) -> dict[str, Result]:
    """Metrics from the parameter servers' records; bytes are those of a worker's step."""
    servers = [r.exchange for r in ranks if r.role == "server" and r.exchange is not None]
    if not servers:
        return dict.fromkeys(_SERVER_METRICS, NO_SERVERS)
    workers = [rank for rank in ranks if rank.role == "worker"]
    exchanges = [rank.exchange for rank in workers if rank.exchange is not None]
    pushes = sum(exchange.pushes for exchange in exchanges)
    sent = sum(sum(exchange.sent_bytes.values()) for exchange in exchanges)
    received = sum(sum(exchange.received_bytes.values()) for exchange in exchanges)
    counts: Counter[int] = Counter()
    for server in servers:
        counts.update({int(steps): count for steps, count in server.staleness.items()})
    gradients = counts.total()
    first = servers[0]
    values: dict[str, Value | None] = {
        "staleness_mean": sum(s * n for s, n in counts.items()) / gradients if gradients else None,
        "staleness_max": max(counts, default=None),
        "push_count": first.pushes,
        "pull_count": first.pulls,
        "push_bytes": sent / pushes if pushes else None,
        "pull_bytes": received / pushes if pushes else None,
        "updates_per_second": _updates_per_second(workers),
        "server_wait_seconds": first.wait_seconds / first.pushes if first.pushes else None,
    }
    no_push = "no gradient reached a server"
    return {name: trial_value(value, no_push) for name, value in values.items()}


def _updates_per_second(workers: Sequence[RankRecord]) -> Value:
    """Return the number of updates in the workers' windows over the slowest worker's time."""
    seconds = max(map(window_seconds, workers), default=0.0)
    if not seconds or all(rank.exchange is None for rank in workers):
        return "no window was measured"
    synchronous = workers[0].settings.get("staleness_bound") == 0
    return sum(map(measured_steps, workers)) / (len(workers) if synchronous else 1) / seconds


def quality_metrics(workers: Sequence[RankRecord]) -> dict[str, Result]:
    """Quality metrics of the last epoch that has each, from the first rank's record.

    The user's task can have metrics that are not in the catalogue.
    """
    epochs = workers[0].epochs if workers else ()
    evaluated = [epoch.quality for epoch in epochs if epoch.quality is not None]

    def last(name: str) -> Value:
        if not evaluated:
            return NO_EVALUATION
        if not any(evaluated):
            return EMPTY_EVALUATION
        values = [quality[name] for quality in evaluated if name in quality]
        if not values:
            return NO_SUCH_METRIC
        return "the evaluation gave no finite number" if values[-1] is None else values[-1]

    recorded = dict.fromkeys(name for quality in evaluated for name in quality)
    return {
        "train_loss": trial_value(train_loss(workers, len(epochs) - 1)),
        **{name: trial_value(last(name)) for name in dict.fromkeys((*_EVALUATED, *recorded))},
    }


def train_loss(workers: Sequence[RankRecord], epoch: int) -> Value:
    """Return the mean loss of an epoch's steps over all workers."""
    total = steps = 0.0
    for rank in workers:
        record = rank.epochs[epoch] if 0 <= epoch < len(rank.epochs) else None
        count = record.end_step - record.first_step if record is not None else 0
        if record is None or count == 0:
            continue  # faster workers can process all shares of an epoch
        if record.train_loss is None:
            return "a loss was not a finite number"
        total += record.train_loss * count
        steps += count
    return total / steps if steps else "no epoch ended"


def error_metrics(ranks: Sequence[RankRecord]) -> dict[str, Result]:
    """Return the numbers of steps and samples that failed on the ranks."""
    return over_ranks(
        ranks,
        nonfinite_steps=lambda rank: rank.nonfinite_steps,
        skipped_steps=lambda rank: rank.skipped_steps,
        data_errors=lambda rank: len(rank.data_errors),
    )
