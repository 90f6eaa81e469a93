"""Invented runs of a detection experiment, with epochs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardmark.cli import main
from shardmark.results.schema import EpochRecord, TrialResult, WindowRecord
from shardmark.results.store import RunFolder
from tests.golden.invented import invented_rank, invented_trial

if TYPE_CHECKING:
    import pytest

STEPS = 10
WARMUP = 4
WORKLOAD = {
    "name": "detection",
    "model": "fasterrcnn_resnet50_fpn",
    "dataset": "coco",
    "training_samples": 12000,
    "validation_samples": 2000,
    "weights": "coco",
    "augment": "none",
    "loader_workers": 4,
}
RECIPE: dict[str, Any] = {
    "global_batch": None,
    "per_rank_batch": 8,
    "epochs": 2,
    "steps": None,
    "optimizer": {"name": "sgd", "lr": 0.005, "momentum": 0.9, "weight_decay": 0.0005},
    "schedule": {"name": "constant"},
    "precision": "fp32",
    "activation_checkpointing": False,
    "cpu_offload": False,
}


def detection_trial(
    strategy: str = "ddp",
    ranks: int = 2,
    repeat: int = 0,
    *,
    seconds: float = 10.0,
    rate: float = 100.0,
    device: str = "cpu",
    workload: dict[str, Any] | None = None,
    recipe: dict[str, Any] | None = None,
    **fields: Any,
) -> TrialResult:
    """Two epochs of ten steps, four of them warm-up; each epoch takes `seconds` on rank 0."""
    trial = {
        "experiment": "invented",
        "workload": WORKLOAD | (workload or {}),
        "recipe": RECIPE | (recipe or {}),
        "measure": {"warmup_steps": WARMUP},
        "device_type": "cpu",
    }
    made = invented_trial(
        strategy,
        ranks,
        repeat,
        metrics={"epoch_seconds": seconds, "samples_per_second": rate, "train_loss": 0.5 + repeat},
        trial=trial,
        **fields,
    )
    if not made.ranks:
        return made
    records = tuple(_rank(rank, seconds, device) for rank in range(ranks))
    return made.model_copy(update={"ranks": records})


def _rank(rank: int, seconds: float, device: str) -> Any:
    """Rank 1 is one second slower in the second epoch; the warm-up takes 40 % of the first."""
    epochs = tuple(
        EpochRecord(
            epoch=index,
            first_step=index * STEPS,
            end_step=(index + 1) * STEPS,
            train_loss=0.75 - index / 4,
            evaluation_seconds=3.0,
            quality={"map": 0.125 + index / 8, "map_50": None},
        )
        for index in (0, 1)
    )
    windows = (
        WindowRecord(
            first_step=WARMUP,
            end_step=STEPS,
            started_at_seconds=1000.0 + 0.4 * seconds,
            window_seconds=0.6 * seconds,
        ),
        WindowRecord(
            first_step=STEPS,
            end_step=2 * STEPS,
            started_at_seconds=1000.0 + seconds + 3,
            window_seconds=seconds + rank,
        ),
    )
    changes = {
        "epochs": epochs,
        "windows": windows,
        "first_step_at_seconds": 1000.0,
        "device": device,
        "device_uuid": None if device == "cpu" else f"GPU-{rank}",
    }
    return invented_rank(rank).model_copy(update=changes)


def write_detection(path: Path, trials: Sequence[TrialResult], cores: int | None = 2) -> Path:
    """A stored run with the environment that a comparison reads."""
    folder = RunFolder.create(path)
    folder.write_experiment({"name": "invented"})
    cpu = {} if cores is None else {"cpu": {"usable_cores": cores, "model": "AMD EPYC"}}
    folder.write_environment({**cpu, "packages": {"torch": "2.15.0", "deepspeed": "0.19.8"}})
    for trial in trials:
        folder.write_result(trial)
    return path


def scaled() -> list[TrialResult]:
    """DDP and ZeRO-1 on 2 and 4 ranks; ZeRO-1 takes 1.25 times as long."""
    return [
        detection_trial(strategy, ranks, repeat, rate=50.0 * ranks / factor + repeat)
        for strategy, factor in (("ddp", 1.0), ("zero-1", 1.25))
        for ranks in (2, 4)
        for repeat in (0, 1)
    ]


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["compare", *arguments]) == 0
    return capsys.readouterr().out
