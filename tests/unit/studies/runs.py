"""Invented runs of a detection experiment, with epochs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardmark.analysis.studies.study import load_study
from shardmark.cli import main
from shardmark.results.schema import RankRecord, TrialResult
from tests.golden.invented import invented_rank, invented_trial, trained, write_run

if TYPE_CHECKING:
    import pytest

STEPS, WARMUP = 10, 4


def as_published() -> dict[str, dict[str, Any]]:
    """Workload and recipe of `lamsal-2025`."""
    content: dict[str, dict[str, Any]] = {"workload": {}, "recipe": {"per_rank_batch": 8}}
    for key, value in load_study("lamsal-2025").conditions.items():
        section, name, *of = key.split(".")
        if of:
            content[section].setdefault(name, {})[of[0]] = value
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
    workload: dict[str, Any] | None = None,
    recipe: dict[str, Any] | None = None,
    **fields: Any,
) -> TrialResult:
    """Two epochs of ten steps, four of them warm-up; each epoch takes `seconds` on rank 0."""
    published = as_published()
    trial = {
        "experiment": "invented",
        "workload": published["workload"] | (workload or {}),
        "recipe": published["recipe"] | (recipe or {}),
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
    return made.model_copy(update={"ranks": tuple(_rank(n, seconds, device) for n in range(ranks))})


def _rank(number: int, seconds: float, device: str) -> RankRecord:
    """Rank 1 is one second slower in the second epoch."""
    rank = trained(
        invented_rank(number),
        [{"map": 0.125 + epoch / 8, "map_50": None} for epoch in (0, 1)],
        losses=(0.75, 0.5),
        steps=STEPS,
        seconds=seconds,
        warmup=WARMUP,
        evaluation_seconds=3.0,
    )
    first, second = rank.windows
    slower = second.model_copy(update={"window_seconds": seconds + number})
    uuids = () if device == "cpu" else (f"GPU-{number}",)
    changes = {"windows": (first, slower), "device": device, "device_uuids": uuids}
    return rank.model_copy(update=changes)


def write_detection(path: Path, trials: Sequence[TrialResult]) -> Path:
    """A stored run with the environment that a comparison reads."""
    cpu = {"usable_cores": 2, "model": "AMD EPYC"}
    packages = {"torch": "2.15.0", "deepspeed": "0.19.8"}
    return write_run(path, trials, environment={"cpu": cpu, "packages": packages})


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
