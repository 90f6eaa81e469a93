"""Builders of invented trials and comparisons that several folders of tests share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shardmark.analysis.compare.comparison import Comparison, compare
from shardmark.report.figures import Figure, Panel, Series, figures_of
from shardmark.results.schema import ExchangeRecord, RankRecord, TrialResult
from shardmark.results.store import StoredRun, load_run
from tests.golden.invented import (
    STARTED_AT_SECONDS,
    invented_rank,
    invented_trial,
    trained,
    write_run,
)

FIRST_STEP_AT_SECONDS = STARTED_AT_SECONDS + 6.25
"""When the invented ranks took their first step."""


def comparison_of(path: Path, trials: Iterable[TrialResult], **files: Any) -> Comparison:
    return compare([load_run(write_run(path, trials, **files))])


def figures_by_name(comparison: Comparison) -> dict[str, Figure]:
    return {figure.name: figure for figure in figures_of(comparison)}


def series_of(panel: Panel, name: str) -> Series:
    return next(series for series in panel.series if series.name == name)


def two_epochs(number: int, losses: tuple[float, float] = (1.5, 0.5)) -> RankRecord:
    """An invented rank with two epochs of 22 steps in four seconds."""
    qualities = [
        {"validation_loss": loss / 2, "accuracy_top1": 0.5 + epoch / 4}
        for epoch, loss in enumerate(losses)
    ]
    rank = invented_rank(number)
    return trained(rank, qualities, losses=losses, steps=22, seconds=4.0, warmup=5)


def server(rank: int, staleness: Mapping[str, int]) -> RankRecord:
    exchange = ExchangeRecord(pushes=sum(staleness.values()), staleness=dict(staleness))
    changes = {"role": "server", "exchange": exchange, "windows": (), "epochs": ()}
    return invented_rank(rank).model_copy(update=changes)


def sample(
    seconds: float, *, sent: float, cpu: Mapping[int, float], gpus: Iterable[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    """So many seconds after the first step: bytes sent and CPU seconds by rank, since any start."""
    return {
        "at_seconds": FIRST_STEP_AT_SECONDS + seconds,
        "ranks": [
            {"rank": rank, "pid": 4000 + rank, "cpu_seconds": used} for rank, used in cpu.items()
        ],
        "network": {
            "lo": {"bytes_sent": sent, "bytes_received": 0},
            "gone": {"bytes_sent": 5} if seconds < 1 else {},
        },
        "gpus": list(gpus),
    }


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
