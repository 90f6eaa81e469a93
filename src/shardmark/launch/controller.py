"""A whole run: plans the trials and runs those without a result.  Imports no torch."""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from shardmark.config.experiment import Experiment
from shardmark.core.durations import duration
from shardmark.core.errors import InputError, StorageError, StrategyUnavailable
from shardmark.core.run_files import TRIAL_FILE
from shardmark.core.storage import storing
from shardmark.launch import fingerprint
from shardmark.launch.agenda import Agenda, cell_of
from shardmark.launch.engine import Engine
from shardmark.launch.engines import build_engine
from shardmark.launch.estimate import time_lines
from shardmark.launch.links import measure_run_links
from shardmark.launch.listener import ProgressListener, Silent
from shardmark.launch.trial import TrialRunner
from shardmark.launch.trial_artifacts import clear
from shardmark.launch.verification import cells_of, verification_of, verify_cells
from shardmark.measure.system.environment import environment, occupied_devices
from shardmark.results.fingerprint import Fingerprint
from shardmark.results.schema import NOT_MEASURED, Outcome, TrialResult
from shardmark.results.store import EXPERIMENT_FILE, Damaged, RunFolder, has_results
from shardmark.results.verification import (
    VERIFICATION_FILE,
    Verdict,
    Verification,
    read_verification,
    write_verification,
)
from shardmark.trials.matrix import Plan, expand
from shardmark.trials.trial import Trial
from shardmark.workloads import check_data, task_modules
from shardmark.workloads.models import user_function_problem

SCRATCH = ".verification"

GROWING = (
    *("matrix", "placement", "engine", "limits", "measure.repeats", "measure.max_remeasure"),
    *("measure.verify", "measure.link_seconds", "measure.twin"),
)
"""Keys that may change between two commands on the same folder: trials stay comparable."""
VERIFYING_SHARE = 0.2
"""Of a run's time: where verification takes more, the run says so."""


def run_experiment(
    experiment: Experiment,
    out: Path,
    *,
    plan: Plan | None = None,
    progress: ProgressListener | None = None,
    retry: bool = False,
    remeasure: bool = False,
    budget_seconds: float | None = None,
    engine: Engine | None = None,
) -> Path:
    """Run every trial that has no result yet; return the run's folder.

    `plan` is the experiment's, where it is known already; `retry` also repeats failed, timed-out
    and disturbed trials; `remeasure` keeps what is there aside and measures everything anew; no
    trial is begun that the budget has no time for.  Raises `InputError` for an experiment or a
    folder that cannot be used, `StorageError` for a disk that takes no more,
    `KeyboardInterrupt` after storing an interrupted trial.
    """
    began = time.monotonic()
    listener = progress or Silent()
    plan = plan or expand(experiment)
    with taken_up(experiment, plan, out, listener, remeasure=remeasure, engine=engine) as (
        placed,
        runner,
    ):
        agenda = Agenda(
            placed,
            experiment.measure.repeats,
            _results(runner.folder, placed, listener, retry=retry),
            budget_seconds=budget_seconds,
            began=began,
        )
        _run(experiment, placed, agenda, runner)
    return out


@contextmanager
def taken_up(
    experiment: Experiment,
    plan: Plan,
    out: Path,
    listener: ProgressListener,
    *,
    remeasure: bool = False,
    engine: Engine | None = None,
) -> Iterator[tuple[Plan, TrialRunner]]:
    """The plan on this machine's devices, and what runs its trials into the folder; locked, and
    refused where something else was trained in it."""
    check_plan(plan)
    trained = fingerprint.fingerprint_of(plan.trials)
    check_folder(out, experiment, trained, remeasure=remeasure)
    engine = engine or build_engine(experiment, plan, listener.note)
    with closing(engine):
        listener.doing("loading torch")
        machine = engine.machine(experiment.device)
        plan = plan.on(machine.device_type)
        folder = RunFolder.create(out)
        with storing(out), folder.locked(listener.note):
            # Another command may have made the run, or gone on with it, meanwhile.
            check_folder(out, experiment, trained, remeasure=remeasure)
            here, nodes = environment(), engine.environments()
            if machine.device_type == "cuda":
                here["libraries"] = dict(machine.libraries)
                for place in nodes or [here]:
                    for told in occupied_devices(place):
                        listener.note(f"node {place['node']}: {told}" if nodes else told)
            trained = trained.merged(fingerprint.versions_of([here, *nodes]))
            if remeasure and ((out / EXPERIMENT_FILE).exists() or has_results(out)):
                listener.note(f"what was measured is kept in {folder.set_run_aside()}")
                shutil.rmtree(out / SCRATCH, ignore_errors=True)  # captures of what was
            fingerprint.refuse_changes(out, trained)
            folder.write_experiment(experiment.model_dump(mode="json"))
            folder.write_environment(here | ({"nodes": nodes} if nodes else {}))
            fingerprint.note(folder, trained)
            yield (
                plan,
                TrialRunner(engine=engine, machine=machine, folder=folder, listener=listener),
            )


