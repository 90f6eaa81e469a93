"""A whole run: plans the trials and runs those without a result.  Imports no torch."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from shardmark.config.experiment import Experiment
from shardmark.core.errors import InputError
from shardmark.core.machine import Machine
from shardmark.launch.engine import Engine
from shardmark.launch.engines import build_engine
from shardmark.launch.links import measure_run_links
from shardmark.launch.listener import ProgressListener, Silent
from shardmark.launch.trial import TrialRunner
from shardmark.launch.verification import cells_of, id_of, verification_of, verify_cells
from shardmark.measure.system.environment import environment
from shardmark.results.schema import Outcome, TrialResult
from shardmark.results.store import EXPERIMENT_FILE, Damaged, RunFolder
from shardmark.results.verification import (
    Verdict,
    Verification,
    read_verification,
    write_verification,
)
from shardmark.train.checkpoint_folder import check_given
from shardmark.trials.matrix import Plan, expand
from shardmark.trials.trial import Trial
from shardmark.workloads import check_data, task_module

SCRATCH = ".verification"

GROWING = (
    *("matrix", "placement", "engine", "limits"),
    *("measure.repeats", "measure.verify", "measure.link_seconds"),
)
"""Keys that may change between two commands on the same folder: trials stay comparable."""


def run_experiment(
    experiment: Experiment,
    out: Path,
    *,
    plan: Plan | None = None,
    progress: ProgressListener | None = None,
    retry: bool = False,
    engine: Engine | None = None,
) -> Path:
    """Run every trial that has no result yet; return the run's folder.

    `plan` is the experiment's, where it is known already; `retry` also repeats failed and timed-out
    trials.  Raises `InputError` for an experiment or a folder that cannot be used,
    `KeyboardInterrupt` after storing an interrupted trial.
    """
    listener = progress or Silent()
    plan = plan or expand(experiment)
    _check_data(plan)
    RunFolder.check(out)
    _check_same(out, experiment)
    engine = engine or build_engine(experiment, plan, listener.note)
    with closing(engine):
        machine = engine.machine(experiment.device)
        plan = plan.on(machine.device_type)
        folder = RunFolder.create(out)
        folder.write_experiment(experiment.model_dump(mode="json"))
        nodes = engine.environments()
        folder.write_environment(environment() | ({"nodes": nodes} if nodes else {}))
        todo = _todo(folder, plan, listener, retry=retry)
        listener.planned(len(plan.trials), len(plan.trials) - len(todo), plan.left_out)
        if todo:
            trials = [trial for _, trial in todo]
            check_given(trials)
            engine.load(_modules(trials), machine.device_type)
            if experiment.measure.verify:
                _verify(folder, trials, engine, machine, listener)
            measure_run_links(
                folder,
                plan.trials,
                experiment.measure,
                engine=engine,
                machine=machine,
                listener=listener,
            )
        runner = TrialRunner(engine=engine, machine=machine, folder=folder, listener=listener)
        for order, trial in todo:
            listener.trial_started(order + 1, len(plan.trials), trial)
            result = runner.run(trial, order=order)
            listener.trial_ended(order + 1, len(plan.trials), result)
            if result.outcome is Outcome.INTERRUPTED:
                raise KeyboardInterrupt
    return out


def verify_experiment(
    experiment: Experiment,
    scratch: Path,
    *,
    plan: Plan | None = None,
    progress: ProgressListener | None = None,
    engine: Engine | None = None,
) -> Verification:
    """A verdict on every cell of the experiment; nothing is measured.

    Raises `InputError` for an experiment that cannot be used.
    """
    listener = progress or Silent()
    plan = plan or expand(experiment)
    _check_data(plan)
    engine = engine or build_engine(experiment, plan, listener.note)
    with closing(engine):
        machine = engine.machine(experiment.device)
        cells = cells_of(plan.on(machine.device_type).trials)
        engine.load(_modules(cells), machine.device_type)
        verdicts = verify_cells(
            cells, engine=engine, machine=machine, scratch=scratch, listener=listener
        )
        return verification_of(cells, verdicts)


def _check_data(plan: Plan) -> None:
    """Look for the data of every cell, before anything is started."""
    checked: list[object] = []
    for trial in plan.trials:
        if trial.workload not in checked:
            check_data(trial.workload)
            checked.append(trial.workload)


def _verify(
    folder: RunFolder,
    trials: Sequence[Trial],
    engine: Engine,
    machine: Machine,
    listener: ProgressListener,
) -> None:
    """Store a verdict on each cell that has none yet."""
    stored = read_verification(folder.path)
    known = stored.verdicts if stored is not None else ()
    done = {v.id: v for v in known if v.equivalent is not None or v.guarantee is not None}
    cells = cells_of(trials)
    missing = [cell for cell in cells if id_of(cell) not in done]
    if not missing:
        return
    scratch = folder.path / SCRATCH
    shutil.rmtree(scratch, ignore_errors=True)  # an earlier command may have been killed
    fresh: list[Verdict] = []
    try:
        for verdict in verify_cells(
            missing, engine=engine, machine=machine, scratch=scratch, listener=listener
        ):
            fresh.append(verdict)
            if verdict.equivalent is False and verdict.cause is not None and not verdict.tried_as:
                listener.note(f"NOT EQUIVALENT: {verdict.strategy}: {verdict.cause.text}")
    finally:  # after Ctrl-C, too
        made = verification_of(missing, fresh)
        every = (*done.values(), *made.verdicts)
        write_verification(folder.path, made.model_copy(update={"verdicts": every}))


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


def _modules(trials: Sequence[Trial]) -> list[str]:
    """What the trials' ranks import besides what every rank does, each once."""
    names: dict[str, None] = {}
    for trial in trials:
        names |= dict.fromkeys((*trial.built_strategy.loads(), task_module(trial.workload)))
    return list(names)


def _check_same(out: Path, experiment: Experiment) -> None:
    """Refuse a folder whose run had another workload, recipe or way of measuring."""
    if not (out / EXPERIMENT_FILE).exists():
        return
    before = RunFolder(out).read_experiment()
    stored = _flat(before)
    wanted = _flat(experiment.model_dump(mode="json"))
    # An axis's first value stands in the base, too, and its values may come in another order.
    axes = tuple(before.get("matrix", {}).keys() & experiment.matrix.keys())
    for key in sorted(stored.keys() | wanted.keys()):
        if key.startswith((*GROWING, *axes)):
            continue
        if stored.get(key) != wanted.get(key):
            raise InputError(
                str(out),
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
