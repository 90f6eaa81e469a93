"""A whole run: plans the trials and runs those without a result.  Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from shardmark.errors import InputError
from shardmark.experiment.matrix import Plan, expand
from shardmark.experiment.schema import Experiment, Trial
from shardmark.launch._engine import Engine
from shardmark.launch.listener import ProgressListener, Silent
from shardmark.launch.local import LocalEngine
from shardmark.launch.trial import TrialRunner
from shardmark.measure.environment import environment
from shardmark.results.schema import Outcome, TrialResult
from shardmark.results.store import EXPERIMENT_FILE, Damaged, RunFolder
from shardmark.strategies import build_strategy
from shardmark.workloads import check_data

GROWING = ("matrix", "limits", "measure.repeats")
"""Keys that may change between two commands on the same folder: trials stay comparable."""


def fresh_folder(name: str) -> Path:
    """A folder for a new run, named after the experiment and the time."""
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    return Path("runs") / f"{name}-{stamp}"


def run_experiment(
    experiment: Experiment,
    out: Path,
    *,
    progress: ProgressListener | None = None,
    retry: bool = False,
    engine: Engine | None = None,
) -> Path:
    """Run every trial that has no result yet; return the run's folder.

    `retry` also repeats failed and timed-out trials.  Raises `InputError` for an experiment or a
    folder that cannot be used, `KeyboardInterrupt` after storing an interrupted trial.
    """
    listener = progress or Silent()
    check_data(experiment.workload)
    folder = RunFolder.create(out)
    _check_same(folder, experiment)
    engine = engine or LocalEngine()
    try:
        machine = engine.machine(experiment.device)
        plan = expand(experiment, machine.device_type)
        for trial in plan.trials:
            if trial.workload != experiment.workload:
                check_data(trial.workload)
        folder.write_experiment(experiment.model_dump(mode="json"))
        folder.write_environment(environment())
        todo = _todo(folder, plan, listener, retry=retry)
        listener.planned(len(plan.trials), len(plan.trials) - len(todo), plan.left_out)
        if todo:
            engine.load(_modules(todo), machine.device_type)
        runner = TrialRunner(engine=engine, machine=machine, folder=folder, listener=listener)
        for order, trial in todo:
            listener.trial_started(order + 1, len(plan.trials), trial)
            result = runner.run(trial, order=order)
            listener.trial_ended(order + 1, len(plan.trials), result)
            if result.outcome is Outcome.INTERRUPTED:
                raise KeyboardInterrupt
    finally:
        engine.close()
    return folder.path


def _todo(
    folder: RunFolder, plan: Plan, listener: ProgressListener, *, retry: bool
) -> list[tuple[int, Trial]]:
    """The trials without a result to believe, each with its place in the random order."""
    todo = []
    for order, trial in enumerate(plan.trials):
        stored = folder.read_result(trial.id, verify=True)
        if isinstance(stored, Damaged):
            listener.note(f"{stored}: it is measured again")
        elif stored is not None and not _again(stored, retry=retry):
            continue
        todo.append((order, trial))
    return todo


def _again(stored: TrialResult, *, retry: bool) -> bool:
    if stored.outcome in (Outcome.INTERRUPTED, Outcome.UNAVAILABLE):
        return True  # not measured; what was missing may be there by now, and asking costs nothing
    return retry and stored.outcome in (Outcome.FAILED, Outcome.TIMED_OUT)


def _modules(todo: list[tuple[int, Trial]]) -> list[str]:
    names: list[str] = []
    for _, trial in todo:
        strategy = build_strategy(trial.strategy.name, trial.strategy.options)
        names += [name for name in strategy.loads() if name not in names]
    return names


def _check_same(folder: RunFolder, experiment: Experiment) -> None:
    """Refuse a folder whose run had another workload, recipe or way of measuring."""
    if not (folder.path / EXPERIMENT_FILE).exists():
        return
    stored = _flat(folder.read_experiment())
    wanted = _flat(experiment.model_dump(mode="json"))
    for key in sorted(stored.keys() | wanted.keys()):
        if key.startswith(GROWING):
            continue
        if stored.get(key) != wanted.get(key):
            raise InputError(
                str(folder.path),
                f"holds a run with {key} = {stored.get(key)!r}, here it is {wanted.get(key)!r}",
                "name another --out",
            )


def _flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, item in value.items():
        if isinstance(item, Mapping) and item:
            flat |= _flat(item, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = item
    return flat