def verify_experiment(
    experiment: Experiment,
    scratch: Path,
    *,
    plan: Plan | None = None,
    progress: ProgressListener | None = None,
    engine: Engine | None = None,
    store: bool = False,
) -> Verification:
    """A verdict on every cell of the experiment; nothing is measured.

    Runs of the same content take over what it stores.  Raises `InputError` for an experiment that
    cannot be used.
    """
    listener = progress or Silent()
    plan = plan or expand(experiment)
    for _ in _training_samples(plan.trials):
        pass
    engine = engine or build_engine(experiment, plan, listener.note)
    with closing(engine):
        listener.doing("loading torch")
        machine = engine.machine(experiment.device)
        cells = cells_of(plan.on(machine.device_type).trials)
        proofs = _proofs(plan, engine)
        engine.load(modules_of(cells), machine.device_type)
        verdicts = verify_cells(
            cells, engine=engine, machine=machine, scratch=scratch, listener=listener
        )
        made = verification_of(cells, verdicts)
        if store and proofs == _proofs(plan, engine):  # nothing has changed meanwhile
            with suppress(OSError, StorageError):
                proofs.mkdir(parents=True, exist_ok=True)
                every = {verdict.id: verdict for verdict in (*_proven(proofs), *made.verdicts)}
                write_verification(proofs, made.model_copy(update={"verdicts": (*every.values(),)}))
        return made


def _proofs(plan: Plan, engine: Engine) -> Path:
    return fingerprint.proofs_folder(plan.trials, [environment(), *engine.environments()])


def check_plan(plan: Plan) -> None:
    """Raise `DataError` or `InputError` for what cannot be measured, before anything is started."""
    for trial, samples in _training_samples(plan.trials):
        recipe, warmup_steps = trial.recipe, trial.measure.warmup_steps
        if samples is not None and samples < trial.batch_per_step:
            key = "per_rank_batch" if recipe.global_batch is None else "global_batch"
            raise InputError(
                f"{trial.experiment}: recipe.{key}",
                f"{trial.batch_per_step} samples a step, and {samples} to train on",
                "give a smaller batch, or more data",
            )
        steps = _steps_of(trial, samples)
        if steps is not None and steps <= warmup_steps:
            raise InputError(
                f"{trial.experiment}: measure.warmup_steps",
                f"{warmup_steps} steps of warm-up, and {steps} in all ({trial.title})",
                "nothing would be measured: train for longer, or warm up for fewer steps",
            )


def check_schedules(plan: Plan) -> None:
    """Raise `InputError` for a schedule of the user's own that fails in any step; loads torch for
    one."""
    checked: list[tuple[object, ...]] = []
    for trial, samples in _training_samples(plan.trials):
        schedule, steps = trial.recipe.schedule, _steps_of(trial, samples)
        asked = (schedule, trial.recipe.optimizer.lr, steps)
        if schedule.path is None or steps is None or asked in checked:
            continue
        from shardmark.train.schedule import own_rates

        own_rates(schedule, trial.recipe.optimizer.lr, max(1, steps - schedule.warmup_steps))
        checked.append(asked)


def refused_models(trials: Iterable[Trial]) -> dict[str, StrategyUnavailable]:
    """By id, the trials whose strategy cannot divide the model; loads torch where one has to.

    A model that cannot be built without its weights, and data that are not there, are left to the
    ranks.
    """
    built: list[tuple[object, Any, Any]] = []
    refused = {}
    for trial in trials:
        layout = trial.layout
        if layout.tensor * layout.pipeline * layout.sequence == 1 or trial.workload.fetches_data:
            continue
        if all(options != trial.workload for options, *_ in built):
            from shardmark.strategies.initial_weights import build_on_meta
            from shardmark.workloads import build_workload

            workload = build_workload(trial.workload, trial.recipe.seed)
            built.append((trial.workload, workload, build_on_meta(workload)))
        workload, model = next(made for options, *made in built if options == trial.workload)
        try:
            if model is not None:
                trial.built_strategy.check_model(workload, model, trial.world_size, trial.nodes)
        except StrategyUnavailable as error:
            refused[trial.id] = error
    return refused


