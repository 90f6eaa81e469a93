"""Metrics that the ranks measured themselves: time, rate, memory, collectives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from shardmark.analysis.trial.over_ranks import (
    NO_PROBE,
    ON_CPU,
    Found,
    Result,
    number,
    over_ranks,
    trial_value,
)
from shardmark.analysis.trial.windows import Windows
from shardmark.core.layout import Layout
from shardmark.core.peaks import peak_flops_per_second
from shardmark.results.schema import CollectiveRecord, ProbeRecord, RankRecord

_QUANTILES = {
    "step_seconds": ("step_seconds", 0.5),
    "step_seconds_p95": ("step_seconds", 0.95),
    "step_seconds_p99": ("step_seconds", 0.99),
    "data_seconds": ("data_seconds", 0.5),
    "forward_seconds": ("forward_seconds", 0.5),
    "backward_seconds": ("backward_seconds", 0.5),
    "optimizer_seconds": ("optimizer_seconds", 0.5),
}
_STATE = ("parameter_bytes", "gradient_bytes", "optimizer_state_bytes")


@dataclass(slots=True)
class MeasuredSteps:
    """The measured lines of `steps.jsonl`, read once."""

    steps_taken: int = 0
    """In the whole training, warm-up included."""
    seconds: dict[int, dict[str, list[float]]] = field(default_factory=dict)
    """Rank -> span -> seconds of each measured step."""


def read_steps(lines: Iterable[Mapping[str, object]]) -> MeasuredSteps:
    spans = {span for span, _ in _QUANTILES.values()}
    found = MeasuredSteps()
    for line in lines:
        step, rank = number(line["step"]), number(line["rank"])
        assert step is not None, "a line of steps without its step"
        assert rank is not None, "a line of steps without its rank"
        found.steps_taken = max(found.steps_taken, int(step) + 1)
        if line["measured"] is not True:
            continue
        by_span = found.seconds.setdefault(int(rank), {})
        for span in spans:
            seconds = number(line.get(span))
            if seconds is not None:
                by_span.setdefault(span, []).append(seconds)
    return found


def window_seconds(rank: RankRecord) -> float:
    return sum(window.window_seconds for window in rank.windows)


def _quantile(values: Sequence[float], share: float) -> float:
    """Linear between the two nearest values (definition 7 of Hyndman and Fan, 1996)."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def slowest(workers: Sequence[RankRecord]) -> RankRecord | None:
    """The worker that measured longest; None where some worker measured nothing."""
    if not workers or not all(window_seconds(rank) > 0 for rank in workers):
        return None
    return max(workers, key=window_seconds)


def windows_of(rank: RankRecord | None) -> Windows:
    """In Unix time."""
    found = () if rank is None else rank.windows
    return Windows(
        tuple(
            (one.started_at_seconds, one.started_at_seconds + one.window_seconds) for one in found
        )
    )


def time_metrics(
    workers: Sequence[RankRecord], steps: MeasuredSteps, launched_at_seconds: float, no_window: str
) -> dict[str, Result]:
    """`no_window` says why nothing was measured, for the case that nothing was."""

    def startup(rank: RankRecord) -> Found:
        if rank.first_step_at_seconds is None:
            return f"rank {rank.rank} took no step"
        return rank.first_step_at_seconds - launched_at_seconds

    def quantile(span: str, share: float) -> Callable[[RankRecord], Found]:
        def of(rank: RankRecord) -> Found:
            if slowest(workers) is None:
                return no_window
            seconds = steps.seconds.get(rank.rank, {}).get(span)
            if not seconds:
                return f"rank {rank.rank} marked no {span.removesuffix('_seconds')} span"
            return _quantile(seconds, share)

        return of

    def evaluation(rank: RankRecord) -> Found:
        if not rank.evaluation_seconds:
            return "the validation set was not evaluated"
        return sum(rank.evaluation_seconds) / len(rank.evaluation_seconds)

    results = {
        name: over_ranks(name, workers, quantile(*which)) for name, which in _QUANTILES.items()
    }
    results["startup_seconds"] = over_ranks("startup_seconds", workers, startup)
    results["evaluation_seconds"] = over_ranks("evaluation_seconds", workers, evaluation)
    return results


def epoch_seconds(
    workers: Sequence[RankRecord],
    steps: MeasuredSteps,
    steps_per_epoch: int | None,
    no_window: str,
    *,
    layout: Layout,
    samples_per_step: int | None = None,
) -> Result:
    """Of the slowest rank, from the measured steps; from samples, where ranks take what is left."""
    rank = slowest(workers)
    if rank is None:
        return no_window
    if steps_per_epoch is None:
        return "the number of steps in one epoch is not known"
    taken = steps.steps_taken
    if taken < steps_per_epoch:
        return f"the recipe took {taken} steps, fewer than one epoch ({steps_per_epoch} steps)"
    samples = counted_samples(workers, layout)
    if samples_per_step is not None and samples:
        return trial_value(window_seconds(rank) / samples * samples_per_step * steps_per_epoch)
    measured = sum(window.end_step - window.first_step for window in rank.windows)
    return trial_value(window_seconds(rank) / measured * steps_per_epoch)


