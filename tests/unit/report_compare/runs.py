"""Invented trials whose speed, memory and learning a test chooses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardmark.analysis.compare.comparison import Comparison, compare
from shardmark.analysis.compare.rows import Row
from shardmark.results.schema import EpochRecord, TrialResult, WindowRecord
from shardmark.results.store import StoredRun
from tests.golden.invented import STARTED_AT_SECONDS, invented_rank, invented_trial

STEPS = 10


def learning_trial(
    strategy: str = "ddp",
    ranks: int = 2,
    repeat: int = 0,
    *,
    accuracies: Sequence[float | None] = (0.5, 0.75),
    losses: Sequence[float | None] | None = None,
    seconds: float = 10.0,
    **fields: Any,
) -> TrialResult:
    """Epochs of ten steps, none of them warm-up; each takes `seconds`, and rank 1 a second more."""
    made = invented_trial(strategy, ranks, repeat, **fields)
    if not made.ranks:
        return made
    given = losses or [1.0 / number for number in range(1, len(accuracies) + 1)]
    records = []
    for rank in range(ranks):
        epochs, windows = [], []
        for index, (accuracy, loss) in enumerate(zip(accuracies, given, strict=True)):
            steps = {"first_step": index * STEPS, "end_step": (index + 1) * STEPS}
            epochs.append(
                EpochRecord(
                    epoch=index,
                    train_loss=loss,
                    evaluation_seconds=3.0,
                    quality={"accuracy_top1": accuracy},
                    **steps,
                )
            )
            windows.append(
                WindowRecord(
                    started_at_seconds=STARTED_AT_SECONDS + index * (seconds + 5),
                    window_seconds=seconds + (rank == 1),
                    **steps,
                )
            )
        changes = {"epochs": tuple(epochs), "windows": tuple(windows)}
        records.append(invented_rank(rank).model_copy(update=changes))
    return made.model_copy(update={"ranks": tuple(records)})


def compared(*trials: TrialResult) -> Comparison:
    return compare([StoredRun(path=Path("run"), trials=trials)])


def row_with(values: Mapping[str, Sequence[float]], name: str = "ddp", **fields: Any) -> Row:
    """A row that has just these values by repeat; no other one of that name should exist."""
    (row,) = compared(invented_trial(name, 2)).rows
    by_repeat = {metric: dict(enumerate(found)) for metric, found in values.items()}
    return replace(row, values=by_repeat, **fields)
