"""Metrics of time and rate."""

from __future__ import annotations

from functools import partial

from shardmark.core.metrics.catalogue import Metric

_WALL = "wall clock of each rank, device idle at both ends of a window"
_SPANS = "marks around the span: CUDA events on a GPU, the host's clock on a CPU"
_PROBE = "untimed steps after the training"

_time_metric = partial(Metric, group="time", unit="seconds", over="maximum", better="lower")
TIME = (
    _time_metric(
        name="startup_seconds",
        definition="From the launch of the trial to the first training step of the slowest rank.",
        source="host clock",
    ),
    _time_metric(
        name="epoch_seconds",
        over="trial",
        definition="Training time of one pass: the windows' seconds over the measured steps, times"
        " the steps of a complete epoch; evaluation excluded. Null when the trial took fewer steps"
        " than one epoch.",
        source=_WALL,
    ),
    _time_metric(
        name="step_seconds",
        definition="One optimizer step: median over the measured steps of the slowest rank.",
        source=_SPANS,
    ),
    _time_metric(
        name="step_seconds_p95",
        definition="95th percentile of step_seconds over the measured steps of the slowest rank.",
        source=_SPANS,
    ),
    _time_metric(
        name="step_seconds_p99",
        definition="99th percentile of step_seconds over the measured steps of the slowest rank.",
        source=_SPANS,
    ),
    _time_metric(
        name="data_seconds",
        definition="Waiting for the batch and moving it to the device: median per measured step.",
        source=_SPANS,
    ),
    _time_metric(
        name="forward_seconds",
        definition="Forward pass and loss, micro-batches added up: median per measured step.",
        source=_SPANS,
    ),
    _time_metric(
        name="backward_seconds",
        definition="Backward pass with the communication that it waits for, micro-batches added"
        " up: median per measured step.",
        source=_SPANS,
    ),
    _time_metric(
        name="optimizer_seconds",
        definition="Clipping, update of the weights and zeroing of the gradients: median per"
        " measured step.",
        source=_SPANS,
    ),
    _time_metric(
        name="exposed_communication_seconds",
        definition="Per step: time in which communication ran and no computation did, from"
        " profiled untimed steps.",
        source=f"profiler, {_PROBE}",
    ),
    _time_metric(
        name="evaluation_seconds",
        definition="One pass over the whole validation set, of the slowest rank.",
        source="host clock",
    ),
    _time_metric(
        name="total_seconds",
        over="trial",
        definition="From the launch of the trial to its end: start-up, training, evaluation and"
        " untimed steps.",
        source="host clock",
    ),
)

_rate_metric = partial(Metric, group="rate", unit="ratio", over="trial", better="higher")
RATE = (
    _rate_metric(
        name="samples_per_second",
        unit="samples/s",
        definition="All ranks' samples in the windows, counted, over the slowest rank's windows.",
        source=_WALL,
    ),
    _rate_metric(
        name="samples_per_second_per_rank",
        unit="samples/s",
        definition="samples_per_second over the number of ranks that train.",
        source=_WALL,
    ),
    _rate_metric(
        name="model_flops_per_second",
        unit="FLOP/s",
        definition="samples_per_second times the floating-point operations of one sample's forward"
        " and backward pass; recomputation does not count.",
        source=f"{_WALL}; operators counted in {_PROBE}",
    ),
    _rate_metric(
        name="mfu",
        definition="Model FLOP/s utilization: model_flops_per_second over the dense peak of all"
        " devices together at the precision. Null where the peak is not known.",
        source="table of vendors' dense peaks",
    ),
    _rate_metric(
        name="speedup",
        definition="samples_per_second over that of the baseline, everything else that varies"
        " being the same. Exists in a comparison only.",
        source="comparison",
    ),
    _rate_metric(
        name="scaling_efficiency",
        definition="Throughput per rank that trains over that of the same strategy at its smallest"
        " world size, or of `single` where there is no smaller one. Exists in a comparison only.",
        source="comparison",
    ),
)
