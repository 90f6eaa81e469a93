"""Runs an experiment, from the check of its folder to its last trial, or verifies it.  No torch."""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from shardmark.base.durations import duration
from shardmark.base.errors import StorageError
from shardmark.base.files.run_files import TRIAL_FILE
from shardmark.base.files.storage import storing
from shardmark.base.results.schema import Outcome, TrialResult
from shardmark.base.results.store import EXPERIMENT_FILE, Damaged, RunFolder, has_results
from shardmark.base.results.verification import (
    LOGS_FOLDER,
    VERIFICATION_FILE,
    Verification,
    read_verification,
    write_verification,
)
from shardmark.bench.launch import fingerprint
from shardmark.bench.launch.audited import first_command
from shardmark.bench.launch.engine import Engine, EngineWithTurns, TurnsRefusedError
from shardmark.bench.launch.engines import build_engine
from shardmark.bench.launch.input_checks import check_plan, training_samples
from shardmark.bench.launch.links import measure_run_links
from shardmark.bench.launch.listener import ProgressListener
from shardmark.bench.launch.run_options import RunOptions
from shardmark.bench.launch.trial import TrialRunner, modules_of
from shardmark.bench.launch.trial_artifacts import clear
from shardmark.bench.launch.trial_queue import TrialQueue, cell_of, runs_again, time_lines
from shardmark.bench.launch.verification import (
    cells_of,
    decides,
    is_decided,
    proofs_folder,
    read_proofs,
    verification_of,
    verify_cells,
)
from shardmark.experiment.experiment import Experiment
from shardmark.experiment.matrix import TrialPlan, expand
from shardmark.ranks.measure.system.environment import environment, occupied_devices
from shardmark.ranks.trial import Trial

