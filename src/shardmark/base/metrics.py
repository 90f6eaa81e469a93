"""Catalogue of the metrics of trials and comparisons, from which tables and docs are generated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Literal

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


_HOST, _COMPARED = "host clock", "comparison"
FEW_STEPS = 10
"""Tables add a note to a rate from fewer measured steps."""
_WALL = "wall clock of each rank, device idle at both ends of a window"
_SPANS = "marks around the span: CUDA events on a GPU, the host's clock on a CPU"
_PROBE = "untimed steps after the training"
_PROC = "/proc of the rank and its children, sampled from outside"
_NVML = "NVML, sampled from outside"
_TRAFFIC = "/proc/net/dev, interpolated to the windows"
_EVALUATED = "evaluation of the assembled model"
_ONLY_COMPARED = "Exists in a comparison only."
_STATE = "the larger of two marks, start of the backward pass and of the optimizer"
_IOU = {"": "over IoU 0.5, 0.55, ..., 0.95", "_50": "at IoU 0.5", "_75": "at IoU 0.75"}

_time = partial(Metric, source=_SPANS, group="time", over="maximum", better="lower", unit="seconds")
_rate = partial(Metric, source=_WALL, group="rate", over="trial", better="higher", unit="ratio")
_memory = partial(
    Metric, source=_PROBE, group="memory", over="maximum", better="lower", unit="bytes"
)
_network = partial(
    Metric, source=_TRAFFIC, group="network", over="trial", better="lower", unit="bytes"
)
_processes = partial(Metric, source=_PROC, group="processes", over="maximum", better=None)
_device = partial(Metric, source=_NVML, group="device", over="sum", better="lower")
_quality = partial(
    Metric, source=_EVALUATED, group="quality", over="trial", better="higher", unit="fraction"
)
_server = partial(Metric, source="parameter servers", group="servers", over="trial", better="lower")
_error = partial(Metric, source="training", group="errors", over="maximum", better="lower")

_CATALOGUE = (
    _time(
        "startup_seconds",
        "Launch of the trial to the slowest rank's first training step.",
        source=_HOST,
    ),
    _time(
        "epoch_seconds",
        "Training time of one pass: seconds of a measured step times the steps of a complete epoch;"
        " evaluation excluded. Null when the trial took fewer steps than one epoch.",
        source=_WALL,
        over="trial",
    ),
    _time("step_seconds", "One optimizer step: median over the slowest rank's measured steps."),
    _time("step_seconds_p95", "95th percentile of step_seconds, of the slowest rank."),
    _time("step_seconds_p99", "99th percentile of step_seconds, of the slowest rank."),
    _time(
        "data_seconds",
        "Waiting for the batch and moving it to the device: median per measured step.",
    ),
    _time(
        "forward_seconds",
        "Forward pass and loss, micro-batches added up: median per measured step.",
    ),
    _time(
        "backward_seconds",
        "Backward pass with the communication that it waits for, micro-batches added up: median"
        " per measured step.",
    ),
    _time(
        "optimizer_seconds",
        "Clipping, update of the weights and zeroing of the gradients: median per measured step.",
    ),
    Metric(
        "pipeline_bubble_fraction",
        "Part of the passes of all micro-batches in which a rank computes none, but waits, sends or"
        " receives: mean over the ranks. With equal stages (p-1)/(m+p-1) for gpipe and 1f1b.",
        source=_SPANS,
        group="time",
        over="mean",
        better="lower",
        unit="fraction",
    ),
    _time(
        "exposed_communication_seconds",
        "Per step: time in which communication ran and no computation did.",
        source=f"profiler, {_PROBE}",
    ),
    _time(
        "evaluation_seconds",
        "One pass over the whole validation set, of the slowest rank.",
        source=_HOST,
    ),
    _time(
        "total_seconds",
        "Launch of the trial to its end: start-up, training, evaluation and untimed steps.",
        source=_HOST,
        over="trial",
    ),
    _time(
        "compile_seconds",
        "Time that a rank spent in torch.compile, with empty caches at the start of the trial; the"
        " time of `recompilations` is also in the measured steps. Null without recipe.compile.",
        source="host clock around each compilation, as torch reports it",
    ),
    _time(
        "recompilations",
        "Compilations inside the windows: a step of another shape, or too short a warm-up. Null"
        " without recipe.compile.",
        source="counted",
        unit="compilations",
    ),
    _time(
        "measured_steps",
        "Steps in the windows, of the rank with fewest. A rate from under 10 steps is not firm.",
        source="counted",
        over="trial",
        better=None,
        unit="steps",
    ),
    _rate(
        "samples_per_second",
        "All ranks' samples in the windows, counted, over the slowest rank's windows.",
        unit="samples/s",
    ),
    _rate(
        "samples_per_second_per_rank",
        "samples_per_second over the number of ranks that train.",
        unit="samples/s",
    ),
    _rate(
        "tokens_per_second",
        "All ranks' tokens in the windows, padding left out, over the slowest rank's windows.",
        unit="tokens/s",
    ),
    _rate(
        "tokens_per_second_per_rank",
        "tokens_per_second over the number of ranks that train.",
        unit="tokens/s",
    ),
    _rate(
        "model_flops_per_second",
        "samples_per_second times the floating-point operations of one sample's forward and"
        " backward pass; recomputation does not count.",
        source=f"{_WALL}; operators counted in {_PROBE}",
        unit="FLOP/s",
    ),
    _rate(
        "mfu",
        "Model FLOP/s utilization: model_flops_per_second over the dense peak of all devices"
        " together at the precision. Null where the peak is not known.",
        source="table of vendors' dense peaks",
    ),
    _rate(
        "hfu",
        "Hardware FLOP/s utilization: as mfu, and what activation checkpointing computes again"
        " counts. Equal to mfu without it.",
        source="table of vendors' dense peaks (Korthikanti et al., arXiv 2205.05198)",
    ),
    _rate(
        "speedup",
        "samples_per_second over that of the baseline, everything else that varies being the"
        f" same. {_ONLY_COMPARED}",
        source=_COMPARED,
    ),
    _rate(
        "scaling_efficiency",
        "Throughput per rank that trains over that of the same strategy at its smallest world"
        f" size, or of `single` where there is no smaller one. {_ONLY_COMPARED}",
        source=_COMPARED,
    ),
    _memory(
        "peak_memory_bytes",
        "Most bytes held by tensors at once.",
        source=f"CUDA allocator in the windows; on a CPU, allocations counted in {_PROBE}",
    ),
    _memory(
        "peak_reserved_bytes",
        "Most bytes that the caching allocator had taken from the device.",
        source="CUDA allocator in the windows",
    ),
    _memory(
        "parameter_bytes",
        f"Parameters held by one rank: {_STATE}; each storage counted once.",
    ),
    _memory(
        "gradient_bytes",
        f"Gradients held by one rank: {_STATE}; each storage counted once.",
    ),
    _memory(
        "optimizer_state_bytes",
        f"Optimizer state held by one rank, master weights included: {_STATE}.",
    ),
    _memory(
        "host_state_bytes",
        "Parameters, gradients and optimizer state that a rank of a GPU trial holds in host memory:"
        " offloaded, or on a server without a GPU. They are in no other of these metrics.",
    ),
    _memory(
        "activation_peak_bytes",
        "peak_memory_bytes minus parameters, gradients and optimizer state: activations,"
        " temporaries and communication buffers.",
        source="derived",
    ),
    _memory(
        "parameters",
        f"Number of parameters of the full model. {_ONLY_COMPARED}",
        over="trial",
        better=None,
        unit="parameters",
    ),
    _memory(
        "peak_rss_bytes",
        "Largest sampled resident memory of a rank's process and its children.",
        source=_PROC,
    ),
    _memory(
        "device_used_bytes",
        "Largest sampled use of a GPU's memory by everything on it.",
        source=_NVML,
    ),
    _memory(
        "memory_ratio",
        f"peak_memory_bytes over that of the baseline. {_ONLY_COMPARED}",
        source=_COMPARED,
        over="trial",
        unit="ratio",
    ),
    _network(
        "collective_calls",
        "Collectives that one rank calls in one step; by kind in the rank records.",
        source=_PROBE,
        over="maximum",
        unit="calls/step",
    ),
    _network(
        "collective_bytes",
        "Bytes of the tensors that one rank gives to collectives in one step; by kind in the rank"
        " records.",
        source=_PROBE,
        over="maximum",
        unit="bytes/step",
    ),
    _network(
        "network_sent_bytes",
        "Sent in the windows over all interfaces of the host, by every program on it; InfiniBand"
        " and NVLink are included where they have counters.",
    ),
    _network("network_received_bytes", "Received in the windows, as network_sent_bytes."),
    _network(
        "network_bytes_per_second",
        "Bytes sent in the windows over the windows' seconds.",
        better=None,
        unit="bytes/s",
    ),
    _processes(
        "cpu_percent",
        "CPU time of a rank and its children over the windows' time; 100 is one busy core.",
        over="mean",
        unit="percent",
    ),
    _processes("threads", "Most threads sampled in one rank and its children.", unit="threads"),
    _processes(
        "processes",
        "Most processes sampled, all ranks and their children together.",
        over="sum",
        unit="processes",
    ),
    _processes(
        "open_files",
        "Most open file descriptors sampled in one rank and its children.",
        unit="files",
    ),
    _processes(
        "context_switches",
        "Voluntary and involuntary context switches in the windows, all ranks.",
        source=f"{_PROC}, interpolated to the windows",
        over="sum",
        better="lower",
        unit="switches",
    ),
    _device(
        "gpu_utilization",
        "Share of the windows in which a kernel ran on the GPU, however well it used the GPU.",
        over="mean",
        better="higher",
        unit="percent",
    ),
    _device("power_watts", "Mean power in the windows, all GPUs in use together.", unit="watts"),
    _device(
        "energy_joules",
        "Energy used in the windows by all GPUs in use.",
        source=f"{_NVML}, interpolated to the windows",
        unit="joules",
    ),
    _device(
        "temperature_celsius",
        "Highest sampled temperature of a GPU in use.",
        over="maximum",
        unit="celsius",
    ),
    _quality(
        "train_loss",
        "Mean loss of the last epoch's training steps over all ranks.",
        source="training",
        better="lower",
        unit="loss",
    ),
    _quality(
        "validation_loss",
        "Mean loss over the whole validation set, each sample once, after the last epoch.",
        better="lower",
        unit="loss",
    ),
    _quality(
        "bits_per_byte",
        "Bits that the model needs for a byte of the validation text: its loss in bits per token,"
        " times the text's tokens per byte. Tokens that are never predicted count like the mean."
        " The same measure for every tokenizer.",
        better="lower",
        unit="bits/byte",
    ),
    _quality(
        "perplexity",
        "Exponential of the validation loss per predicted token.",
        better="lower",
        unit="perplexity",
    ),
    _quality(
        "accuracy_top1", "Share of the validation set whose class is the first guess, 0 to 1."
    ),
    _quality(
        "accuracy_top5",
        "Share of the validation set whose class is among the first five guesses, 0 to 1.",
    ),
    *(
        _quality(
            f"{prefix}map{suffix}",
            f"Average precision of {kind} {overlap}, mean over the categories, 0 to 1; interpolated"
            " at 101 recalls, from the best 100 detections of a category in a picture, as COCO"
            " defines it.",
            source=f"{_EVALUATED} (Lin et al., arXiv 1405.0312)",
        )
        for prefix, kind in (("", "boxes"), ("mask_", "masks"))
        for suffix, overlap in _IOU.items()
    ),
    _server(
        "staleness_mean",
        "Updates that a server took between handing out parameters and using the gradient that was"
        " computed from them; mean over all gradients.",
        source="parameter servers (Ho et al., NIPS 2013)",
        unit="updates",
    ),
    _server("staleness_max", "The stalest gradient used, as staleness_mean.", unit="updates"),
    _server(
        "push_count",
        "Gradients that workers sent in the whole training, one for each worker's step.",
        better="higher",
        unit="pushes",
    ),
    _server(
        "pull_count",
        "Times that workers got parameters in the whole training.",
        better="higher",
        unit="pulls",
    ),
    _server("push_bytes", "Gradients that a worker sends in one step, all servers.", unit="bytes"),
    _server("pull_bytes", "Parameters that a worker gets in one step, all servers.", unit="bytes"),
    _server(
        "updates_per_second",
        "Optimizer steps of a server per second of the measured windows.",
        better="higher",
        unit="updates/s",
    ),
    _server(
        "server_wait_seconds",
        "Time for which a worker's step waits at the barrier or the bound; mean.",
        unit="seconds",
    ),
    _error(
        "nonfinite_steps",
        "Steps of the whole training whose loss was not a finite number.",
        unit="steps",
    ),
    _error(
        "skipped_steps",
        "Optimizer steps left out because a loss-scaled gradient was not finite.",
        source="strategy",
        unit="steps",
    ),
    _error(
        "data_errors",
        "Unreadable samples that were left out, all ranks.",
        source="workload",
        over="sum",
        unit="samples",
    ),
)

METRICS: Mapping[str, Metric] = MappingProxyType({metric.name: metric for metric in _CATALOGUE})
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
QUALITIES = (
    "accuracy_top1",
    "map",
    "bits_per_byte",
    "perplexity",
    "validation_loss",
    "train_loss",
)
"""Quality metrics in order of preference, among those that most rows have."""

COMPARISON_METRICS = frozenset({"speedup", "scaling_efficiency", "memory_ratio", "parameters"})
"""Metrics of a comparison's rows, which trials do not have; `analysis.compare` computes them."""

TRIAL_METRICS = tuple(name for name in METRICS if name not in COMPARISON_METRICS)
"""Metrics in `TrialResult.metrics`: each is a value, or None with a reason in `missing`."""
