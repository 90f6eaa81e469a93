"""What a run was measured on and what was asked for, and what of it is still missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardmark.core.errors import ShardmarkError
from shardmark.core.strict_yaml import MOST_CHARACTERS
from shardmark.results.files import read_regular
from shardmark.results.store import EXPERIMENT_FILE, RunFolder, StoredRun

_NOT_SHOWN = ("python_executable", "affinity")
"""A path of the machine, and what the number of cores says."""


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
        text = read_regular(run.path / EXPERIMENT_FILE, MOST_CHARACTERS).decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        problem = f"{EXPERIMENT_FILE} cannot be read: {reason}"
    machine = machine_facts(RunFolder(run.path).read_environment())
    return Facts(run=run.name, machine=machine, experiment_yaml=text, problem=problem)


def machine_facts(environment: Mapping[str, Any]) -> dict[str, str]:
    """Each entry of the environment in words; what is not known is left out."""
    facts = {_words(key): _text(key, value) for key, value in environment.items()}
    return {key: text for key, text in facts.items() if text}


def planned_trials(run: StoredRun) -> int | None:
    """How many trials the experiment asks for at least; None where that cannot be told here."""
    from shardmark.config.load import from_mapping
    from shardmark.trials.matrix import expand

    device_types = {trial.trial.get("device_type") for trial in run.trials}
    try:
        experiment = from_mapping(RunFolder(run.path).read_experiment())
        plan = expand(experiment, "cuda" if "cuda" in device_types else "cpu")
    except ShardmarkError:
        return None  # another version's experiment, or no whole file
    return sum(trial.repeat < trial.measure.repeats.at_least for trial in plan.trials)


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
        notes.append(f"{name}{text} `shardmark run` with `--out` and this folder finishes the run.")
    return notes


def _words(key: str) -> str:
    return key if key.isupper() else key.removesuffix("_bytes").replace("_", " ")


def _text(key: str, value: object, depth: int = 5) -> str:
    if value is None or key in _NOT_SHOWN or not depth:
        return ""
    if isinstance(value, Mapping):
        parts = ((_words(name), _text(name, each, depth - 1)) for name, each in value.items())
        return ", ".join(f"{name} {text}" for name, text in parts if text)
    if isinstance(value, list):
        return "; ".join(text for each in value if (text := _text(key, each, depth - 1)))
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float) and key.endswith("_bytes"):
        return f"{value / 2**30:.1f} GiB"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
