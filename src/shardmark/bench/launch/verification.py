"""Verifies cells: ranks take a few steps, and one process compares them with the reference."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from inspect import getfile
from itertools import pairwise
from pathlib import Path

from shardmark.base.errors import InputError, ShardmarkError, StrategyUnavailable
from shardmark.base.files.run_files import CAPTURED_FILE, LOG_FILE, TRIAL_FILE
from shardmark.base.machine import Machine
from shardmark.base.results.runs_folder import RUNS
from shardmark.base.results.schema import Outcome
from shardmark.base.results.verification import (
    CELLS_FILE,
    NOT_TRIED,
    REFERENCE,
    VERDICTS_FILE,
    Cause,
    Verdict,
    Verification,
    read_verification,
    verdict_text,
)
from shardmark.bench.analysis.compare.rows import gathered
from shardmark.bench.launch import fingerprint
from shardmark.bench.launch.audited import audit_cells
from shardmark.bench.launch.engine import Engine
from shardmark.bench.launch.listener import ProgressListener
from shardmark.bench.launch.outcome import Ending, decide
from shardmark.bench.launch.placement import check_trial
from shardmark.bench.launch.trial import run_unmeasured
from shardmark.bench.launch.trial_artifacts import merge_logs, raise_disk_error
from shardmark.bench.launch.trial_queue import cell_of
from shardmark.experiment.matrix import TrialPlan
from shardmark.ranks import workloads
from shardmark.ranks.measure.system.environment import environment
from shardmark.ranks.strategies.base import Strategy
from shardmark.ranks.trial import Trial

STEPS = 3
FP16_STEPS = 8
"""Steps in fp16: the loss scale starts too high for many models, and halves in a skipped step."""
FP16_SAMPLES = 4
"""Most samples of a micro-batch in fp16 on a CPU, where fp16 takes 100 times as long as fp32."""
FP16_SECONDS = 90
"""Measured seconds of one such cell with a ResNet-18 on images of 32 x 32 pixels."""
UNKNOWN_STEPS = 1000
"""Steps that a schedule gets for a training that counts epochs."""
LIMIT_SECONDS = 3600.0
"""Time limit of the process that compares captures with the reference."""
TRACEBACK_LINES = 12
LAST_LINES = 3
"""Lines of output in the verdict on a cell whose ranks ended without an error of theirs."""
PACKAGE = str(Path(__file__).parents[2])
FIX = "fix it and run again"
_ON_DEVICE = (
    "leave out .cuda(), make tensors on the batch's device: Shardmark moves model and batch"
)
REMEDIES = {
    **dict.fromkeys(("NVIDIA driver", "with CUDA enabled", "on the same device"), _ON_DEVICE),
    **dict.fromkeys(("Half", "BFloat16"), "leave the model in fp32: recipe.precision casts it"),
}
"""Remedies in a task, by words of torch's error."""

SIZES = {"global_batch", "per_rank_batch", "steps", "epochs", "schedule", "seed"}
"""Keys of the recipe that change the amount of computation, but not its numerics."""


def cells_of(trials: Sequence[Trial]) -> list[Trial]:
    """Return the first trial of each cell."""
    return [first for first, *_ in gathered((cell_of(trial), trial) for trial in trials).values()]


