"""What the rest of a run will take, as earlier trials of the same cells took.  Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path

from shardmark.core.durations import duration
from shardmark.core.errors import ShardmarkError
from shardmark.launch.trial_queue import cell_of, expected_seconds
from shardmark.results.runs_folder import runs_named
from shardmark.results.store import StoredRun, is_run, load_run
from shardmark.trials.trial import Trial, cell_id


def time_lines(
    todo: Sequence[Trial], out: Path | None, budget_seconds: float | None, *, verify: bool
) -> list[str]:
    """The time that the trials will take, what of it is not known, and how far a budget reaches.

    Earlier trials in `out` tell it, else those of the newest run that has some of these cells.
    `verify` says whether strategies without a verdict are verified before the first trial.
    """
    if not todo:
        return []
    here = load_run(out) if out is not None and is_run(out) else None
    cells = {cell_of(trial) for trial in todo}
    earlier = (path for path in runs_named(todo[0].experiment) if is_run(path) and path != out)
    for told in chain([here] if here else [], _readable(earlier)):
        known = [result for result in told.trials if cell_id(result.trial) in cells]
        if (seconds := expected_seconds(todo, known)) is not None:
            break
    else:
        longest = duration(todo[0].limits.trial_seconds)
        return [f"time: not known before a trial has run; each ends after {longest} at most"]
    repeats = todo[0].measure.repeats
    sure = [trial for trial in todo if trial.repeat < repeats.at_least]
    least_seconds = expected_seconds(sure, known) or 0.0
    verdicts = here.verification.verdicts if here and here.verification else ()
    verifying_seconds: float | None = 0.0
    if verify and not cells <= {verdict.id for verdict in verdicts}:
        verifying_seconds = told.verification.seconds if told.verification else None
    unknown = "loading" if verifying_seconds is not None else "loading and verifying"
    before = verifying_seconds or 0.0
    between = duration(before + least_seconds)
    if repeats.adaptive:
        between += f" to {duration(before + seconds)}"
    lines = [f"time: about {between}, as in {told.path}; plus {unknown}"]
    if budget_seconds is not None:
        reach = _reach(todo, seconds, budget_seconds - before, unknown)
        lines.append(f"budget: {duration(budget_seconds)}, enough for {reach}")
    return lines


def _readable(folders: Iterable[Path]) -> Iterator[StoredRun]:
    """Without those that are refused: another run's fault is none of this one's."""
    for folder in folders:
        with suppress(ShardmarkError, OSError):
            yield load_run(folder)


def _reach(todo: Sequence[Trial], seconds: float, budget_seconds: float, unknown: str) -> str:
    """What of the trials, which take so many seconds, fits into what is left of a budget."""
    if budget_seconds > seconds:
        return f"all, with {duration(budget_seconds - seconds)} for {unknown}"
    rounds = int(max(0.0, budget_seconds) / seconds * len({trial.repeat for trial in todo}))
    return f"at most {rounds} of the {todo[0].measure.repeats} repeats"
