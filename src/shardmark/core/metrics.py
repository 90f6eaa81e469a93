"""The catalogue: every metric that a trial or a comparison can have, each defined once.

Tables, docs and reports are made from it.
"""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One line of `shardmark list metrics`."""

    name: str
    unit: str
    """Base units: seconds, bytes, samples/s, FLOP/s, ratio, percent, watts, joules, ..."""
    group: Group
    over: Over
    """How a trial's value comes from its ranks; `trial` where it is not a rank's."""
    better: Better | None
    definition: str
    source: str = ""
    """Where the number is read: clock, allocator, /proc, NVML, ..."""


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

_PROC = "/proc of the rank and its children, sampled from outside"
_NVML = "NVML, sampled from outside"

_memory_metric = partial(Metric, group="memory", unit="bytes", over="maximum", better="lower")
MEMORY = (
    _memory_metric(
        name="peak_memory_bytes",
        definition="Most bytes held by tensors at once.",
        source=f"CUDA allocator in the windows; on a CPU, allocations counted in {_PROBE}",
    ),
    _memory_metric(
        name="peak_reserved_bytes",
        definition="Most bytes that the caching allocator had taken from the device.",
        source="CUDA allocator in the windows",
    ),
    _memory_metric(
        name="parameter_bytes",
        definition="Parameters held by one rank: the larger of two marks, start of the backward"
        " pass and start of the optimizer; each storage counted once.",
        source=_PROBE,
    ),
    _memory_metric(
        name="gradient_bytes",
        definition="Gradients held by one rank: the larger of two marks, start of the backward"
        " pass and start of the optimizer; each storage counted once.",
        source=_PROBE,
    ),
    _memory_metric(
        name="optimizer_state_bytes",
        definition="Optimizer state held by one rank, master weights included: the larger of two"
        " marks, start of the backward pass and start of the optimizer.",
        source=_PROBE,
    ),
    _memory_metric(
        name="activation_peak_bytes",
        definition="peak_memory_bytes minus parameters, gradients and optimizer state: activations,"
        " temporaries and communication buffers.",
        source="derived",
    ),
    _memory_metric(
        name="peak_rss_bytes",
        definition="Largest sampled resident memory of a rank's process and its children.",
        source=_PROC,
    ),
    _memory_metric(
        name="device_used_bytes",
        definition="Largest sampled use of a GPU's memory by everything on it.",
        source=_NVML,
    ),
    _memory_metric(
        name="memory_ratio",
        unit="ratio",
        over="trial",
        definition="peak_memory_bytes over that of the baseline. Exists in a comparison only.",
        source="comparison",
    ),
)

_network_metric = partial(Metric, group="network", unit="bytes", over="trial", better="lower")
NETWORK = (
    _network_metric(
        name="collective_calls",
        unit="calls/step",
        over="maximum",
        definition="Collectives that one rank calls in one step; by kind in the rank records.",
        source=_PROBE,
    ),
    _network_metric(
        name="collective_bytes",
        unit="bytes/step",
        over="maximum",
        definition="Bytes of the tensors that one rank gives to collectives in one step; by kind"
        " in the rank records.",
        source=_PROBE,
    ),
    _network_metric(
        name="network_sent_bytes",
        definition="Sent in the windows over all interfaces of the host, loopback included.",
        source="/proc/net/dev, interpolated to the windows",
    ),
    _network_metric(
        name="network_received_bytes",
        definition="Received in the windows over all interfaces of the host, loopback included.",
        source="/proc/net/dev, interpolated to the windows",
    ),
    _network_metric(
        name="network_bytes_per_second",
        unit="bytes/s",
        better=None,
        definition="Bytes sent in the windows over the windows' seconds.",
        source="/proc/net/dev, interpolated to the windows",
    ),
)

_processes_metric = partial(Metric, group="processes", over="maximum", better=None)
PROCESSES = (
    _processes_metric(
        name="cpu_percent",
        unit="percent",
        over="mean",
        definition="CPU time of a rank and its children over the windows' time; 100 is one core"
        " kept busy.",
        source=_PROC,
    ),
    _processes_metric(
        name="threads",
        unit="threads",
        definition="Most threads sampled in one rank and its children.",
        source=_PROC,
    ),
    _processes_metric(
        name="processes",
        unit="processes",
        over="sum",
        definition="Most processes sampled, all ranks and their children together.",
        source=_PROC,
    ),
    _processes_metric(
        name="open_files",
        unit="files",
        definition="Most open file descriptors sampled in one rank and its children.",
        source=_PROC,
    ),
    _processes_metric(
        name="context_switches",
        unit="switches",
        over="sum",
        better="lower",
        definition="Voluntary and involuntary context switches in the windows, all ranks.",
        source=f"{_PROC}, interpolated to the windows",
    ),
)

_device_metric = partial(Metric, group="device", over="sum", better="lower")
DEVICE = (
    _device_metric(
        name="gpu_utilization",
        unit="percent",
        over="mean",
        better="higher",
        definition="Share of the windows in which a kernel ran on the GPU; says nothing of how"
        " well it ran.",
        source=_NVML,
    ),
    _device_metric(
        name="power_watts",
        unit="watts",
        definition="Mean power in the windows, all GPUs in use together.",
        source=_NVML,
    ),
    _device_metric(
        name="energy_joules",
        unit="joules",
        definition="Energy used in the windows by all GPUs in use.",
        source=f"{_NVML}, interpolated to the windows",
    ),
    _device_metric(
        name="temperature_celsius",
        unit="celsius",
        over="maximum",
        definition="Highest sampled temperature of a GPU in use.",
        source=_NVML,
    ),
)

_OVERLAPS = {
    "": "over IoU 0.5, 0.55, ..., 0.95",
    "_50": "at IoU 0.5",
    "_75": "at IoU 0.75",
}
_quality_metric = partial(Metric, group="quality", over="trial", better="lower")
QUALITY = (
    _quality_metric(
        name="train_loss",
        unit="loss",
        definition="Mean loss of the last epoch's training steps over all ranks.",
        source="training",
    ),
    _quality_metric(
        name="validation_loss",
        unit="loss",
        definition="Mean loss over the whole validation set, each sample once, after the last"
        " epoch.",
        source="evaluation of the assembled model",
    ),
    _quality_metric(
        name="accuracy_top1",
        unit="fraction",
        better="higher",
        definition="Share of the validation set whose class is the model's first guess, 0 to 1.",
        source="evaluation of the assembled model",
    ),
    _quality_metric(
        name="accuracy_top5",
        unit="fraction",
        better="higher",
        definition="Share of the validation set whose class is among the model's first five"
        " guesses, 0 to 1.",
        source="evaluation of the assembled model",
    ),
    *(
        _quality_metric(
            name=f"{prefix}map{suffix}",
            unit="fraction",
            better="higher",
            definition=f"Average precision of {kind} {overlap}, mean over the categories, 0 to 1;"
            " interpolated at 101 recalls, from the best 100 detections of a category in a"
            " picture, as COCO defines it.",
            source="evaluation of the assembled model (Lin et al., arXiv 1405.0312)",
        )
        for prefix, kind in (("", "boxes"), ("mask_", "masks"))
        for suffix, overlap in _OVERLAPS.items()
    ),
)

_server_metric = partial(Metric, group="servers", over="trial", better="lower")
SERVERS = (
    _server_metric(
        name="staleness_mean",
        unit="updates",
        definition="Updates that a server took between handing out parameters and using the"
        " gradient that was computed from them; mean over all gradients.",
        source="parameter servers (Ho et al., NIPS 2013)",
    ),
    _server_metric(
        name="staleness_max",
        unit="updates",
        definition="The stalest gradient that a server used, as staleness_mean.",
        source="parameter servers",
    ),
    _server_metric(
        name="push_count",
        unit="pushes",
        better="higher",
        definition="Gradients that workers sent in the whole training, one for each worker's step.",
        source="parameter servers",
    ),
    _server_metric(
        name="pull_count",
        unit="pulls",
        better="higher",
        definition="Times that workers got parameters in the whole training.",
        source="parameter servers",
    ),
    _server_metric(
        name="push_bytes",
        unit="bytes",
        definition="Gradients that a worker sends in one step, to all servers.",
        source="parameter servers",
    ),
    _server_metric(
        name="pull_bytes",
        unit="bytes",
        definition="Parameters that a worker gets in one step, from all servers.",
        source="parameter servers",
    ),
    _server_metric(
        name="updates_per_second",
        unit="updates/s",
        better="higher",
        definition="Optimizer steps of a server per second of the measured windows.",
        source="parameter servers",
    ),
    _server_metric(
        name="server_wait_seconds",
        unit="seconds",
        definition="Time for which a worker's step waits at the barrier or the bound; mean.",
        source="parameter servers",
    ),
    _server_metric(
        name="lost_samples",
        unit="samples",
        definition="Samples handed to workers which died before they sent a gradient.",
        source="parameter servers",
    ),
)

_errors_metric = partial(Metric, group="errors", over="maximum", better="lower")
ERRORS = (
    _errors_metric(
        name="nonfinite_steps",
        unit="steps",
        definition="Steps of the whole training whose loss was not a finite number.",
        source="training",
    ),
    _errors_metric(
        name="skipped_steps",
        unit="steps",
        definition="Optimizer steps left out because a loss-scaled gradient was not finite.",
        source="strategy",
    ),
    _errors_metric(
        name="data_errors",
        unit="samples",
        over="sum",
        definition="Unreadable samples that were left out, all ranks.",
        source="workload",
    ),
    _errors_metric(
        name="restarts",
        unit="restarts",
        over="trial",
        definition="Times that the launcher started the ranks anew within the trial.",
        source="launcher",
    ),
    _errors_metric(
        name="lost_seconds",
        unit="seconds",
        definition="Wall time that did not bring the training on: over all restarts, from when"
        " training last stood at the step that was gone back to, until it went on from there.",
        source="wall clock of the ranks",
    ),
    _errors_metric(
        name="checkpoint_seconds",
        unit="seconds",
        definition="Time of one checkpoint, in which nobody trains, mean of those kept.",
        source="wall clock, outside the windows",
    ),
    _errors_metric(
        name="checkpoint_bytes",
        unit="bytes",
        definition="Bytes that a rank writes for one checkpoint, mean of those kept; what all ranks"
        " hold alike, the first rank of each node writes.",
        source="size of the files",
    ),
)

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
