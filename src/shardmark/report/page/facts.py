"""What a run was measured on, what was asked for and how it was measured, for the report page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardmark.analysis.compare.rows import Row
from shardmark.core.errors import ShardmarkError
from shardmark.core.metrics import METRICS, Metric
from shardmark.results.store import EXPERIMENT_FILE, RunFolder, StoredRun

GIB = 2.0**30
COMMIT_LETTERS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """One run's machine and experiment."""

    run: str
    machine: Mapping[str, str]
    """What, and its value; nothing for what was not recorded."""
    experiment_yaml: str
    """Empty where the file cannot be read; `problem` says why."""
    problem: str


def facts_of(run: StoredRun) -> Facts:
    """From `environment.json` and `experiment.yaml`."""
    text, problem = "", ""
    try:
        text = (run.path / EXPERIMENT_FILE).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        problem = f"{EXPERIMENT_FILE} cannot be read: {reason}"
    machine = machine_facts(RunFolder(run.path).read_environment())
    return Facts(run=run.name, machine=machine, experiment_yaml=text, problem=problem)


def machine_facts(environment: Mapping[str, Any]) -> dict[str, str]:
    """The environment's table; whatever is not there, or is something else, is left out."""
    part = {key: _mapping(environment.get(key)) for key in environment}
    cpu, memory, cuda = (part.get(key, {}) for key in ("cpu", "memory", "cuda"))
    git, load = part.get("git", {}), part.get("load", {})
    commit = str(git.get("commit") or "")[:COMMIT_LETTERS]
    lines = {
        "measured": _text(environment.get("date")),
        "host": _text(environment.get("host")),
        "system": _listed(environment.get(key) for key in ("os", "kernel", "architecture")),
        "processor": _listed(
            [
                cpu.get("model"),
                _counted(cpu, "usable_cores", "usable cores"),
                _counted(cpu, "physical_cores", "physical"),
                _counted(cpu, "quota_cores", "cores of the container's quota"),
            ]
        ),
        "memory": _listed(
            [
                _gib(memory, "total_bytes", "GiB"),
                _gib(memory, "available_bytes", "GiB available at the start"),
                _gib(memory, "limit_bytes", "GiB container's limit"),
                _gib(memory, "shared_memory_bytes", "GiB shared memory"),
            ]
        ),
        "GPU": _gpus(cuda),
        "Python": _text(environment.get("python")),
        "Shardmark": _text(environment.get("shardmark")),
        "packages": _pairs(part.get("packages", {}), " "),
        "variables": _pairs(part.get("variables", {}), "="),
        "git": f"{commit}, with changes that are not committed" if git.get("dirty") else commit,
        "load at the start": _load(load),
    }
    return {name: value for name, value in lines.items() if value}


def planned_trials(run: StoredRun) -> int | None:
    """How many trials the run's experiment asks for; None where that cannot be told here."""
    from shardmark.config.load import from_mapping
    from shardmark.trials.matrix import expand

    device_types = {trial.trial.get("device_type") for trial in run.trials}
    try:
        experiment = from_mapping(RunFolder(run.path).read_experiment())
        plan = expand(experiment, "cuda" if "cuda" in device_types else "cpu")
    except ShardmarkError:
        return None  # another version's experiment, or no whole file
    return len(plan.trials)


def progress_notes(runs: Sequence[StoredRun]) -> list[str]:
    """What of each run has no result yet."""
    notes = []
    for run in runs:
        planned = planned_trials(run)
        begun = f"; begun without a result: {', '.join(run.missing)}" if run.missing else ""
        if planned is not None and len(run.trials) < planned:
            text = f"{len(run.trials)} of {planned} planned trials have a result{begun}."
        elif run.missing:
            text = f"The run is not complete{begun}."
        else:
            continue
        name = f"{run.name}: " if len(runs) > 1 else ""
        notes.append(f"{name}{text} The same `shardmark run` command finishes the run.")
    return notes