CAPTURES_FOLDER = ".verification"
"""Captures of cells that a killed or interrupted command has not compared yet."""
VERIFICATION_SHARE = 0.2
"""Fraction of a run's time: the run reports a verification that takes more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSession:
    """A run whose folder is checked and locked, with its engine."""

    experiment: Experiment
    plan: TrialPlan
    """The trials, on the kind of device that the machine has."""
    runner: TrialRunner
    options: RunOptions
    started_at_seconds: float
    """Time of the monotonic clock at which the command began, and its budget with it."""

    @classmethod
    @contextmanager
    def open(
        cls,
        experiment: Experiment,
        path: Path,
        options: RunOptions,
        listener: ProgressListener,
        *,
        plan: TrialPlan | None = None,
        engine: Engine | None = None,
    ) -> Iterator[RunSession]:
        """Lock and check the folder, start the engine, and store what describes the run.

        `plan` replaces the experiment's own plan.  Raises `InputError` for an experiment or a
        folder that cannot be used.
        """
        started_at_seconds = time.monotonic()
        plan = plan or expand(experiment)
        check_plan(plan)
        content = fingerprint.fingerprint_of(plan.trials)
        folder = RunFolder.create(path)
        with ExitStack() as stack:
            stack.enter_context(storing(path))
            stack.enter_context(folder.locked(listener.note))
            if not options.remeasure:
                fingerprint.check_same_run(path, experiment, content)
            engine = stack.enter_context(
                closing(engine or build_engine(experiment, plan, listener.note))
            )
            listener.doing("loading torch")
            machine = engine.machine(experiment.device)
            controller, nodes = environment(), engine.environments()
            if machine.device_type == "cuda":
                controller["libraries"] = dict(machine.libraries)
                for place in nodes or [controller]:
                    for text in occupied_devices(place):
                        listener.note(f"node {place['node']}: {text}" if nodes else text)
            versions = fingerprint.versions_of([controller, *nodes])
            if options.remeasure and ((path / EXPERIMENT_FILE).exists() or has_results(path)):
                listener.note(f"the earlier results are now in {folder.set_run_aside()}")
                shutil.rmtree(path / CAPTURES_FOLDER, ignore_errors=True)
            fingerprint.refuse_changes(path, versions)
            folder.write_experiment(experiment.model_dump(mode="json"))
            folder.write_environment(controller | ({"nodes": nodes} if nodes else {}))
            fingerprint.add(folder, content.merged(versions))
            runner = TrialRunner(engine=engine, machine=machine, folder=folder, listener=listener)
            yield cls(
                experiment=experiment,
                plan=plan.on(machine.device_type),
                runner=runner,
                options=options,
                started_at_seconds=started_at_seconds,
            )

    def run(self) -> None:
        """Verify, measure the links, and run every trial that has no result yet."""
        queue = self._queue()
        listener, path = self.runner.listener, self.runner.folder.path
        trials, finished = [trial for _, trial in queue.remaining], len(queue.results)
        total = None if self._is_race else finished + len(trials)
        listener.planned(total, finished, self.plan.left_out)
        measure = self.experiment.measure
        if not trials:
            if measure.verify and self._accepts_other_causes():
                self.verify(self.plan.trials)
            return
        for line in time_lines(trials, path, queue.budget_seconds, verify=measure.verify):
            listener.note(line)
        self.runner.load(trials)
        began = time.monotonic()
        verification_seconds = 0.0
        if measure.verify:
            self.verify([trial for trial in trials if not trial.twin])
            verification_seconds = time.monotonic() - began
            if measure.repeats.margin is not None:
                queue.refused = self._refused()
        shutil.rmtree(path / CAPTURES_FOLDER, ignore_errors=True)  # a killed command left it
        measure_run_links(self.runner, self.plan.trials, measure)
        self.measure(queue)
        share = verification_seconds / (time.monotonic() - began)
        if share > VERIFICATION_SHARE:
            scripts = any(trial.script is not None for trial in trials)
            without = "measure.verify=false" + (", or --no-audit of `time`," if scripts else "")
            listener.note(
                f"verification took {duration(verification_seconds)}, {100 * share:.0f} % of the"
                f" time: there are few or short trials ({without} leaves it out)"
            )

    def _refused(self) -> frozenset[str]:
        """Return the cells of scripts that do not train what the first one trains."""
        stored = read_verification(self.runner.folder.path)
        unequal = {v.id for v in stored.verdicts if v.equivalent is False} if stored else set()
        others = (t for t in self.plan.trials if t.script and t.script.command != self._first)
        return frozenset(map(cell_of, others)) & unequal

    def _queue(self) -> TrialQueue:
        return TrialQueue(
            self.plan,
            self.experiment.measure.repeats,
            self._stored_results(),
            budget_seconds=self.options.budget_seconds,
            started_at_seconds=self.started_at_seconds,
        )

    def _stored_results(self) -> Iterator[TrialResult]:
        """Yield the stored results of the plan's trials that need not be run again."""
        folder = self.runner.folder
        for trial in self.plan.with_twin:
            stored = folder.read_result(trial.id, verify=True)
            if isinstance(stored, Damaged):
                folder.set_aside(folder.trial_folder(trial.id), "damaged")
                self.runner.listener.note(f"{stored}: it is measured again")
            elif stored is not None and not runs_again(stored, retry=self.options.retry):
                if (folder.trial_folder(trial.id) / TRIAL_FILE).exists():
                    clear(folder.trial_folder(trial.id))  # the command was killed before it could
                yield stored

    def _accepts_other_causes(self) -> bool:
        """Return whether a script was audited with other causes that the user accepts."""
        folder, listener = self.runner.folder, self.runner.listener
        stored = folder.read_or_set_aside(Verification, VERIFICATION_FILE, listener.note)
        cells = {cell_of(cell): cell for cell in cells_of(self.plan.trials)}
        return stored is not None and any(
            is_decided(verdict) and not decides(verdict, cells[verdict.id], self._first)
            for verdict in stored.verdicts
            if verdict.id in cells
        )

    @property
    def _first(self) -> str:
        return first_command(self.plan)

    def verify(self, trials: Sequence[Trial]) -> None:
        """Store a verdict on each cell that has none yet; reuse the verdicts of `verify`."""
        folder, listener = self.runner.folder, self.runner.listener
        stored = folder.read_or_set_aside(Verification, VERIFICATION_FILE, listener.note)
        stored_verdicts = stored.verdicts if stored is not None else ()
        cells = {cell_of(cell): cell for cell in cells_of(trials)}
        decided = {
            verdict.id
            for verdict in stored_verdicts
            if verdict.id in cells and decides(verdict, cells[verdict.id], self._first)
        }
        missing = {key: cell for key, cell in cells.items() if key not in decided}
        if not missing:
            return
        proofs = proofs_folder(self.plan, self.runner.engine)
        verdicts = [
            verdict
            for verdict in read_proofs(proofs)
            if verdict.id in missing and decides(verdict, missing[verdict.id], self._first)
        ]
        if verdicts:
            listener.note(
                f"`shardmark verify` has verified {len(verdicts)} of {len(missing)} cells"
            )
        reused = {verdict.id for verdict in verdicts}
        began = time.monotonic()
        try:
            for verdict in verify_cells(
                [cell for key, cell in missing.items() if key not in reused],
                engine=self.runner.engine,
                machine=self.runner.machine,
                scratch=folder.path / CAPTURES_FOLDER,
                logs=folder.path / LOGS_FOLDER,
                listener=listener,
                first=self._first,
            ):
                verdicts.append(verdict)
                if verdict.equivalent is False and verdict.cause and not verdict.tried_as:
                    listener.note(f"NOT EQUIVALENT: {verdict.strategy}: {verdict.cause.text}")
        finally:  # after Ctrl-C, too
            made = verification_of([*missing.values()], verdicts)
            new_ids = {verdict.id for verdict in verdicts}
            older = (verdict for verdict in stored_verdicts if verdict.id not in new_ids)
            seconds = time.monotonic() - began + ((stored and stored.seconds) or 0.0)
            update = {"verdicts": (*older, *made.verdicts), "seconds": seconds}
            write_verification(folder.path, made.model_copy(update=update))

    def measure(self, queue: TrialQueue) -> None:
        """Run the queue's trials; repeat trials that were disturbed.

        Those of a race take turns, all others come one after the other.
        """
        listener, stays_busy, in_turns = self.runner.listener, False, self._takes_turns
        alone = set[str]()
        while (upcoming := queue.next()) is not None:
            order, trial = upcoming
            fingerprint.refuse_changes(self.runner.folder.path, fingerprint.sources_of([trial]))
            together = queue.rest_of_round() if in_turns else []
            failing = [one for one in together if cell_of(one[1]) in alone]
            if len(together) > 1 and not failing:
                try:
                    alone |= self._run_in_turns(queue, together)
                except TurnsRefusedError as reason:
                    listener.note(f"{reason}: the trials run one after the other from now on")
                    in_turns = False
                continue
            order, trial = failing[0] if failing else upcoming
            number = len(queue.results) + 1
            total = None if self._is_race else number - 1 + len(queue.remaining)
            listener.trial_started(number, total, trial)
            attempts = 1 if stays_busy else 1 + trial.measure.max_remeasure
            for attempt in range(1, attempts + 1):
                result = self.runner.run(trial, order=order, attempt=attempt)
                last = attempt == attempts or not queue.has_time_for(result.total_seconds)
                if result.disturbed is None or last:
                    break
                listener.note(
                    f"{trial.title}: {result.disturbed}; measured again, up to"
                    f" {trial.measure.max_remeasure} times (measure.max_remeasure)"
                )
            # On a machine that stays busy, repeating the trials that follow would not help.
            stays_busy = result.disturbed is not None
            queue.results[trial.id] = result
            listener.trial_ended(number, total, result)
            if in_turns and cell_of(trial) in alone and result.outcome is Outcome.OK:
                listener.note(f"{trial.title} fails beside others: no trial takes turns any more")
                in_turns = False
            if result.outcome is Outcome.INTERRUPTED:
                raise KeyboardInterrupt
        self._report_dropped(queue)

    @property
    def _is_race(self) -> bool:
        return self.experiment.measure.repeats.margin is not None

    @property
    def _takes_turns(self) -> bool:
        """True for a race of scripts on CPUs that share no files.

        A GPU works on when its processes are stopped.
        """
        scripts = [trial.script for trial in self.plan.trials]
        return (
            self._is_race
            and not any(script is None or script.writes_are_fine for script in scripts)
            and self.runner.machine.device_type == "cpu"
            and isinstance(self.runner.engine, EngineWithTurns)
        )

    def _run_in_turns(self, queue: TrialQueue, trials: Sequence[tuple[int, Trial]]) -> set[str]:
        """Run trials side by side, and return the cells of those that failed.

        None of the trials has a result then, as a pair is not measured in two ways.
        """
        listener = self.runner.listener
        finished = len(queue.results)
        listener.trial_started(finished + 1, None, trials[0][1])
        results = self.runner.run_in_turns(trials)
        failed = set[str]()
        for (_, trial), result in zip(trials, results, strict=True):
            if result.outcome not in (Outcome.OK, Outcome.INTERRUPTED):
                reason = result.failure.reason if result.failure else result.outcome
                listener.note(f"{trial.title} failed beside the others, and runs alone: {reason}")
                failed.add(cell_of(trial))
        if failed:
            return failed
        for number, ((_, trial), result) in enumerate(
            zip(trials, results, strict=True), finished + 1
        ):
            if number > finished + 1:
                listener.trial_started(number, None, trial)
            listener.trial_ended(number, None, result)
        if any(result.outcome is Outcome.INTERRUPTED for result in results):
            raise KeyboardInterrupt
        queue.results |= {one.id: one for one in results}
        return failed

    def _report_dropped(self, queue: TrialQueue) -> None:
        """Report the cells that need no more repeats, and the trials that the budget leaves out."""
        listener = self.runner.listener
        dropped = {
            "that are known precisely enough": queue.decided,
            "that failed or were disturbed too often": queue.hopeless,
            "that train something else": queue.refused,
        }
        if reasons := [f"{len(cells)} {reason}" for reason, cells in dropped.items() if cells]:
            listener.note(f"no more repeats of cells: {', '.join(reasons)}")
        remaining, first = queue.remaining, self.plan.strategies[0]
        if self._is_race and remaining:  # it has as many trials as decide
            names = dict.fromkeys(t.strategy.name for _, t in remaining if t.strategy.name != first)
            listener.note(f"not decided in the time of this race: {', '.join(names)}")
        elif remaining:
            counts = Counter(trial.title for _, trial in remaining)
            titles = ", ".join(f"{title} ({count})" for title, count in counts.items())
            listener.note(f"the budget has no time for {len(remaining)} trials: {titles}")