def counted_samples(workers: Sequence[RankRecord], layout: Layout) -> int:
    """In the windows; ranks that saw the same samples count once."""
    return sum(rank.samples for rank in workers if layout.ranks[rank.rank].counts_loss)


def rate_metrics(
    workers: Sequence[RankRecord], layout: Layout, peak: Found, no_window: str
) -> dict[str, Result]:
    """`peak` is the FLOP/s of all devices together, or why it is not known."""
    longest = slowest(workers)
    if longest is None:
        names = ("samples_per_second", "samples_per_second_per_rank", "model_flops_per_second")
        return dict.fromkeys((*names, "mfu"), no_window)
    rate = counted_samples(workers, layout) / window_seconds(longest)
    # Workers that died have left their devices.
    devices = layout.devices * len(workers) / len(layout.training_ranks)
    flops = from_probe(workers[0], "flops_per_sample")
    model_flops = flops if isinstance(flops, str) else rate * flops
    return {
        "samples_per_second": trial_value(rate),
        "samples_per_second_per_rank": trial_value(rate / devices),
        "model_flops_per_second": trial_value(model_flops),
        "mfu": trial_value(_ratio(model_flops, peak)),
    }


def _ratio(above: Found, below: Found) -> Found:
    """The reason that is missing below comes first: it holds for every recipe on that device."""
    if isinstance(below, str):
        return below
    return above if isinstance(above, str) else above / below


def peak_of_all(
    workers: Sequence[RankRecord], device_count: int, precision: str, tf32: bool
) -> Found:
    """Dense peak FLOP/s; ranks on one device share it, and a single rank may use several.

    `device_count` is the number of devices that were seen in use, all ranks together.
    """
    names = {rank.device_uuid or f"rank {rank.rank}": rank.device for rank in workers}
    total = 0.0
    for name in names.values():
        peak, reason = peak_flops_per_second(name, precision, tf32=tf32)
        if peak is None:
            return reason
        total += peak
    return total * max(1, device_count) if len(workers) == 1 else total


def memory_metrics(ranks: Sequence[RankRecord], device_type: str) -> dict[str, Result]:
    """Held by tensors, from the allocator or the probe."""

    def peak(rank: RankRecord) -> Found:
        if rank.peak_memory_bytes is not None:
            return rank.peak_memory_bytes
        return from_probe(rank, "peak_memory_bytes")

    def reserved(rank: RankRecord) -> Found:
        if device_type != "cuda":
            return ON_CPU
        found = rank.peak_reserved_bytes
        return f"rank {rank.rank} did not record it" if found is None else found

    def activations(rank: RankRecord) -> Found:
        parts: list[Found] = [peak(rank), *(from_probe(rank, name) for name in _STATE)]
        values = [part for part in parts if not isinstance(part, str)]
        if len(values) < len(parts):
            return next(part for part in parts if isinstance(part, str))
        return max(0.0, values[0] - sum(values[1:]))

    results = {
        name: over_ranks(name, ranks, lambda rank, name=name: from_probe(rank, name))  # type: ignore[misc]  # mypy cannot infer a lambda's default
        for name in _STATE
    }
    results["peak_memory_bytes"] = over_ranks("peak_memory_bytes", ranks, peak)
    results["peak_reserved_bytes"] = over_ranks("peak_reserved_bytes", ranks, reserved)
    results["activation_peak_bytes"] = over_ranks("activation_peak_bytes", ranks, activations)
    return results


def communication_metrics(ranks: Sequence[RankRecord]) -> dict[str, Result]:
    """Per step, all kinds of collectives together."""

    def total(rank: RankRecord, count: Callable[[CollectiveRecord], int]) -> Found:
        if rank.probe is None or rank.probe.collectives is None:
            return _why(rank.probe, "collectives")
        return sum(count(one) for one in rank.probe.collectives.values())

    exposed = "exposed_communication_seconds"
    return {
        "collective_calls": over_ranks(
            "collective_calls", ranks, lambda rank: total(rank, lambda one: one.calls)
        ),
        "collective_bytes": over_ranks(
            "collective_bytes", ranks, lambda rank: total(rank, lambda one: one.payload_bytes)
        ),
        exposed: over_ranks(exposed, ranks, lambda rank: from_probe(rank, exposed)),
    }


def from_probe(rank: RankRecord, name: str) -> Found:
    value = None if rank.probe is None else number(getattr(rank.probe, name))
    return _why(rank.probe, name) if value is None else value


def _why(probe: ProbeRecord | None, name: str) -> str:
    if probe is None:
        return NO_PROBE
    return probe.reasons.get(name, "the untimed steps after the training could not count it")