def definitions(rows: Sequence[Row]) -> list[Metric]:
    """The catalogue's entries for what is not missing everywhere."""
    return [
        metric
        for metric in METRICS.values()
        if any(row.metrics.get(metric.name) is not None for row in rows)
    ]


def method(runs: Sequence[StoredRun]) -> dict[str, str]:
    """Trials, windows, repeats and intervals in sentences, with the runs' own settings."""
    measures = [_measure(run) for run in runs]
    warmup = _numbers(measures, "warmup_steps")
    repeats = _numbers(measures, "repeats")
    steps = f"the first {warmup} steps of a trial" if warmup else "the warm-up steps of a trial"
    times = f"{repeats} times" if repeats not in ("", "1") else "once"
    return {
        "Trials": "A trial is one cell of the experiment's matrix in fresh processes. Each cell is"
        f" run {times}. Repeats are interleaved in a recorded random order, so that a machine that"
        " slowly warms up favours nobody.",
        "Windows": f"Times and rates come from windows of consecutive steps; {steps} belong to"
        " none. Evaluation lies between windows, and the device is idle at both ends. A rate is the"
        " samples of all ranks over the time of the slowest rank.",
        "Intervals": "A number is the mean over the repeats that ended ok; ± is half of its 95 %"
        " interval. Ratios to the baseline are taken between trials of the same repeat. A single"
        " repeat has no interval and decides nothing.",
        "Memory": "The peak is held by tensors: on a GPU the allocator's in the windows, on a CPU"
        " counted in an untimed step after the training. State is parameters, gradients and"
        " optimizer state of the fullest rank.",
        "Equivalence": "A few steps of every strategy are compared with one process that plays all"
        " ranks in turn: same weights, same samples; losses, gradients and parameters may differ by"
        " what rounding can make.",
    }


def _measure(run: StoredRun) -> Mapping[str, Any]:
    """The experiment's `measure`; empty where it cannot be read."""
    try:
        return _mapping(RunFolder(run.path).read_experiment().get("measure"))
    except ShardmarkError:
        return {}


def _numbers(measures: Sequence[Mapping[str, Any]], key: str) -> str:
    """All of them, such as `3` or `3 or 5`; empty where none is known."""
    known = sorted({int(one[key]) for one in measures if isinstance(one.get(key), int)})
    return " or ".join(map(str, known))


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _text(value: object) -> str:
    return "" if value is None else str(value)


def _listed(values: Any) -> str:
    return ", ".join(str(value) for value in values if value)


def _counted(values: Mapping[str, Any], key: str, what: str) -> str:
    return f"{values[key]} {what}" if values.get(key) else ""


def _gib(values: Mapping[str, Any], key: str, what: str) -> str:
    size_bytes = values.get(key)
    return f"{size_bytes / GIB:.1f} {what}" if isinstance(size_bytes, int | float) else ""


def _gpus(cuda: Mapping[str, Any]) -> str:
    devices = cuda.get("devices")
    if not isinstance(devices, Sequence) or not devices:
        reason = cuda.get("reason")
        return f"none ({reason})" if reason else ("none" if cuda else "")
    named = [
        " ".join(filter(None, [_text(gpu.get("name")), _gib(gpu, "memory_bytes", "GiB")]))
        for gpu in map(_mapping, devices)
    ]
    driver = cuda.get("driver_version")
    return "; ".join(filter(None, [*named, f"driver {driver}" if driver else ""]))


def _pairs(values: Mapping[str, Any], between: str) -> str:
    return ", ".join(f"{key}{between}{value}" for key, value in values.items() if value is not None)


def _load(load: Mapping[str, Any]) -> str:
    average, busy = load.get("average"), load.get("busy_processes")
    parts = []
    if isinstance(average, Sequence) and all(isinstance(one, int | float) for one in average):
        parts.append("average " + ", ".join(f"{one:.2f}" for one in average))
    if isinstance(busy, Sequence) and busy:
        named = [f"{p.get('name')} ({p.get('cpu_percent')} % CPU)" for p in map(_mapping, busy)]
        parts.append(f"other busy processes: {', '.join(named)}")
    return "; ".join(parts)
