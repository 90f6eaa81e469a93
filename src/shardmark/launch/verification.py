"""Has each cell's ranks take a few steps, and a judge hold them against the reference."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from shardmark.core.errors import ShardmarkError, StrategyUnavailable
from shardmark.core.machine import Machine
from shardmark.core.run_files import TRIAL_FILE
from shardmark.equivalence.parity import LARGEST
from shardmark.launch.engine import Engine
from shardmark.launch.listener import ProgressListener
from shardmark.launch.outcome import decide
from shardmark.launch.placement import check_trial
from shardmark.launch.trial_artifacts import merge_logs, rank_records
from shardmark.results.schema import Outcome
from shardmark.results.verification import REFERENCE, Cause, Verdict, Verification
from shardmark.trials.trial import Trial, cell_id

STEPS = 3
JUDGE_SECONDS = 3600.0
CELLS_FILE = "cells.json"
VERDICTS_FILE = "verdicts.json"


def cells_of(trials: Sequence[Trial]) -> list[Trial]:
    """One trial for each thing that is trained: repeats are the same cell."""
    found: dict[str, Trial] = {}
    for trial in trials:
        found.setdefault(cell_id(trial.model_dump(mode="json")), trial)
    return list(found.values())


def verify_cells(
    cells: Sequence[Trial],
    *,
    engine: Engine,
    machine: Machine,
    scratch: Path,
    listener: ProgressListener,
) -> Verification:
    """A verdict on every cell, in their order.  The scratch folder is made and removed."""
    scratch.mkdir(parents=True)
    try:
        verdicts: dict[str, Verdict] = {}
        testified: list[tuple[Trial, Path]] = []
        for number, trial in enumerate(cells, start=1):
            listener.doing(f"verifying [{number}/{len(cells)}] {trial.strategy.name}")
            directory = scratch / trial.id
            directory.mkdir()
            problem = _testimony(trial, directory, engine, machine)
            if problem is None:
                testified.append((trial, directory))
            else:
                verdicts[trial.id] = _untried(trial, problem)
        if testified:
            listener.doing("judging against the reference")
            for verdict in _judged(testified, scratch, engine):
                verdicts[verdict.id] = verdict
        named = [
            verdicts[trial.id].model_copy(
                update={"id": cell_id(trial.model_dump(mode="json")), "varied": trial.varied}
            )
            for trial in cells
        ]
        return Verification(reference=REFERENCE, steps=STEPS, verdicts=tuple(named))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def shortened(trial: Trial) -> Trial:
    """The same training, for a few steps and with less to evaluate."""
    workload = trial.workload.shortened()
    recipe = trial.recipe.model_copy(update={"epochs": None, "steps": STEPS})
    return trial.model_copy(update={"workload": workload, "recipe": recipe})


def _testimony(trial: Trial, directory: Path, engine: Engine, machine: Machine) -> str | None:
    """Run the cell's ranks for a few steps; None, or why there is no evidence."""
    try:
        check_trial(trial, machine, engine)
    except StrategyUnavailable as error:
        return f"unavailable: {error.reason}; {error.remedy}"
    processes = trial.layout.processes
    (directory / TRIAL_FILE).write_text(shortened(trial).model_dump_json())
    limit = trial.limits.trial_seconds
    ending = engine.run(directory, trial_seconds=limit, on_tick=lambda: None, task="testify")
    if ending.how == "interrupted":
        raise KeyboardInterrupt
    records = rank_records(directory, processes)
    outcome, failure = decide(
        ending,
        records,
        processes=processes,
        trial_seconds=limit,
        progress=[None] * processes,
    )
    lost = [f"rank {record.rank} {record.lost}" for record in records if record.lost is not None]
    if outcome is Outcome.OK:
        return f"a worker was lost: {'; '.join(lost)}" if lost else None
    return f"{outcome}: {failure.reason if failure else 'no reason is known'}"


def _judged(
    testified: Sequence[tuple[Trial, Path]], scratch: Path, engine: Engine
) -> list[Verdict]:
    folder = scratch / "judge"
    folder.mkdir()
    (folder / CELLS_FILE).write_text(json.dumps([str(path) for _, path in testified]))
    ending = engine.run(folder, trial_seconds=JUDGE_SECONDS, on_tick=lambda: None, task="judge")
    if ending.how == "interrupted":
        raise KeyboardInterrupt
    try:
        stored = json.loads((folder / VERDICTS_FILE).read_text())
    except OSError:
        merge_logs(folder)
        log = (folder / "log.txt").read_text().splitlines()
        raise ShardmarkError(
            "the verification's judge ended without verdicts: " + " | ".join(log[-3:])
        ) from None
    return [Verdict.model_validate(verdict) for verdict in stored]


def _untried(trial: Trial, problem: str) -> Verdict:
    return Verdict(
        id=trial.id,
        strategy=trial.strategy.name,
        strategy_options=trial.strategy.options,
        world_size=trial.world_size,
        precision=trial.recipe.precision,
        varied=trial.varied,
        equivalent=None,
        checks=(),
        cause=Cause(text="not tried", evidence=problem, first_deviation="none"),
    )


def shown_number(value: float | None) -> str:
    """A deviation in tolerances for people."""
    if value is None:
        return "-"
    return f"{value:.2g}" if value < LARGEST else "not finite"
