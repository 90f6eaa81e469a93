"""What `run --dry-run` prints: the trials in their order, and the cells left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from shardmark.config.axes import title_of
from shardmark.core.durations import duration
from shardmark.core.errors import StrategyUnavailable
from shardmark.launch.agenda import cell_of, expected_seconds
from shardmark.progress.lines import shown
from shardmark.results.runs_folder import runs_of
from shardmark.results.store import is_run, load_run
from shardmark.trials.trial import Trial, cell_id

if TYPE_CHECKING:
    from pathlib import Path

    from shardmark.core.machine import Machine
    from shardmark.trials.matrix import Plan

GAP = "  "
"""Between columns; no column has it inside."""


def plan_lines(plan: Plan) -> list[str]:
    """Number, id, strategy, ranks, repeat, then each option and varied key as KEY=VALUE.

    Repeats that come only where they are needed are counted in one line.
    """
    repeats = plan.trials[0].measure.repeats
    sure = [trial for trial in plan.trials if trial.repeat < repeats.at_least]
    rows = [_row(number, trial) for number, trial in enumerate(sure, start=1)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        GAP.join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    if repeats.adaptive:
        more = repeats.at_most - repeats.at_least
        lines.append(
            f"then up to {more} more repeats, until the rate is known to {repeats.until:.0%}"
            " or the differences are decided"
        )
    lines += [f"left out: {cell}" for cell in plan.left_out]
    most = f" to {len(plan.trials)}" if repeats.adaptive else ""
    trials = f"{len(sure)}{most} trial{'' if len(plan.trials) == 1 else 's'}"
    return [*lines, f"{trials}, {_counted(len(plan.left_out), 'cell')} left out"]


def duration_lines(plan: Plan) -> list[str]:
    """How long trials warm up and are measured at least; nothing where steps alone count."""
    lines: dict[str, None] = {}
    for trial in plan.trials:
        warmup_seconds, window_seconds = trial.least_seconds
        if warmup_seconds:
            steps = _counted(trial.measure.warmup_steps, "step")
            lines[f"warm-up: at least {steps} and {warmup_seconds:g} s"] = None
        if window_seconds:
            added = "where the recipe is shorter, steps are added after its end"
            lines[f"measured: at least {window_seconds:g} s; {added}"] = None
    return list(lines)


def time_lines(plan: Plan, out: Path | None, budget_seconds: float | None) -> list[str]:
    """What the trials will take, as earlier ones of the same cells took: in `out`, or else in the
    newest run of the experiment."""
    folders = [out] if out is not None and is_run(out) else runs_of(plan.trials[0].experiment)
    stored = load_run(folders[0]).trials if folders else ()
    cells = {cell_of(trial) for trial in plan.trials}
    known = [result for result in stored if cell_id(result.trial) in cells]
    done = {result.id for result in known} if folders == [out] else set()
    todo = [trial for trial in plan.trials if trial.id not in done]
    repeats, limits = plan.trials[0].measure.repeats, plan.trials[0].limits
    sure = [trial for trial in todo if trial.repeat < repeats.at_least]
    least, most = (expected_seconds(trials, known) for trials in (sure, todo))
    if least is None or most is None:
        longest = duration(limits.trial_seconds)
        return [f"time: not known before a trial has run; each ends after {longest} at most"]
    range_text = duration(least) + (f" to {duration(most)}" if repeats.adaptive else "")
    lines = [f"time: about {range_text} and the verification, by trials of {folders[0]}"]
    if budget_seconds is not None:
        rounds = int(budget_seconds / most * len({trial.repeat for trial in todo})) if most else 0
        enough = "all of it" if budget_seconds >= most else f"about {rounds} of {repeats} repeats"
        lines.append(f"budget: {duration(budget_seconds)}, enough for {enough}")
    return lines


def unavailable_lines(trials: Iterable[Trial], machine: Machine) -> list[str]:
    """What this machine lacks for the trials of one node, each reason once, with its remedy."""
    counts: Counter[str] = Counter()
    for trial in trials:
        try:
            if trial.nodes == 1:
                trial.built_strategy.check(trial.world_size, machine, trial.recipe)
        except StrategyUnavailable as error:
            counts[f"{error.reason}; {error.remedy}" if error.remedy else error.reason] += 1
    return [
        f"{_counted(count, 'trial')} {'is' if count == 1 else 'are'} recorded as unavailable here:"
        f" {reason}"
        for reason, count in counts.items()
    ]


def _row(number: int, trial: Trial) -> list[str]:
    varied = {title_of(key): value for key, value in trial.varied.items()}
    varied = trial.strategy.options | varied
    return [
        f"{number:4d}",
        trial.id,
        trial.strategy.name,
        _counted(trial.world_size, "rank"),
        f"repeat {trial.repeat + 1} of {trial.measure.repeats}",
        GAP.join(f"{key}={' '.join(shown(value).split())}" for key, value in varied.items()),
    ]


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
