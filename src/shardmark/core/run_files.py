"""Names and columns of the files that ranks and the sampler write to the run folder."""

from __future__ import annotations

STEPS_FILE = "steps.jsonl"
"""Steps: each line is a JSON object for one step of one rank, with rank, step, epoch, measured,
samples, loss, learning_rate, started_at_seconds (Unix), and `<span>_seconds` for each span (step,
data, forward, backward, optimizer)."""

SAMPLES_FILE = "samples.jsonl"
"""One line a sampling: at_seconds (Unix), `ranks`: one object a rank with rank, pid, cpu_seconds
(user + system, children included), rss_bytes, threads, processes, open_files, context_switches
(voluntary + not, cumulative), network (the same as below, of its own TCP connections: payload
without headers; null where the kernel does not tell), `network`: bytes_sent and bytes_received by
interface (cumulative; InfiniBand's ports and, as `nvlink`, all NVLinks of the devices in use are
among them), `gpus`: one object a CUDA device in use with uuid, utilization_percent, power_watts,
energy_joules (cumulative), temperature_celsius, memory_used_bytes, clock_limits (NVML's bits of
what holds the clocks down), other_processes (that compute on it and are no rank's),
nvlink_sent_bytes and nvlink_received_bytes (cumulative),
`machine`: cores that the ranks may use, and cumulative: cpu_seconds for which these were busy,
cpu_pressure_seconds and memory_pressure_seconds in which some task waited, throttled_seconds in
which heat slowed the CPU; null where the kernel does not tell."""

JOB_FOLDER = "slurm"
"""Scripts and logs of the run's own job; nothing of it is a result."""

LOG_FILE = "log.txt"
TRIAL_FILE = "trial.json"
"""Description of the trial, which the ranks read."""
RESULT_FILE = "result.json"
INITIAL_WEIGHTS_FILE = "initial-weights.bin"
"""Initial weights of a large model; removed after every rank of the node has opened the file."""
JOINED_FILE = "joined-{}.txt"
"""The rank of that number has connected to all others."""
CAPTURED_FILE = "captured.txt"
"""The ranks have captured all that a verification compares."""
LOST_FILE = "lost-{}.txt"
"""Written for a worker that died while the other ranks continued: describes its death."""


def rank_file(rank: int) -> str:
    """Name of the file with the rank's `RankRecord`, until the trial's result is written."""
    return f"rank-{rank}.json"


def rank_steps_file(rank: int) -> str:
    """Name of the file with the rank's lines of `steps.jsonl`."""
    return f"rank-{rank}.steps.jsonl"
