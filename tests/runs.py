"""Builders of invented trials and comparisons that several folders of tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shardmark.base.results.schema import (
    EpochRecord,
    ExchangeRecord,
    Outcome,
    RankRecord,
    TrialResult,
    WindowRecord,
)
from shardmark.base.results.store import StoredRun, load_run
from shardmark.bench.analysis.compare.comparison import Comparison, compare
from shardmark.bench.report.figures import Figure, Panel, Series, figures_of
from shardmark.extras.studies.study import load_study
from tests.golden.invented import STARTED_AT_SECONDS, invented_rank, invented_trial, write_run

FIRST_STEP_AT_SECONDS = STARTED_AT_SECONDS + 6.25
"""When the invented ranks took their first step."""


def store_and_compare(path: Path, trials: Iterable[TrialResult], **files: Any) -> Comparison:
    return compare([load_run(write_run(path, trials, **files))])


def figures_by_name(comparison: Comparison) -> dict[str, Figure]:
    return {figure.name: figure for figure in figures_of(comparison)}


def series_named(panel: Panel, name: str) -> Series:
    return next(series for series in panel.series if series.name == name)


def two_epoch_rank(number: int, losses: tuple[float, float] = (1.5, 0.5)) -> RankRecord:
    """An invented rank with two epochs of 22 steps in four seconds."""
    qualities = [
        {"validation_loss": loss / 2, "accuracy_top1": 0.5 + epoch / 4}
        for epoch, loss in enumerate(losses)
    ]
    rank = invented_rank(number)
    return with_epochs(rank, qualities, losses=losses, steps=22, seconds=4.0, warmup=5)


def server_record(rank: int, staleness: Mapping[str, int]) -> RankRecord:
    exchange = ExchangeRecord(pushes=sum(staleness.values()), staleness=dict(staleness))
    changes = {"role": "server", "exchange": exchange, "windows": (), "epochs": ()}
    return invented_rank(rank).model_copy(update=changes)


def sample_line(
    seconds: float,
    *,
    sent: float,
    cpu: Mapping[int, float],
    gpus: Iterable[Mapping[str, Any]] = (),
    **process: int,
) -> dict[str, Any]:
    """So many seconds after the first step: bytes sent and CPU seconds by rank, since any start."""
    return {
        "at_seconds": FIRST_STEP_AT_SECONDS + seconds,
        "ranks": [
            {"rank": rank, "pid": 4000 + rank, "cpu_seconds": used, **process}
            for rank, used in cpu.items()
        ],
        "network": {
            "lo": {"bytes_sent": sent, "bytes_received": 0},
            "gone": {"bytes_sent": 5} if seconds < 1 else {},
        },
        "gpus": list(gpus),
    }


def trained_trial(
    strategy: str = "ddp",
    ranks: int = 2,
    repeat: int = 0,
    *,
    accuracies: Sequence[float | None] = (0.5, 0.75),
    qualities: Sequence[Mapping[str, float | None] | None] | None = None,
    losses: Sequence[float | None] = (),
    steps: int = 10,
    seconds: float = 10.0,
    slower: float = 1.0,
    warmup: int = 0,
    evaluation_seconds: float = 3.0,
    record: Callable[[int], Mapping[str, Any]] = lambda _: {},
    **fields: Any,
) -> TrialResult:
    """A trial with an epoch for each accuracy, or for each quality.

    Rank 1 takes `slower` seconds more for an epoch; `record` gives changes of a rank's record.
    """
    made = invented_trial(strategy, ranks, repeat, **fields)
    if made.outcome is not Outcome.OK:
        return made
    if qualities is None:
        qualities = [{"accuracy_top1": accuracy} for accuracy in accuracies]
    records = tuple(
        with_epochs(
            invented_rank(rank).model_copy(update=record(rank)),
            qualities,
            losses=losses,
            steps=steps,
            seconds=seconds + slower * (rank == 1),
            warmup=warmup,
            evaluation_seconds=evaluation_seconds,
        )
        for rank in range(ranks)
    )
    return made.model_copy(update={"ranks": records})


def published_settings() -> dict[str, dict[str, Any]]:
    """Workload and recipe of the study `lamsal-2025`."""
    content: dict[str, dict[str, Any]] = {"workload": {}, "recipe": {"per_rank_batch": 8}}
    for key, value in load_study("lamsal-2025").conditions.items():
        section, name, *option = key.split(".")
        if option:
            content[section].setdefault(name, {})[option[0]] = value
        else:
            content[section][name] = value
    return content


def detection_trial(
    strategy: str = "ddp",
    ranks: int = 2,
    repeat: int = 0,
    *,
    seconds: float = 10.0,
    rate: float = 100.0,
    device: str = "cpu",
    workload: Mapping[str, Any] = {},
    recipe: Mapping[str, Any] = {},
    metrics: Mapping[str, float | None] = {},
    **fields: Any,
) -> TrialResult:
    """Two epochs of ten steps of the published experiment, four of them warm-up."""
    published = published_settings()
    return trained_trial(
        strategy,
        ranks,
        repeat,
        qualities=[{"map": 0.125 + epoch / 8, "map_50": None} for epoch in (0, 1)],
        losses=(0.75, 0.5),
        seconds=seconds,
        warmup=4,
        record=lambda rank: {
            "device": device,
            "device_uuids": () if device == "cpu" else (f"GPU-{rank}",),
        },
        metrics={
            "epoch_seconds": seconds,
            "samples_per_second": rate,
            "train_loss": 0.5 + repeat,
            **metrics,
        },
        trial={
            "experiment": "invented",
            "workload": published["workload"] | dict(workload),
            "recipe": published["recipe"] | dict(recipe),
            "measure": {"warmup_steps": 4},
            "device_type": "cpu",
        },
        **fields,
    )


def with_epochs(
    rank: RankRecord,
    qualities: Sequence[Mapping[str, float | None] | None],
    *,
    losses: Sequence[float | None] = (),
    steps: int = 10,
    seconds: float = 10.0,
    warmup: int = 0,
    evaluation_seconds: float = 0.25,
) -> RankRecord:
    """The rank with an epoch for each quality; losses fall as 1, 1/2, 1/3."""
    epochs, windows = [], []
    for epoch, quality in enumerate(qualities):
        first, end = epoch * steps, (epoch + 1) * steps
        measured = max(first, warmup)
        epochs.append(
            EpochRecord(
                epoch=epoch,
                first_step=first,
                end_step=end,
                train_loss=losses[epoch] if losses else 1 / (epoch + 1),
                evaluation_seconds=evaluation_seconds,
                quality=None if quality is None else dict(quality),
            )
        )
        began = (rank.first_step_at_seconds or 0.0) + epoch * (seconds + evaluation_seconds)
        windows.append(
            WindowRecord(
                first_step=measured,
                end_step=end,
                started_at_seconds=began + seconds * (measured - first) / steps,
                window_seconds=seconds * (end - measured) / steps,
            )
        )
    return rank.model_copy(update={"epochs": tuple(epochs), "windows": tuple(windows)})


def compare_trials(*trials: TrialResult) -> Comparison:
    return compare([StoredRun(path=Path("run"), trials=trials)])
