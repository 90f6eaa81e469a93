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
    """Number, id, strategy, ranks, repeat, then each option and varied key as KEY=VALUE."""
    rows = [_row(number, trial) for number, trial in enumerate(plan.trials, start=1)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        GAP.join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    trials, cells = len(plan.trials), len(plan.left_out)
    lines += [f"left out: {cell}" for cell in plan.left_out]
    return [*lines, f"{_counted(trials, 'trial')}, {_counted(cells, 'cell')} left out"]


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
