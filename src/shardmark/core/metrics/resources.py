"""Metrics of memory, network, processes and devices."""

from __future__ import annotations

from functools import partial

from shardmark.core.metrics.catalogue import Metric

_PROC = "/proc of the rank and its children, sampled from outside"
_NVML = "NVML, sampled from outside"
_PROBE = "untimed steps after the training"

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