def run_experiment(
    experiment: Experiment,
    out: Path,
    options: RunOptions | None = None,
    *,
    plan: TrialPlan | None = None,
    listener: ProgressListener | None = None,
    engine: Engine | None = None,
) -> Path:
    """Run every trial that has no result in `out` yet, and return `out`.

    Raises `InputError` for an experiment or a folder that cannot be used, `StorageError` for a
    full disk, `KeyboardInterrupt` after storing an interrupted trial.
    """
    options, listener = options or RunOptions(), listener or ProgressListener()
    with RunSession.open(experiment, out, options, listener, plan=plan, engine=engine) as session:
        session.run()
    return out


def verify_experiment(
    experiment: Experiment,
    scratch: Path,
    *,
    plan: TrialPlan | None = None,
    listener: ProgressListener | None = None,
    engine: Engine | None = None,
    store: bool = False,
) -> Verification:
    """Return a verdict on every cell of the experiment; measure nothing.

    With `store`, runs of the same code, data and versions reuse the verdicts.  Raises `InputError`
    for an experiment that cannot be used.
    """
    listener = listener or ProgressListener()
    plan = plan or expand(experiment)
    for _ in training_samples(plan.trials):
        pass
    engine = engine or build_engine(experiment, plan, listener.note)
    with closing(engine):
        listener.doing("loading torch")
        machine = engine.machine(experiment.device)
        cells = cells_of(plan.on(machine.device_type).trials)
        proofs = proofs_folder(plan, engine)
        engine.load(modules_of(cells), machine.device_type)
        verdicts = verify_cells(
            cells,
            engine=engine,
            machine=machine,
            scratch=scratch,
            logs=proofs / LOGS_FOLDER,
            listener=listener,
            first=first_command(plan),
        )
        verification = verification_of(cells, verdicts)
        if store and proofs == proofs_folder(plan, engine):  # the code has not changed meanwhile
            with suppress(OSError, StorageError):
                proofs.mkdir(parents=True, exist_ok=True)
                stored = (*read_proofs(proofs), *verification.verdicts)
                by_id = {verdict.id: verdict for verdict in stored}
                update = {"verdicts": (*by_id.values(),)}
                write_verification(proofs, verification.model_copy(update=update))
        return verification
