"""One trial from its plan to its result.  Imports no torch."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

from shardmark.analysis.diagnose.trial_stability import stability_of_trial
from shardmark.analysis.trial.summarise import summarise
from shardmark.core.errors import StrategyUnavailable
from shardmark.core.machine import Machine
from shardmark.core.run_files import SAMPLES_FILE, STEPS_FILE
from shardmark.launch.engine import Engine
from shardmark.launch.listener import ProgressListener, Reading
from shardmark.launch.outcome import Ending, decide, on_node
from shardmark.launch.sampling import RankSampler
from shardmark.launch.seats import check_trial, seats_of
from shardmark.launch.trial_artifacts import (
    clear,
    empty,
    merge_logs,
    merge_samples,
    merge_steps,
    rank_records,
    read_lines,
)
from shardmark.measure.step.progress import reached
from shardmark.results.schema import (
    Failure,
    Outcome,
    RankRecord,
    RestartRecord,
    StabilityFinding,
    Summary,
    TrialResult,
)
from shardmark.results.store import RunFolder
from shardmark.trials.trial import Trial

TRIAL_FILE = "trial.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRunner:
    """Runs trials of one experiment on one engine into one folder."""

    engine: Engine
    machine: Machine
    folder: RunFolder
    listener: ProgressListener

    def run(self, trial: Trial, *, order: int) -> TrialResult:
        """Run one trial and store its result, whatever its outcome.

        An interrupted one is stored too; the caller sees it from the outcome.
        """
        with suppress(StrategyUnavailable):  # what is not there is told below
            check_trial(trial, self.machine, self.engine)
            self.engine.prepare(trial)
        launched = time.time()
        try:
            return self._run(trial, order, launched)
        except KeyboardInterrupt:  # while it was being started, or summed up
            if self.folder.read_result(trial.id) is not None:
                raise
            how = Ending(how="interrupted", agent_exit_code=None, failures=(), oom_kills=0)
            outcome, failure = decide(
                how, (), processes=0, trial_seconds=trial.limits.trial_seconds, progress=()
            )
            result = self._store(trial, order, launched, outcome=outcome, failure=failure, ranks=())
            clear(self.folder.trial_folder(trial.id))
            return result

    def _run(self, trial: Trial, order: int, launched: float) -> TrialResult:
        directory = self.folder.create_trial(trial.id)
        empty(directory)
        try:
            check_trial(trial, self.machine, self.engine)
        except StrategyUnavailable as error:
            why = Failure(reason=error.reason, remedy=error.remedy)
            return self._store(
                trial, order, launched, outcome=Outcome.UNAVAILABLE, failure=why, ranks=()
            )
        processes = trial.layout.processes
        (directory / TRIAL_FILE).write_text(trial.model_dump_json())
        ending = self._watch(trial, directory, processes)
        records = rank_records(directory, processes)
        came = [reached(directory, rank) for rank in trial.layout.training_ranks]
        outcome, failure = decide(
            ending,
            records,
            processes=processes,
            trial_seconds=trial.limits.trial_seconds,
            progress=[rank.steps if rank is not None else None for rank in came],
        )
        failure = _with_restarts(_with_node(failure, trial, records), ending.restarts)
        merge_logs(directory)
        merge_steps(directory, processes)
        if self.engine.samples:
            merge_samples(directory)
        result = self._store(
            trial,
            order,
            launched,
            outcome=outcome,
            failure=failure,
            ranks=records,
            restarts=ending.restarts,
        )
        clear(directory)
        return result

    def _watch(self, trial: Trial, directory: Path, processes: int) -> Ending:
        sampler = RankSampler(
            directory, SAMPLES_FILE, range(processes), trial.measure.sample_seconds
        )

        def on_tick() -> None:
            if not self.engine.samples:
                sampler.look()
            # Not the first rank's alone: it may be slow, or dead while the others train on.
            told = [found for r in range(processes) if (found := reached(directory, r)) is not None]
            if told:
                self.listener.trial_stepped(Reading.of(told, sampler.memory_bytes))

        with nullcontext() if self.engine.samples else sampler:
            return self.engine.run(
                directory, trial_seconds=trial.limits.trial_seconds, on_tick=on_tick
            )

    def _store(
        self,
        trial: Trial,
        order: int,
        launched: float,
        *,
        outcome: Outcome,
        failure: Failure | None,
        ranks: tuple[RankRecord, ...],
        restarts: tuple[RestartRecord, ...] = (),
    ) -> TrialResult:
        total_seconds = time.time() - launched
        metrics: dict[str, Summary | None] = {}
        missing: dict[str, str] = {}
        stability: tuple[StabilityFinding, ...] = ()
        if outcome is Outcome.OK:
            directory = self.folder.trial_folder(trial.id)
            samples = list(read_lines(directory / SAMPLES_FILE))
            stability = stability_of_trial(ranks, read_lines(directory / STEPS_FILE), samples)
            metrics, missing = summarise(
                ranks,
                read_lines(directory / STEPS_FILE),
                samples,
                launched_at_seconds=launched,
                total_seconds=total_seconds,
                device_type=trial.device_type,
                precision=trial.recipe.precision,
                tf32=trial.recipe.tf32,
                warmup_steps=trial.measure.warmup_steps,
                steps_per_epoch=next((r.steps_per_epoch for r in ranks if r.lost is None), None),
                samples_per_step=trial.batch_per_step,
                restarts=max((one.restart for r in ranks for one in r.resumes), default=0),
            )
        return self.folder.write_result(
            TrialResult(
                id=trial.id,
                trial=json.loads(trial.model_dump_json()),
                strategy=trial.strategy.name,
                strategy_options=trial.strategy.options,
                world_size=trial.world_size,
                precision=trial.recipe.precision,
                varied=trial.varied,
                synthetic=any(rank.synthetic for rank in ranks),
                repeat=trial.repeat,
                order=order,
                outcome=outcome,
                failure=failure,
                restarts=restarts,
                started_at_seconds=launched,
                total_seconds=total_seconds,
                ranks=ranks,
                metrics=metrics,
                missing=missing,
                stability=stability,
                files={},
            )
        )


def _with_restarts(failure: Failure | None, restarts: Sequence[RestartRecord]) -> Failure | None:
    """The failure with how often the ranks had been started anew before it."""
    if failure is None or not restarts:
        return failure
    times = "1 restart" if len(restarts) == 1 else f"{len(restarts)} restarts"
    return failure.model_copy(update={"reason": f"{failure.reason} (after {times})"})


def _with_node(
    failure: Failure | None, trial: Trial, ranks: Sequence[RankRecord]
) -> Failure | None:
    """The failure with the node of its rank, where there are several."""
    if failure is None or failure.rank is None or trial.nodes == 1:
        return failure
    node = next(n for n, seats in enumerate(seats_of(trial)) if failure.rank in seats)
    host = next((record.host for record in ranks if record.rank == failure.rank), None)
    return on_node(failure, node, host)
