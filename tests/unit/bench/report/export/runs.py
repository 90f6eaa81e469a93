"""A stored run with whole raw files, whose every exported value can be told beforehand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shardmark.base.results.schema import Failure, Outcome, RankRecord, TrialResult
from shardmark.base.results.store import StoredRun, load_run
from tests.golden.invented import (
    STARTED_AT_SECONDS,
    invented_rank,
    invented_trial,
    with_epochs,
    write_run,
)

OK, BROKEN = "ddp-w2-fp32-r0-0a1b2c3d", "fsdp-w2-fp32-r0-4e5f6a7b"
STEPS = 4
"""Two epochs of two steps; the first step is warm-up."""
HOSTILE = '<script>alert(1)</script> | `x`, "quoted"\nsecond line'
QUALITIES: tuple[dict[str, float | None], ...] = (
    {"accuracy_top1": 0.5, "map": None},
    {"accuracy_top1": 0.75, "map": 0.25},
)


def loss_of(rank: int, step: int) -> float | None:
    """Rank 1's loss of step 2 was not a finite number."""
    return None if (rank, step) == (1, 2) else 2.0 - 0.25 * step + 0.5 * rank


def seconds_of(rank: int, step: int) -> float:
    """Rank 1 is the slower one."""
    return 0.125 * (rank + 1) + 0.5 * step


def started_of(step: int) -> float:
    return STARTED_AT_SECONDS + 10 + 5 * step


def rank_record(rank: int) -> RankRecord:
    begun = invented_rank(rank).model_copy(update={"first_step_at_seconds": started_of(0)})
    losses = [loss + 0.25 * rank for loss in (1.5, 0.5)]
    return with_epochs(begun, QUALITIES, losses=losses, steps=2, seconds=3.0 + rank, warmup=1)


def step_lines() -> list[dict[str, Any]]:
    return [
        {
            "rank": rank,
            "step": step,
            "epoch": step // 2,
            "measured": step > 0,
            "samples": 32,
            "loss": loss_of(rank, step),
            "learning_rate": 0.01,
            "started_at_seconds": started_of(step),
            "step_seconds": seconds_of(rank, step),
            "data_seconds": 0.0,
            "forward_seconds": 0.0625,
            "backward_seconds": None,
            "optimizer_seconds": 0.03125,
        }
        for rank in (0, 1)
        for step in range(STEPS)
    ]


def sample_lines() -> list[dict[str, Any]]:
    process = {"pid": 4000, "cpu_seconds": 1.5, "rss_bytes": 2**33 + 1, "threads": 4}
    own = {"eth0": {"bytes_sent": 3, "bytes_received": 5}}
    gpu = {"uuid": "GPU-1", "power_watts": 300.5, "energy_joules": None, "clock_limits": 4}
    return [
        {
            "at_seconds": started_of(0),
            "ranks": [{"rank": 0, **process, "network": own}],
            "network": {"lo": {"bytes_sent": 2**53 + 1, "bytes_received": 7}},
            "gpus": [gpu],
            "machine": {"cpu_seconds": 20.25, "cores": 2},
        }
    ]


def ok_trial(**fields: Any) -> TrialResult:
    varied = {"recipe.optimizer.lr": 0.01, "strategy": "ddp"}
    ranks = (rank_record(0), rank_record(1))
    return invented_trial("ddp", 2, **{"varied": varied, "ranks": ranks, "id": OK, **fields})


def broken_trial() -> TrialResult:
    """Out of memory at the end: it left raw files, its ranks' records and numbers."""
    left = ok_trial()
    trial = invented_trial(
        "fsdp",
        2,
        outcome=Outcome.OUT_OF_MEMORY,
        failure=Failure(reason=HOSTILE, remedy="a smaller batch", rank=1),
        id=BROKEN,
        ranks=left.ranks,
    )
    return trial.model_copy(update={"metrics": left.metrics})


def write_exportable(path: Path, *trials: TrialResult) -> Path:
    """A run of the trials; by default one that ended ok and one that did not."""
    return write_run(
        path,
        trials or (ok_trial(), broken_trial()),
        steps=lambda _: step_lines(),
        samples=lambda _: sample_lines(),
    )


def exportable(path: Path, *trials: TrialResult) -> StoredRun:
    return load_run(write_exportable(path, *trials))
