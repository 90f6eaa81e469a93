"""What `run --dry-run` prints: the trials in their order, and the cells left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from shardmark.config.axes import title_of
from shardmark.core.errors import StrategyUnavailable
from shardmark.progress.lines import shown
from shardmark.trials.trial import Trial

if TYPE_CHECKING:
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
