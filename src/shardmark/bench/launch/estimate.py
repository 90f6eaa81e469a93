"""Estimates the time of a run's remaining trials from earlier trials.  Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path

from shardmark.base.cells import cell_id
from shardmark.base.durations import duration
from shardmark.base.errors import ShardmarkError
from shardmark.base.results.runs_folder import runs_named
from shardmark.base.results.store import StoredRun, is_run, load_run
from shardmark.base.text import counted
from shardmark.bench.launch.trial_queue import cell_of, expected_seconds
from shardmark.ranks.trial import Trial


def time_lines(
    remaining: Sequence[Trial], out: Path | None, budget_seconds: float | None, *, verify: bool
) -> list[str]:
    """Return lines with the expected time of the trials, and the share that a budget covers.

    The estimate rests on trials in `out`, otherwise on the newest run with some of these cells.
    `verify` adds the verification of cells that have no verdict.
    """
    if not remaining:
        return []
    continued = load_run(out) if out is not None and is_run(out) else None
    cells = {cell_of(trial) for trial in remaining}
    paths = (path for path in runs_named(remaining[0].experiment) if is_run(path) and path != out)
    for run in chain([continued] if continued else [], _readable_runs(paths)):
        results = [result for result in run.trials if cell_id(result.trial) in cells]
        if (seconds := expected_seconds(remaining, results)) is not None:
            break
    else:
        longest = duration(remaining[0].limits.trial_seconds)
        line = f"time: not known before a trial has run; each ends after {longest} at most"
        return [line, *(_audit_lines(remaining) if verify else [])]
    repeats = remaining[0].measure.repeats
    certain = [trial for trial in remaining if trial.repeat < repeats.at_least]
    least_seconds = expected_seconds(certain, results) or 0.0
    verified = continued.verification.verdicts if continued and continued.verification else ()
    verification_seconds: float | None = 0.0
    if verify and not cells <= {verdict.id for verdict in verified}:
        verification_seconds = run.verification.seconds if run.verification else None
    unknown = "loading" if verification_seconds is not None else "loading and verifying"
    before = verification_seconds or 0.0
    between = duration(before + least_seconds)
    if repeats.adaptive:
        between += f" to {duration(before + seconds)}"
    lines = [f"time: about {between}, as in {run.path}; plus {unknown}"]
    if budget_seconds is not None:
        share = _budget_share(remaining, seconds, budget_seconds - before, unknown)
        lines.append(f"budget: {duration(budget_seconds)}, enough for {share}")
    return lines


def _audit_lines(trials: Sequence[Trial]) -> list[str]:
    """Say what the audits of scripts cost."""
    cells = {cell_of(t) for t in trials if t.script is not None and t.world_size > 1}
    if not cells:
        return []
    count = counted(len(cells), "audit")
    return [f"{count} before the first trial; an audit starts its script at least 3 times"]


def _readable_runs(folders: Iterable[Path]) -> Iterator[StoredRun]:
    """Yield the runs that can be read; a damaged one does not affect the estimate."""
    for folder in folders:
        with suppress(ShardmarkError, OSError):
            yield load_run(folder)


def _budget_share(
    trials: Sequence[Trial], seconds: float, budget_seconds: float, unknown: str
) -> str:
    """Describe how many of the trials, which take `seconds` together, fit the budget."""
    if budget_seconds > seconds:
        return f"all, with {duration(budget_seconds - seconds)} for {unknown}"
    rounds = int(max(0.0, budget_seconds) / seconds * len({trial.repeat for trial in trials}))
    return f"at most {rounds} of the {trials[0].measure.repeats} repeats"
