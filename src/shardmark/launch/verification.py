"""Has ranks take a few steps of each mathematics, and a process compare them with the reference."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from shardmark import workloads
from shardmark.core.errors import ShardmarkError, StrategyUnavailable
from shardmark.core.machine import Machine
from shardmark.core.run_files import TRIAL_FILE
from shardmark.launch.engine import Engine
from shardmark.launch.listener import ProgressListener
from shardmark.launch.outcome import decide
from shardmark.launch.placement import check_trial
from shardmark.launch.trial_artifacts import merge_logs, rank_records
from shardmark.results.schema import Outcome
from shardmark.results.verification import (
    CELLS_FILE,
    REFERENCE,
    VERDICTS_FILE,
    Cause,
    Verdict,
    Verification,
)
from shardmark.trials.trial import Trial, cell_id

STEPS = 3
JUDGE_SECONDS = 3600.0

SIZES = {"global_batch", "per_rank_batch", "steps", "epochs", "schedule", "seed"}
"""Keys of the recipe that change how much is computed, and not how."""


def cells_of(trials: Sequence[Trial]) -> list[Trial]:
    """One trial for each thing that is trained: repeats are the same cell."""
    cells: dict[str, Trial] = {}
    for trial in trials:
        cells.setdefault(id_of(trial), trial)
    return list(cells.values())


def id_of(trial: Trial) -> str:
    return cell_id(trial.model_dump(mode="json"))


def mathematics_of(cell: Trial) -> str:
    """Equal for cells that differ in their sizes alone: ranks, batch, steps, rate, seed."""
    recipe = cell.recipe.model_dump(mode="json", exclude=SIZES)
    del recipe["optimizer"]["lr"]
    models = [model.model_dump(mode="json") for model in (cell.workload, cell.strategy)]
    return json.dumps((*models, recipe, cell.nodes, cell.device_type), sort_keys=True)


def verify_cells(
    cells: Sequence[Trial],
    *,
    engine: Engine,
    machine: Machine,
    scratch: Path,
    listener: ProgressListener,
) -> Iterator[Verdict]:
    """A verdict on every cell as soon as it is known, those before Ctrl-C included.

    Of cells with the same mathematics the smallest is tried that can be.  The scratch folder is
    made and removed.
    """
    groups: dict[str, list[Trial]] = {}
    for cell in cells:
        groups.setdefault(mathematics_of(cell), []).append(cell)
    scratch.mkdir(parents=True)
    try:
        captured: dict[str, list[Trial]] = {}
        for number, group in enumerate(groups.values(), start=1):
            waiting = sorted(group, key=lambda cell: (cell.layout.shares == 1, cell.world_size))
            listener.doing(f"verifying [{number}/{len(groups)}] {group[0].strategy.name}")
            while waiting:
                problem = _capture(waiting[0], scratch / waiting[0].id, engine, machine)
                if problem is None:
                    captured[waiting[0].id] = waiting
                    break
                yield _untried(waiting.pop(0), problem)
        if captured:
            for verdict in _judged(list(captured), scratch, engine, listener):
                yield from _verdicts_of(verdict, captured[verdict.id])
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def verification_of(cells: Sequence[Trial], verdicts: Iterable[Verdict]) -> Verification:
    """All verdicts, in the order of their cells."""
    order = {id_of(cell): number for number, cell in enumerate(cells)}
    ordered = sorted(verdicts, key=lambda verdict: order[verdict.id])
    return Verification(reference=REFERENCE, steps=STEPS, verdicts=tuple(ordered))


def _verdicts_of(verdict: Verdict, cells: Sequence[Trial]) -> Iterator[Verdict]:
    """The verdict on the first of the cells, and the same on those that it stands for."""
    tried = id_of(cells[0])
    for cell in cells:
        own = {"id": id_of(cell), "world_size": cell.world_size, "varied": cell.varied}
        stands_for_it = {} if cell is cells[0] else {"tried_as": tried}
        yield verdict.model_copy(update=own | stands_for_it)


def shortened(trial: Trial) -> Trial:
    """The same training, for a few steps and with less to evaluate."""
    workload = workloads.shortened(trial.workload)
    recipe = trial.recipe.model_copy(update={"epochs": None, "steps": STEPS})
    return trial.model_copy(update={"workload": workload, "recipe": recipe})


def _capture(trial: Trial, directory: Path, engine: Engine, machine: Machine) -> str | None:
    """Run the cell's ranks for a few steps; None, or why they left nothing to compare."""
    try:
        check_trial(trial, machine, engine)
    except StrategyUnavailable as error:
        return f"unavailable: {error.reason}; {error.remedy}"
    processes = trial.layout.processes
    directory.mkdir()
    (directory / TRIAL_FILE).write_text(shortened(trial).model_dump_json())
    limit = trial.limits.trial_seconds
    ending = engine.run(directory, trial_seconds=limit, on_tick=lambda: None, task="capture")
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
    names: Sequence[str], scratch: Path, engine: Engine, listener: ProgressListener
) -> Iterator[Verdict]:
    """The verdicts on the cells of those folders; before Ctrl-C, those that are finished."""
    folder = scratch / "judge"
    folder.mkdir()
    (folder / CELLS_FILE).write_text(json.dumps([str(scratch / name) for name in names]))
    shown = -1

    def show_progress() -> None:
        nonlocal shown
        if len(done := _finished(folder) or ()) > shown:
            shown = len(done)
            listener.doing(f"comparing with the reference [{shown}/{len(names)}]")

    ending = engine.run(folder, trial_seconds=JUDGE_SECONDS, on_tick=show_progress, task="judge")
    verdicts = _finished(folder)
    yield from verdicts or ()
    if ending.how == "interrupted":
        raise KeyboardInterrupt
    if verdicts is None or len(verdicts) < len(names):
        merge_logs(folder)
        log = (folder / "log.txt").read_text().splitlines()
        raise ShardmarkError("the comparison with the reference failed: " + " | ".join(log[-3:]))


def _finished(folder: Path) -> list[Verdict] | None:
    try:
        stored = json.loads((folder / VERDICTS_FILE).read_text())
    except OSError:
        return None
    return [Verdict.model_validate(verdict) for verdict in stored]


def _untried(trial: Trial, problem: str) -> Verdict:
    return Verdict(
        id=id_of(trial),
        strategy=trial.strategy.name,
        strategy_options=trial.strategy.options,
        world_size=trial.world_size,
        precision=trial.recipe.precision,
        varied=trial.varied,
        equivalent=None,
        checks=(),
        cause=Cause(text="not tried", evidence=problem, first_deviation="none"),
    )