def numerics_key(cell: Trial) -> str:
    """Return a key of the numerics, which ignores ranks, batch, steps, rate and seed."""
    recipe = cell.recipe.model_dump(mode="json", exclude=SIZES)
    del recipe["optimizer"]["lr"]
    models = [model.model_dump(mode="json") for model in (cell.workload, cell.strategy)]
    return json.dumps((*models, recipe, cell.nodes, cell.device_type), sort_keys=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A reason why a cell's ranks wrote no capture."""

    text: str
    error: str | None = None
    """Error of a rank, if it was the cause."""
    traceback: str = ""


def verify_cells(
    cells: Sequence[Trial],
    *,
    engine: Engine,
    machine: Machine,
    scratch: Path,
    logs: Path,
    listener: ProgressListener,
    first: str = "",
) -> Iterator[Verdict]:
    """Yield a verdict on every cell: capture all cells first, then compare one by one.

    Variants of a script are compared with the `first` command, too.  Of cells with equal numerics,
    the smallest one that can run is verified.  Ctrl-C leaves finished captures in the scratch
    folder for the next call; otherwise the folder is removed.  The output of ranks that failed is
    stored in `logs`.  Raises `InputError` if the user's model fails under every strategy.
    """
    if any(cell.script is not None for cell in cells):  # the cells of a run share a workload
        yield from audit_cells(cells, listener, first=first)
        return
    groups = gathered((numerics_key(cell), cell) for cell in cells)
    scratch.mkdir(parents=True, exist_ok=True)
    failures: list[tuple[Trial, Problem]] = []
    captured: dict[str, list[Trial]] = {}
    try:
        for number, group in enumerate(groups.values(), start=1):
            waiting = sorted(group, key=lambda cell: (cell.layout.shares == 1, cell.world_size))
            listener.doing(f"verifying [{number}/{len(groups)}] {group[0].strategy.name}")
            while waiting:
                problem = _capture(waiting[0], scratch / waiting[0].id, engine, machine)
                if problem is None:
                    captured[waiting[0].id] = waiting
                    break
                failures.append((waiting[0], problem))
                if not captured:
                    last = number == len(groups) and not waiting[1:]
                    _refuse_broken_model(cells, failures, last=last)
                cell = waiting.pop(0)
                reason = _with_log(problem, scratch / cell.id, logs / f"{cell.id}.txt")
                listener.doing(f"{cell.title}: {NOT_TRIED} ({reason})")
                yield _untried(cell, reason)
        if captured:
            for partial_verdict in _compared(captured, scratch, engine, listener):
                tried, *others = captured[partial_verdict.id]
                verdict = partial_verdict.model_copy(update=_names_of(tried))
                yield verdict
                for cell in others:  # the verdict holds for them, too
                    yield verdict.model_copy(update=_names_of(cell) | {"tried_as": verdict.id})
    except Exception:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    shutil.rmtree(scratch, ignore_errors=True)


def _refuse_broken_model(
    cells: Sequence[Trial], failures: Sequence[tuple[Trial, Problem]], *, last: bool
) -> None:
    """Raise `InputError` if the failures are no strategy's fault, or if all cells have failed.

    No strategy is at fault if a single rank fails, or two strategies of different families with
    the same error: `zro` is `ddp` with another optimizer.  They may still run with other options.
    """
    trial, problem = failures[-1]
    several = any(cell.workload != trial.workload for cell in cells)
    same_error = [cell for cell, other in failures if other.error == problem.error]
    families = {_family(cell) for cell in same_error}
    tried = [(_family(cell), cell.strategy.options) for cell, _ in failures]
    waits = any(
        _family(cell) in families and (_family(cell), cell.strategy.options) not in tried
        for cell in cells
    )
    all_failed = last and all(other.error is not None for _, other in failures)
    no_strategys_fault = trial.layout.processes == 1 or (len(families) > 1 and not waits)
    if all_failed or (problem.error is not None and not several and no_strategys_fault):
        raise InputError(
            f"{trial.experiment}: workload",
            f"it fails in its first steps ({trial.title}): {problem.error}",
            next((r for words, r in REMEDIES.items() if words in str(problem.error)), FIX),
            *map(ShardmarkError, problem.traceback.splitlines()),
        )


def _family(trial: Trial) -> type:
    """Return the class of strategies that the trial's strategy is a kind of."""
    classes = type(trial.built_strategy).__mro__
    return next(kind for kind, base in pairwise(classes) if base is Strategy)


def proofs_folder(plan: TrialPlan, engine: Engine) -> Path:
    """Return the folder of verdicts that hold for the plan's code, data and versions."""
    content = fingerprint.fingerprint_of(plan.trials).merged(
        fingerprint.versions_of([environment(), *engine.environments()])
    )
    packages = sorted(f"{package.name} {package.version}" for package in metadata.distributions())
    digest = hashlib.sha256("\n".join((content.model_dump_json(), *packages)).encode())
    strategies = {Path(getfile(type(trial.built_strategy))) for trial in plan.trials}
    for file in sorted({*Path(PACKAGE).rglob("*.py"), *strategies}):
        digest.update(file.read_bytes())
    return RUNS / ".verified" / digest.hexdigest()[:16]


def read_proofs(folder: Path) -> list[Verdict]:
    """Return the decided verdicts that `verify` has stored in a folder of `proofs_folder`."""
    with suppress(ValueError, InputError):
        if (stored := read_verification(folder)) is not None:
            return [verdict for verdict in stored.verdicts if is_decided(verdict)]
    return []


def is_decided(verdict: Verdict) -> bool:
    """Return whether the verdict says if the cell trains the same, or states a guarantee."""
    return verdict.equivalent is not None or verdict.guarantee is not None


def decides(verdict: Verdict, cell: Trial, first: str = "") -> bool:
    """Return whether a stored verdict answers for the cell, with what the user accepts now."""
    if verdict.against != first:
        return False
    equal_to_one_process = verdict.equivalent is True and not verdict.mathematics
    same_question = set(verdict.accept) == set(cell.measure.accepted)
    return is_decided(verdict) and (equal_to_one_process or same_question)


def verification_of(cells: Sequence[Trial], verdicts: Iterable[Verdict]) -> Verification:
    """Collect the verdicts in the order of their cells."""
    order = {cell_of(cell): number for number, cell in enumerate(cells)}
    ordered = sorted(verdicts, key=lambda verdict: order[verdict.id])
    steps = max(map(steps_of, cells), default=STEPS)
    return Verification(reference=REFERENCE, steps=steps, verdicts=tuple(ordered))


def _names_of(cell: Trial) -> dict[str, object]:
    return {
        "id": cell_of(cell),
        "strategy_options": cell.strategy.options,
        "mathematics": _numerics_descriptions(cell),
        "world_size": cell.world_size,
        "varied": cell.varied,
    }


def _numerics_descriptions(cell: Trial) -> tuple[str, ...]:
    """Describe the cell's numerics, and the options with which they were verified instead."""
    strategy = cell.built_strategy
    descriptions = strategy.numerics(cell.recipe).descriptions
    proof = strategy.proof_options().items()
    other = [f"{key} {value}" for key, value in proof if getattr(strategy, key) != value]
    return (*descriptions, f"verified with {', '.join(other)}") if other else descriptions


def steps_of(cell: Trial) -> int:
    """Return the number of steps that verify the cell."""
    least = FP16_STEPS if cell.recipe.precision == "fp16" else STEPS
    strategy = _proven(cell).built_strategy
    return max(least, strategy.numerics(cell.recipe).minimum_steps)


def _proven(trial: Trial) -> Trial:
    """Return the trial with strategy options that a few steps can verify."""
    options = {**trial.strategy.options, **trial.built_strategy.proof_options()}
    strategy = trial.strategy.model_copy(update={"options": options})
    return Trial.model_validate({**trial.model_dump(), "strategy": strategy})


def shortened(trial: Trial) -> Trial:
    """Return the trial with a few steps and less to evaluate."""
    workload = workloads.shortened(trial.workload)
    changes: dict[str, object] = {"epochs": None, "steps": steps_of(trial)}
    schedule = trial.recipe.schedule
    if schedule.path is not None:
        # The schedule is made for the full training: it may not accept a few steps.
        steps = max(1, (trial.recipe.steps or UNKNOWN_STEPS) - schedule.warmup_steps)
        options = {k: steps if value == "steps" else value for k, value in schedule.options.items()}
        changes["schedule"] = schedule.model_copy(update={"options": options})
    if _slow_in_fp16(trial):
        least = FP16_SAMPLES * trial.recipe.gradient_accumulation
        sizes = {"global_batch": least * trial.layout.shares, "per_rank_batch": least}
        for key, size in sizes.items():
            changes[key] = min(size, getattr(trial.recipe, key) or 0) or None
    recipe = trial.recipe.model_copy(update=changes)
    return _proven(trial).model_copy(update={"workload": workload, "recipe": recipe})


def _slow_in_fp16(trial: Trial) -> bool:
    return trial.recipe.precision == "fp16" and trial.device_type == "cpu"


def _capture(trial: Trial, directory: Path, engine: Engine, machine: Machine) -> Problem | None:
    """Run the cell's ranks for a few steps, unless an earlier command has captured it.

    Returns None, or why there is no capture.
    """
    try:
        check_trial(trial, machine, engine)
    except StrategyUnavailable as error:
        return Problem(text=f"unavailable: {error.reason}; {error.remedy}")
    short = shortened(trial)
    finished = directory / CAPTURED_FILE
    if finished.exists() and (directory / TRIAL_FILE).read_text() == short.model_dump_json():
        return None
    shutil.rmtree(directory, ignore_errors=True)
    outcome, failure, records = run_unmeasured(short, directory, engine, "capture")
    if outcome is Outcome.OK:
        finished.touch()
        return None
    assert failure is not None, "every other outcome has one"
    cause = failure.reason.removeprefix(f"rank {failure.rank}: ")
    text = f"{outcome}: {cause if outcome is Outcome.UNAVAILABLE else failure.reason}"
    text += f"; {failure.remedy}"
    if outcome is not Outcome.FAILED or all(record.error is None for record in records):
        return Problem(text=text)
    return Problem(text=text, error=cause, traceback=_traceback(directory, failure.rank))


def _with_log(problem: Problem, directory: Path, path: Path) -> str:
    """Return the problem's text; if it refers to the log, store the log and name its path."""
    text = problem.text
    if LOG_FILE not in text:
        return text
    merge_logs(directory)
    with suppress(OSError):  # a folder that cannot be written must not cost the verdict
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(directory / LOG_FILE, path)
        text = text.replace(LOG_FILE, str(path))
    lines = _places_or_end(directory / LOG_FILE) if problem.error is None else ()
    return " | ".join((text, *lines))


def _places_or_end(log: Path) -> list[str]:
    """Return where the ranks were, from the stacks that a timeout leaves; else the last lines."""
    ranks: dict[str, list[str]] = {}
    last: deque[str] = deque(maxlen=LAST_LINES)
    with log.open(errors="replace") as lines:
        for line in lines:
            last.append(line.strip())
            if "Current thread 0x" in line:
                head, _, innermost_frame = next(lines, "").partition("] ")
                rank = head.removeprefix("[").removesuffix(" stderr")
                ranks.setdefault(innermost_frame.strip(), []).append(rank)
    return [f"{', '.join(names)}: {frame}" for frame, names in ranks.items()] or [*last]


def _traceback(directory: Path, rank: int | None) -> str:
    """Return the frames of user code in the rank's last traceback, without the error itself."""
    merge_logs(directory)
    head = f"[rank {rank} stderr] "
    frames: deque[str] = deque(maxlen=TRACEBACK_LINES)
    in_traceback = in_library = False
    with (directory / LOG_FILE).open() as log:
        for line in (text.removeprefix(head) for text in log if text.startswith(head)):
            if not line.startswith(" "):
                in_traceback, in_library = line.startswith("Traceback"), False
                if in_traceback:
                    frames.clear()
            elif line.startswith('  File "'):
                in_library = "site-packages" in line or PACKAGE in line
            if in_traceback and line.startswith(" ") and not in_library:
                frames.append(line.rstrip("\n"))
    return "\n".join(["in your code:", *frames]) if frames else ""


def _compared(
    captured: Mapping[str, Sequence[Trial]],
    scratch: Path,
    engine: Engine,
    listener: ProgressListener,
) -> Iterator[Verdict]:
    """Yield the verdicts on captured cells; after Ctrl-C, those that are finished.

    A cell whose reference runs out of memory or time is undecided, and the others go on.
    """
    names = list(captured)
    slow = sum(_slow_in_fp16(cells[0]) for cells in captured.values())
    if slow:
        minutes = math.ceil(slow * FP16_SECONDS / 60)
        listener.doing(
            f"fp16 is slow on a CPU: {slow} cells are verified with {FP16_SAMPLES} samples per "
            f"rank; with a ResNet-18 that takes about {minutes} min"
        )
    done = 0
    while done < len(names):
        ending, verdicts = _compare(names[done:], scratch, engine, listener, before=done)
        yield from verdicts
        done += len(verdicts)
        if ending.status == "interrupted":
            raise KeyboardInterrupt
        if done == len(names) or (ending.status == "timed_out" and verdicts):
            continue
        reason = _end_of_reference(ending, scratch / "compare")
        yield _untried(captured[names[done]][0], reason).model_copy(update={"id": names[done]})
        done += 1


def _end_of_reference(ending: Ending, folder: Path) -> str:
    """Return why the process that compares a cell with the reference ended without a verdict."""
    if ending.status == "timed_out":
        return f"the reference took over {LIMIT_SECONDS:g} s"
    raise_disk_error(folder, (), ending)
    outcome, failure = decide(ending, (), processes=1, trial_seconds=LIMIT_SECONDS, progress=[None])
    if outcome is Outcome.OUT_OF_MEMORY:
        return "the kernel killed the reference, because memory ran out"
    merge_logs(folder)
    with (folder / LOG_FILE).open() as log:
        last = deque((line.rstrip("\n") for line in log), 1)
    reason = failure.reason if failure is not None else "it ended without a verdict"
    return " | ".join((f"the reference failed: {reason}", *last))


def _compare(
    names: Sequence[str], scratch: Path, engine: Engine, listener: ProgressListener, *, before: int
) -> tuple[Ending, list[Verdict]]:
    """Compare cells in one process; return its end, and the verdicts that it finished.

    `before` is the number of cells that have verdicts already.
    """
    folder = scratch / "compare"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / CELLS_FILE).write_text(json.dumps([str(scratch / name) for name in names]))
    shown = -1

    def show_progress() -> None:
        nonlocal shown
        if len(done := _finished(folder)) > shown:
            count = f"{before + len(done)}/{before + len(names)}"
            texts = [f"comparing with the reference [{count}]"]
            for verdict in done[max(shown, 0) :]:
                cause = f" ({verdict.cause.text})" if verdict.cause is not None else ""
                texts.append(f"{verdict.strategy}: {verdict_text(verdict)}{cause}")
            listener.doing("; ".join(texts))
            shown = len(done)

    ending = engine.run(folder, trial_seconds=LIMIT_SECONDS, on_tick=show_progress, task="compare")
    return ending, _finished(folder)


def _finished(folder: Path) -> list[Verdict]:
    try:
        stored = json.loads((folder / VERDICTS_FILE).read_text())
    except OSError:
        return []
    return [Verdict.model_validate(verdict) for verdict in stored]


def _untried(trial: Trial, problem: str) -> Verdict:
    return Verdict(
        id=cell_of(trial),
        strategy=trial.strategy.name,
        strategy_options=trial.strategy.options,
        world_size=trial.world_size,
        precision=trial.recipe.precision,
        varied=trial.varied,
        equivalent=None,
        checks=(),
        cause=Cause(text=NOT_TRIED, evidence=problem, first_deviation="none"),
    )
