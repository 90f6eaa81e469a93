"""Runs a trial from its plan to its stored result.  Imports no torch."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil

from shardmark.base.errors import StrategyUnavailable
from shardmark.base.files.run_files import LOG_FILE, SAMPLES_FILE, STEPS_FILE, TRIAL_FILE
from shardmark.base.machine import Machine
from shardmark.base.masking import masked_commands
from shardmark.base.results.schema import (
    NOT_MEASURED,
    Failure,
    Outcome,
    RankRecord,
    StabilityFinding,
    Summary,
    TrialResult,
)
from shardmark.base.results.store import Damaged, RunFolder
from shardmark.base.traffic import ModelSize, RequiredTraffic
from shardmark.bench.analysis.diagnose.trial_stability import stability_of_trial
from shardmark.bench.analysis.trial.summarise import summarise
from shardmark.bench.launch.engine import Engine, EngineWithTurns, Task, TurnsRefusedError
from shardmark.bench.launch.fingerprint import REMEDY, changed_meanwhile
from shardmark.bench.launch.listener import ProgressListener, TrialProgress
from shardmark.bench.launch.outcome import Ending, decide, explain_mismatch
from shardmark.bench.launch.placement import check_trial
from shardmark.bench.launch.trial_artifacts import (
    RankSampler,
    clear,
    merge_logs,
    merge_samples,
    merge_steps,
    raise_disk_error,
    rank_records,
    read_lines,
)
from shardmark.ranks.costs import costs_of
from shardmark.ranks.costs.base import Cell
from shardmark.ranks.measure.step.progress import read_progress
from shardmark.ranks.trial import Trial
from shardmark.ranks.workloads import task_modules

LEAST_FREE = 0.1
"""Fraction of the machine's memory that trials side by side leave free."""
LAST_LINES = 3
"""Lines of a script's errors in the reason of its failure."""
LINE_CHARACTERS = 200
SYNC_BATCH_NORM_NOTE = (
    "each synchronised batch norm of C channels also all-gathers 2 C + 1 numbers and all-reduces "
    "2 C in each micro-batch"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """An attempt at a trial."""

    trial: Trial
    order: int
    """Place of the trial in the run's random order."""
    attempt: int
    at_seconds: float = field(default_factory=time.time)
    """Unix time."""
    monotonic_seconds: float = field(default_factory=time.monotonic)
    """The same instant of the monotonic clock."""
    beside: int = 1
    """Number of trials that run side by side: each has its share of the time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRunner:
    """Runs trials of one experiment on one engine into one folder."""

    engine: Engine
    machine: Machine
    folder: RunFolder
    listener: ProgressListener

    def load(self, trials: Sequence[Trial]) -> None:
        """Have the engine import what the trials' ranks need, before the first trial."""
        self.engine.load(modules_of(trials), self.machine.device_type)

    def run(self, trial: Trial, *, order: int, attempt: int = 1) -> TrialResult:
        """Run one trial and store its result, also of a failed or interrupted one."""
        with suppress(StrategyUnavailable):  # `_run` reports it
            check_trial(trial, self.machine, self.engine)
            self.engine.prepare(trial)
        launch = Launch(trial=trial, order=order, attempt=attempt)
        try:
            return self._run(launch)
        except KeyboardInterrupt:  # during start or summary
            if self.folder.read_result(trial.id) is not None:
                raise
            ending = Ending(status="interrupted", agent_exit_code=None)
            decision = decide(ending, (), processes=0, trial_seconds=0, progress=())
            result = self._store(launch, *decision)
            clear(self.folder.trial_folder(trial.id))
            return result

    def run_in_turns(self, trials: Sequence[tuple[int, Trial]]) -> list[TrialResult]:
        """Run trials side by side, in turns, and store their results; each has its order.

        If one of them fails, all results are set aside.  Raises `TurnsRefusedError`.
        """
        assert isinstance(self.engine, EngineWithTurns), "the caller asks"
        count = len(trials)
        launches = [Launch(trial=t, order=order, attempt=1, beside=count) for order, t in trials]
        directories = [self._begin(launch) for launch in launches]

        def on_tick() -> None:
            self._report(trials[0][1], directories[0])
            memory = psutil.virtual_memory()
            if memory.available < LEAST_FREE * memory.total:
                raise TurnsRefusedError(f"less than {LEAST_FREE:.0%} of the memory is free")

        endings = self.engine.run_in_turns(
            directories,
            trial_seconds=sum(trial.limits.trial_seconds for _, trial in trials),
            on_tick=on_tick,
        )
        results = [
            self._end(launch, directory, ending)
            for launch, directory, ending in zip(launches, directories, endings, strict=True)
        ]
        if not {result.outcome for result in results} <= {Outcome.OK, Outcome.INTERRUPTED}:
            for directory in directories:
                self.folder.set_aside(directory, "beside-others")
        return results

    def _run(self, launch: Launch) -> TrialResult:
        directory = self._begin(launch)
        try:
            check_trial(launch.trial, self.machine, self.engine)
        except StrategyUnavailable as error:
            missing = Failure(reason=error.reason, remedy=error.remedy)
            result = self._store(launch, Outcome.UNAVAILABLE, missing)
            clear(directory)
            return result
        return self._end(launch, directory, self._watch(launch.trial, directory))

    def _begin(self, launch: Launch) -> Path:
        """Describe the trial in its folder, without files of an earlier attempt."""
        self._set_measured_aside(launch.trial)
        directory = self.folder.create_trial(launch.trial.id)
        clear(directory, keep=())
        (directory / TRIAL_FILE).write_text(launch.trial.model_dump_json())
        return directory

    def _end(self, launch: Launch, directory: Path, ending: Ending) -> TrialResult:
        """Store the result of a trial that has ended."""
        trial = launch.trial
        processes = trial.layout.processes
        records = rank_records(directory, range(processes))
        progress = [read_progress(directory, rank) for rank in trial.layout.training_ranks]
        outcome, failure = decide(
            ending,
            records,
            processes=processes,
            trial_seconds=trial.limits.trial_seconds,
            progress=[rank.steps if rank is not None else None for rank in progress],
        )
        if outcome is Outcome.FAILED:
            raise_disk_error(directory, records, ending)
        if outcome is Outcome.OK and (changed := changed_meanwhile(self.folder, trial, records)):
            outcome, failure = Outcome.FAILED, Failure(reason=changed, remedy=REMEDY)
        merge_logs(directory)
        merge_steps(directory, processes)
        if self.engine.samples:
            merge_samples(directory)
        if failure is not None:
            failure = _explained(failure, directory)
            if trial.script is not None:
                failure = _with_last_lines(failure, directory)
            failure = _located(failure, trial, records)
        result = self._store(launch, outcome, failure, ranks=records)
        clear(directory)
        return result

    def _set_measured_aside(self, trial: Trial) -> None:
        """Move an earlier attempt's result to `set-aside` when another attempt begins."""
        stored = self.folder.read_result(trial.id)
        if isinstance(stored, Damaged):
            suffix = "damaged"
        elif stored is None or stored.outcome in NOT_MEASURED:
            return
        else:
            suffix = str(stored.outcome) if stored.disturbed is None else "disturbed"
        self.folder.set_aside(self.folder.trial_folder(trial.id), suffix)

    def _watch(self, trial: Trial, directory: Path) -> Ending:
        ranks = range(trial.layout.processes)
        sampler = RankSampler(directory, SAMPLES_FILE, ranks, trial.measure.sample_seconds)

        def on_tick() -> None:
            if not self.engine.samples:
                sampler.look()
            self._report(trial, directory)

        with nullcontext() if self.engine.samples else sampler:
            return self.engine.run(
                directory, trial_seconds=trial.limits.trial_seconds, on_tick=on_tick
            )

    def _report(self, trial: Trial, directory: Path) -> None:
        # All ranks, since the first may be slow.
        ranks = (read_progress(directory, rank) for rank in range(trial.layout.processes))
        if progress := [reached for reached in ranks if reached is not None]:
            self.listener.trial_stepped(TrialProgress.combine(progress))

    def _store(
        self,
        launch: Launch,
        outcome: Outcome,
        failure: Failure | None,
        *,
        ranks: tuple[RankRecord, ...] = (),
    ) -> TrialResult:
        trial = launch.trial
        total_seconds = (time.monotonic() - launch.monotonic_seconds) / launch.beside
        metrics: dict[str, Summary | None] = {}
        missing: dict[str, str] = {}
        stability: tuple[StabilityFinding, ...] = ()
        if outcome is Outcome.OK:
            directory = self.folder.trial_folder(trial.id)
            samples = list(read_lines(directory / SAMPLES_FILE))
            stability = stability_of_trial(ranks, read_lines(directory / STEPS_FILE), samples)
            metrics, missing = summarise(
                trial,
                ranks,
                read_lines(directory / STEPS_FILE),
                samples,
                launched_at_seconds=launch.at_seconds,
                total_seconds=total_seconds,
                steps_per_epoch=next((r.steps_per_epoch for r in ranks), None),
            )
        return self.folder.write_result(
            TrialResult(
                id=trial.id,
                trial=masked_commands(trial.model_dump(mode="json")),
                strategy=trial.strategy.name,
                strategy_options=trial.strategy.options,
                world_size=trial.world_size,
                layout=trial.layout,
                needed_traffic=_needed_traffic(trial, ranks),
                precision=trial.precision,
                varied=trial.varied,
                synthetic=any(rank.synthetic for rank in ranks),
                repeat=trial.repeat,
                order=launch.order,
                outcome=outcome,
                failure=failure,
                started_at_seconds=launch.at_seconds,
                total_seconds=total_seconds,
                ranks=ranks,
                metrics=metrics,
                missing=missing,
                stability=stability,
                attempt=launch.attempt,
                files={},
            )
        )


def modules_of(trials: Sequence[Trial]) -> list[str]:
    """Return the modules that the trials' ranks import beside those that every rank imports."""
    names: dict[str, None] = {}
    for trial in trials:
        names |= dict.fromkeys((*trial.built_strategy.loads(), *task_modules(trial.workload)))
    return list(names)


def run_unmeasured(
    trial: Trial, directory: Path, engine: Engine, task: Task
) -> tuple[Outcome, Failure | None, tuple[RankRecord, ...]]:
    """Run another task than `measure` on the trial's ranks, in a new folder.

    Raises `KeyboardInterrupt` after Ctrl-C, and `StorageError` if a disk error is the cause.
    """
    directory.mkdir(parents=True)
    (directory / TRIAL_FILE).write_text(trial.model_dump_json())
    processes, limit_seconds = trial.layout.processes, trial.limits.trial_seconds
    ending = engine.run(directory, trial_seconds=limit_seconds, on_tick=lambda: None, task=task)
    if ending.status == "interrupted":
        raise KeyboardInterrupt
    records = rank_records(directory, range(processes))
    outcome, failure = decide(
        ending, records, processes=processes, trial_seconds=limit_seconds, progress=()
    )
    if outcome is Outcome.FAILED:
        raise_disk_error(directory, records, ending)
    if outcome is Outcome.FAILED and failure is not None:
        merge_logs(directory)
        failure = _explained(failure, directory)
    return outcome, failure, records


def _explained(failure: Failure, directory: Path) -> Failure:
    with (directory / LOG_FILE).open(errors="replace") as log:
        return explain_mismatch(failure, log)


def _with_last_lines(failure: Failure, directory: Path) -> Failure:
    """Return the failure of a script with the last lines of its rank's errors, if they say more."""
    prefix = f"[rank {failure.rank} stderr] "
    with (directory / LOG_FILE).open(errors="replace") as log:
        texts = (line.removeprefix(prefix).strip() for line in log if line.startswith(prefix))
        last = deque(filter(None, texts), LAST_LINES)
    if not last or last[-1][:LINE_CHARACTERS] in failure.reason:
        return failure
    return failure.model_copy(
        update={
            "reason": f"{failure.reason}: {' | '.join(line[:LINE_CHARACTERS] for line in last)}"
        }
    )


def _needed_traffic(trial: Trial, ranks: Sequence[RankRecord]) -> RequiredTraffic | None:
    """Traffic that the strategy requires; None without a cost model, or a probe's counts."""
    if (costs := costs_of(trial.built_strategy)) is None:
        return None
    for rank in ranks:
        probe = rank.probe
        if probe and probe.parameters is not None and probe.trained_parameters is not None:
            size = ModelSize(
                parameters=probe.parameters,
                trained_parameters=probe.trained_parameters,
                trained_matrices=probe.trained_matrices,
                frozen_element_bytes=probe.frozen_element_bytes,
                divided=probe.divided or {},
                divided_again=probe.divided_again,
                between_stages_bytes=probe.between_stages_bytes,
                tied_parameters=probe.tied_parameters,
            )
            cell = Cell(
                size=size, recipe=trial.recipe, world_size=trial.world_size, nodes=trial.nodes
            )
            needed = costs.required_traffic(cell)
            if trial.recipe.sync_batch_norm and trial.layout.shares > 1:
                notes = (needed.note, SYNC_BATCH_NORM_NOTE)
                needed = replace(needed, note="; ".join(note for note in notes if note))
            return needed
    return None


def _located(failure: Failure, trial: Trial, ranks: Sequence[RankRecord]) -> Failure:
    """Return the failure with its rank's node, if the trial has several nodes."""
    if failure.rank is None or trial.nodes == 1:
        return failure
    nodes = enumerate(trial.layout.ranks_by_node)
    node = next(number for number, ranks_there in nodes if failure.rank in ranks_there)
    host = next((record.host for record in ranks if record.rank == failure.rank), None)
    place = f"node {node}" if host is None else f"node {node}, {host}"
    reason = f"{failure.reason} (rank {failure.rank} is on {place})"
    return failure.model_copy(update={"node": node, "reason": reason})
