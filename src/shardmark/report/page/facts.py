"""What a run was measured on, and what was asked for, as the report page tells it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardmark.core.errors import ShardmarkError
from shardmark.results.store import EXPERIMENT_FILE, RunFolder, StoredRun

GIB = 2.0**30
UNKNOWN = "not recorded"
COMMIT_LETTERS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """One run's machine and experiment."""

    run: str
    machine: tuple[tuple[str, str], ...]
    """What, and its value."""
    experiment_yaml: str
    """Empty where the file cannot be read; `problem` says why."""
    problem: str


def facts_of(run: StoredRun) -> Facts:
    """From `environment.json` and `experiment.yaml`; whatever is missing there is left out."""
    folder = RunFolder(run.path)
    text, problem = "", ""
    try:
        text = (run.path / EXPERIMENT_FILE).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        problem = f"{EXPERIMENT_FILE} cannot be read: {reason}"
    return Facts(
        run=run.name,
        machine=tuple(machine_facts(folder.read_environment())),
        experiment_yaml=text,
        problem=problem,
    )


def machine_facts(environment: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The lines of the environment's table; nothing is shown for what was not recorded."""
    lines = [
        ("measured", _text(environment.get("date"))),
        ("host", _text(environment.get("host"))),
        ("system", _joined(environment, ("os", "kernel", "architecture"))),
        ("processor", _processor(_mapping(environment.get("cpu")))),
        ("memory", _memory(_mapping(environment.get("memory")))),
        ("GPU", _gpus(_mapping(environment.get("cuda")))),
        ("Python", _text(environment.get("python"))),
        ("Shardmark", _text(environment.get("shardmark"))),
        ("packages", _pairs(_mapping(environment.get("packages")), " ")),
        ("variables", _pairs(_mapping(environment.get("variables")), "=")),
        ("git", _git(_mapping(environment.get("git")))),
        ("load at the start", _load(_mapping(environment.get("load")))),
    ]
    return [(name, value) for name, value in lines if value]


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
        again = "The run is under way, or was ended: the same `shardmark run` command finishes it."
        notes.append(f"{f'{run.name}: ' if len(runs) > 1 else ''}{text} {again}")
    return notes


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _text(value: object) -> str:
    return "" if value is None else str(value)


def _joined(values: Mapping[str, Any], keys: Sequence[str]) -> str:
    return ", ".join(str(values[key]) for key in keys if values.get(key))


def _processor(cpu: Mapping[str, Any]) -> str:
    usable = cpu.get("usable_cores")
    quota = cpu.get("quota_cores")
    parts = [
        _text(cpu.get("model")),
        f"{usable} usable cores" if usable else "",
        f"{cpu['physical_cores']} physical" if cpu.get("physical_cores") else "",
        f"container's quota {quota} cores" if quota else "",
    ]
    return ", ".join(part for part in parts if part)


def _memory(memory: Mapping[str, Any]) -> str:
    named = (
        ("total_bytes", "GiB"),
        ("available_bytes", "GiB available at the start"),
        ("limit_bytes", "GiB container's limit"),
        ("shared_memory_bytes", "GiB shared memory"),
    )
    return ", ".join(f"{memory[key] / GIB:.1f} {text}" for key, text in named if _size(memory, key))


def _size(memory: Mapping[str, Any], key: str) -> bool:
    return isinstance(memory.get(key), int | float)


def _gpus(cuda: Mapping[str, Any]) -> str:
    devices = cuda.get("devices")
    if not isinstance(devices, Sequence) or not devices:
        reason = cuda.get("reason")
        return f"none ({reason})" if reason else ("none" if cuda else "")
    named = []
    for device in map(_mapping, devices):
        size = f" {device['memory_bytes'] / GIB:.0f} GiB" if _size(device, "memory_bytes") else ""
        named.append(f"{device.get('name', UNKNOWN)}{size}")
    driver = cuda.get("driver_version")
    return "; ".join(named) + (f"; driver {driver}" if driver else "")


def _pairs(values: Mapping[str, Any], between: str) -> str:
    return ", ".join(f"{key}{between}{value}" for key, value in values.items() if value is not None)


def _git(git: Mapping[str, Any]) -> str:
    commit = _text(git.get("commit"))[:COMMIT_LETTERS]
    return f"{commit}, with changes that are not committed" if git.get("dirty") else commit


def _load(load: Mapping[str, Any]) -> str:
    average = load.get("average")
    busy = load.get("busy_processes")
    parts = []
    if isinstance(average, Sequence) and all(isinstance(one, int | float) for one in average):
        parts.append("average " + ", ".join(f"{one:.2f}" for one in average))
    if isinstance(busy, Sequence) and busy:
        named = [
            f"{one.get('name')} ({one.get('cpu_percent')} % CPU)" for one in map(_mapping, busy)
        ]
        parts.append(f"other busy processes: {', '.join(named)}")
    return "; ".join(parts)
