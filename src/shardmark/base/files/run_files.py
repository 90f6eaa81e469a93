"""Names and columns of the files that ranks and the sampler write to the run folder."""

from __future__ import annotations

STEPS_FILE = "steps.jsonl"
"""Steps: each line is a JSON object for one step of one rank, with rank, step, epoch, measured,
samples, loss, learning_rate, started_at_seconds (Unix), and `<span>_seconds` for each span (step,
data, forward, backward, optimizer)."""

SAMPLES_FILE = "samples.jsonl"
"""Samples of the system metrics: each line is a JSON object for one time, with

- at_seconds (Unix)
- `ranks`: for each rank pid, cpu_seconds (user and system, with children), rss_bytes, threads,
  processes, open_files, written_bytes (into sockets and files, cumulative) and context_switches
  (voluntary and involuntary, cumulative)
- `network`: cumulative bytes_sent, bytes_received and errors (packets lost or dropped) of each
  interface, including InfiniBand ports and, as `nvlink`, the NVLinks of the devices in use
- `gpus`: for each CUDA device in use uuid, utilization_percent, power_watts, energy_joules
  (cumulative), temperature_celsius, memory_used_bytes, clock_limits (NVML's reasons for reduced
  clocks, as bits), other_processes (that compute on it and are not ranks), nvlink_sent_bytes and
  nvlink_received_bytes (cumulative)
- `machine`: cores that the ranks may use, and cumulative cpu_seconds of these cores,
  cpu_pressure_seconds and memory_pressure_seconds (some task waited), throttled_seconds (heat
  slowed the CPU)

A value that the system does not report is null."""
NVLINK = "nvlink"
"""Name that stands, among the interfaces, for all NVLinks of the devices in use."""
CLOCK_LIMITS = {
    0x08: "the hardware slowed it down",
    0x20: "too hot, by the driver",
    0x40: "too hot, by the hardware",
    0x80: "the power supply's brake",
}
"""Bits of `clock_limits` (NVML's clocks event reasons) that a well-cooled device never has.

The power cap, 0x04, is not among them: a busy device normally reaches it."""

LOG_FILE = "log.txt"
TRIAL_FILE = "trial.json"
"""Description of the trial, which the ranks read."""
RESULT_FILE = "result.json"
INITIAL_WEIGHTS_FILE = "initial-weights.bin"
"""Initial weights of a large model; removed after every rank of the node has opened the file."""
CAPTURED_FILE = "captured.txt"
"""The ranks have captured all that a verification compares."""


def rank_file(rank: int) -> str:
    """Name of the file with the rank's `RankRecord`, until the trial's result is written."""
    return f"rank-{rank}.json"


def rank_steps_file(rank: int) -> str:
    """Name of the file with the rank's lines of `steps.jsonl`."""
    return f"rank-{rank}.steps.jsonl"
