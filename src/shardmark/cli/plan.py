"""What `run --dry-run` prints: the trials in their order, and the cells left out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from shardmark.cli.progress import shown
from shardmark.experiment.schema import Trial

if TYPE_CHECKING:
    from shardmark.experiment.matrix import Plan

GAP = "  "
"""Between columns; no column has it inside."""


def plan_lines(plan: Plan) -> list[str]:
    """Number, id, strategy, ranks, repeat, then each option and varied key as KEY=VALUE."""
    rows = [_row(number, trial) for number, trial in enumerate(plan.trials, start=1)]
    lines = [*_aligned(rows), *(f"left out: {cell}" for cell in plan.left_out)]
    trials, cells = len(plan.trials), len(plan.left_out)
    return [*lines, f"{_counted(trials, 'trial')}, {_counted(cells, 'cell')} left out"]


def _row(number: int, trial: Trial) -> list[str]:
    varied = {**trial.strategy.options, **trial.varied}
    return [
        f"{number:4d}",
        trial.id,
        trial.strategy.name,
        _counted(trial.world_size, "rank"),
        f"repeat {trial.repeat + 1} of {trial.measure.repeats}",
        GAP.join(f"{key}={' '.join(shown(value).split())}" for key, value in varied.items()),
    ]


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        GAP.join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