def _steps_of(trial: Trial, samples: int | None) -> int | None:
    """Optimizer steps of the trial on so many training samples; None if the ranks alone know."""
    recipe = trial.recipe
    if recipe.steps is not None or samples is None:
        return recipe.steps
    return (recipe.epochs or 0) * (samples // trial.batch_per_step)


def check_folder(
    out: Path, experiment: Experiment, trained: Fingerprint, *, remeasure: bool = False
) -> None:
    """Raise `InputError` for a folder that the run must not go on with."""
    RunFolder.check(out)
    if not remeasure:
        _check_same(out, experiment)
        fingerprint.refuse_changes(out, trained)


def _training_samples(trials: Iterable[Trial]) -> Iterator[tuple[Trial, int | None]]:
    """How many samples each trial trains on, if known; data sets and the recipe's own code are
    looked for once."""
    known: list[tuple[object, int | None]] = []
    checked: set[str | None] = {None}
    for trial in trials:
        for key in ("optimizer", "schedule"):
            path = getattr(trial.recipe, key).path
            if path not in checked and (problem := user_function_problem(path)):
                place = f"{trial.experiment}: recipe.{key}.path"
                raise InputError(place, f"{path}: {problem}", "package.module:name")
            checked.add(path)
        if all(workload != trial.workload for workload, _ in known):
            known.append((trial.workload, check_data(trial.workload)))
        yield trial, next(count for workload, count in known if workload == trial.workload)


def _run(experiment: Experiment, plan: Plan, agenda: Agenda, runner: TrialRunner) -> None:
    """Verify and measure what is to do, and tell what was left out."""
    engine, machine, listener = runner.engine, runner.machine, runner.listener
    trials = [trial for _, trial in agenda.todo]
    finished = len(agenda.results)
    listener.planned(finished + len(trials), finished, plan.left_out)
    if not trials:
        return
    out, verify = runner.folder.path, experiment.measure.verify
    for line in time_lines(trials, out, agenda.budget_seconds, verify=verify):
        listener.note(line)
    engine.load(modules_of(trials), machine.device_type)
    began = time.monotonic()
    if verify:
        proofs = _proofs(plan, engine)
        _verify([trial for trial in trials if not trial.twin], runner, proofs)
    shutil.rmtree(runner.folder.path / SCRATCH, ignore_errors=True)  # of a killed command
    verified_seconds = time.monotonic() - began
    measure_run_links(
        runner.folder,
        plan.trials,
        experiment.measure,
        engine=engine,
        machine=machine,
        listener=listener,
    )
    _measure(agenda, runner)
    share = verified_seconds / (time.monotonic() - began)
    if share > VERIFYING_SHARE:
        listener.note(
            f"verification took {duration(verified_seconds)}, {100 * share:.0f} % of the time:"
            " trials are few or short (measure.verify=false leaves it out)"
        )


def _measure(agenda: Agenda, runner: TrialRunner) -> None:
    """Run one trial after the other, those that other work disturbs again."""
    folder, listener = runner.folder, runner.listener
    stays_busy = False
    while (upcoming := agenda.next()) is not None:
        order, trial = upcoming
        fingerprint.refuse_changes(folder.path, fingerprint.sources_of([trial]))
        number = len(agenda.results) + 1
        total = number - 1 + len(agenda.todo)
        listener.trial_started(number, total, trial)
        attempts = 1 if stays_busy else 1 + trial.measure.max_remeasure
        for attempt in range(1, attempts + 1):
            result = runner.run(trial, order=order, attempt=attempt)
            last = attempt == attempts or not agenda.has_seconds(result.total_seconds)
            if result.disturbed is None or last:
                break
            listener.note(
                f"{trial.title}: {result.disturbed}; measured again, up to"
                f" {trial.measure.max_remeasure} times (measure.max_remeasure)"
            )
        # On a machine that stays busy, all that follow would be measured in vain several times.
        stays_busy = result.disturbed is not None
        agenda.results[trial.id] = result
        listener.trial_ended(number, total, result)
        if result.outcome is Outcome.INTERRUPTED:
            raise KeyboardInterrupt
    ended = {"known well enough": agenda.known, "failed or disturbed too often": agenda.hopeless}
    if reasons := [f"{len(cells)} {why}" for why, cells in ended.items() if cells]:
        listener.note(f"cells that need no more repeats: {', '.join(reasons)}")
    if left := agenda.todo:
        cells = Counter(trial.title for _, trial in left)
        listed = ", ".join(f"{title} ({count})" for title, count in cells.items())
        listener.note(f"the budget has no time for {len(left)} trials: {listed}")


def _verify(trials: Sequence[Trial], runner: TrialRunner, proofs: Path) -> None:
    """Store a verdict on each cell that has none yet, those of `verify` first."""
    folder, listener = runner.folder, runner.listener
    stored = folder.read_or_set_aside(Verification, VERIFICATION_FILE, listener.note)
    known = stored.verdicts if stored is not None else ()
    done = {verdict.id for verdict in known if _is_decided(verdict)}
    missing = {cell_of(cell): cell for cell in cells_of(trials) if cell_of(cell) not in done}
    if not missing:
        return
    fresh = [verdict for verdict in _proven(proofs) if verdict.id in missing]
    if fresh:
        listener.note(f"`shardmark verify` has verified {len(fresh)} of {len(missing)} cells")
    taken_over = {verdict.id for verdict in fresh}
    began = time.monotonic()
    try:
        for verdict in verify_cells(
            [cell for key, cell in missing.items() if key not in taken_over],
            engine=runner.engine,
            machine=runner.machine,
            scratch=folder.path / SCRATCH,
            listener=listener,
        ):
            fresh.append(verdict)
            if verdict.equivalent is False and verdict.cause is not None and not verdict.tried_as:
                listener.note(f"NOT EQUIVALENT: {verdict.strategy}: {verdict.cause.text}")
    finally:  # after Ctrl-C, too
        made = verification_of([*missing.values()], fresh)
        judged = {verdict.id for verdict in fresh}
        every = (*(v for v in known if v.id not in judged), *made.verdicts)
        seconds = time.monotonic() - began + ((stored and stored.seconds) or 0.0)
        told = {"verdicts": every, "seconds": seconds}
        write_verification(folder.path, made.model_copy(update=told))


def _proven(proofs: Path) -> Sequence[Verdict]:
    stored = None
    with suppress(ValueError, InputError):
        stored = read_verification(proofs)
    return [*filter(_is_decided, stored.verdicts)] if stored else []


def _is_decided(verdict: Verdict) -> bool:
    return verdict.equivalent is not None or verdict.guarantee is not None


def _results(
    folder: RunFolder, plan: Plan, listener: ProgressListener, *, retry: bool
) -> Iterator[TrialResult]:
    """Those of the plan that are stored and stay."""
    for trial in plan.with_twin:
        stored = folder.read_result(trial.id, verify=True)
        if isinstance(stored, Damaged):
            folder.set_aside(folder.trial_folder(trial.id), "damaged")
            listener.note(f"{stored}: it is measured again")
        elif stored is not None and not _again(stored, retry=retry):
            if (folder.trial_folder(trial.id) / TRIAL_FILE).exists():
                clear(folder.trial_folder(trial.id))  # the command was killed before it could
            yield stored


def _again(stored: TrialResult, *, retry: bool) -> bool:
    if stored.outcome in NOT_MEASURED:
        return True  # what was missing may be there by now, and asking costs nothing
    failed = stored.outcome in (Outcome.FAILED, Outcome.TIMED_OUT)
    return retry and (failed or stored.disturbed is not None)


def modules_of(trials: Sequence[Trial]) -> list[str]:
    """What the trials' ranks import besides what every rank does, each once."""
    names: dict[str, None] = {}
    for trial in trials:
        names |= dict.fromkeys((*trial.built_strategy.loads(), *task_modules(trial.workload)))
    return list(names)


def _check_same(out: Path, experiment: Experiment) -> None:
    """Refuse a folder whose run had another workload, recipe or way of measuring."""
    if not (out / EXPERIMENT_FILE).exists():
        if has_results(out):
            raise InputError(str(out), f"has results and no {EXPERIMENT_FILE}", fingerprint.REMEDY)
        return
    before, now = RunFolder(out).read_experiment(), experiment.model_dump(mode="json")
    # An axis's first value stands in the base, too, and its values may come in another order.
    axes = before.get("matrix", {}).keys() & experiment.matrix.keys()
    for key, stored, wanted in _changes(before, now):
        if not key.startswith((*GROWING, *axes)):
            changed = f"holds a run with {key} = {stored!r}, here it is {wanted!r}"
            raise InputError(str(out), changed, fingerprint.REMEDY)


def _changes(
    before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    for key in sorted(before.keys() | now.keys()):
        stored, wanted = before.get(key), now.get(key)
        if isinstance(stored, Mapping) and isinstance(wanted, Mapping):
            yield from _changes(stored, wanted, f"{prefix}{key}.")
        elif stored != wanted:
            yield f"{prefix}{key}", stored, wanted
