"""Invented trials whose speed, memory and learning a test chooses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardmark.analysis.compare.comparison import Comparison, compare
from shardmark.analysis.compare.rows import Row
from shardmark.results.schema import TrialResult
from shardmark.results.store import StoredRun
from tests.golden.invented import invented_rank, invented_trial, trained


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
    records = []
    for rank in range(ranks):
        record = trained(
            invented_rank(rank),
            [{"accuracy_top1": accuracy} for accuracy in accuracies],
            seconds=seconds + (rank == 1),
            evaluation_seconds=3.0,
        )
        given = losses or [1.0 / (epoch.epoch + 1) for epoch in record.epochs]
        epochs = tuple(
            epoch.model_copy(update={"train_loss": loss})
            for epoch, loss in zip(record.epochs, given, strict=True)
        )
        records.append(record.model_copy(update={"epochs": epochs}))
    return made.model_copy(update={"ranks": tuple(records)})


def compared(*trials: TrialResult) -> Comparison:
    return compare([StoredRun(path=Path("run"), trials=trials)])


def row_with(values: Mapping[str, Sequence[float]], name: str = "ddp", **fields: Any) -> Row:
    """A row that has just these values by repeat; no other one of that name should exist."""
    (row,) = compared(invented_trial(name, 2)).rows
    by_repeat = {metric: dict(enumerate(each)) for metric, each in values.items()}
    return replace(row, values=by_repeat, **fields)
