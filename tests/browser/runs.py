"""Runs to report: small, a grid of 96 trials, and disturbed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from shardmark.base.cells import cell_id
from shardmark.base.results.schema import (
    Failure,
    Outcome,
    StabilityFinding,
    StabilityKind,
    TrialResult,
)
from shardmark.base.results.verification import Cause, Verdict, Verification, write_verification
from tests.golden.invented import (
    FIRST_STEP_AT_SECONDS,
    invented_verdict,
    sample_line,
    server_record,
    trained_trial,
    write_run,
)

STEPS, STEP_SECONDS = 60, 0.125
STRATEGIES = ("ddp", "fsdp", "zero-1", "zero-3", "ps-sync", "ps-async")
SPEED = {"single": 1.0, "ddp": 0.9, "fsdp": 0.75, "zero-1": 0.85, "zero-3": 0.6, "ps-sync": 0.4}
PEAK_MEBIBYTES = {"single": 400, "ddp": 410, "fsdp": 220, "zero-1": 330, "zero-3": 180}
PARTS = {"step": 1.0, "data": 0.05, "forward": 0.3, "backward": 0.5, "optimizer": 0.1,
         "exposed_communication": 0.05}  # fmt: skip
"""Shares of a step."""
LOG = "\n".join(map(str, range(100)))


def small_run(path: Path) -> Path:
    """Three strategies, three repeats, one trial that ran out of memory, verdicts of all kinds."""
    killed = Failure(reason="rank 1 was killed", remedy="a smaller batch", rank=1)
    sizes = [("single", 1), ("ddp", 2), ("ddp", 4), ("fsdp", 2), ("fsdp", 4)]
    trials = [trial(name, size, repeat) for name, size in sizes for repeat in range(3)]
    trials.append(trial("zero-3", 2, 0, outcome=Outcome.OUT_OF_MEMORY, failure=killed))
    summed = Cause(
        text="gradients are summed, not averaged",
        evidence="the ratio of the norms is 2",
        setting="averaging",
        first_deviation="gradients of the first update",
    )
    return store(
        path,
        trials,
        [
            *(verdict("ddp", size, equivalent=True) for size in (2, 4)),
            verdict("fsdp", 2, equivalent=False, cause=summed),
            verdict("zero-3", 2, equivalent=None, guarantee="every gradient is applied once"),
        ],
    )


def grid_run(path: Path) -> Path:
    """96 trials: two precisions, two batches, and strategies on two and four ranks."""
    return store(
        path,
        [
            trial(name, size, repeat, precision=precision,
                  varied={"recipe.global_batch": batch},
                  id=f"{name}-{size}-{precision}-{batch}-{repeat}")
            for precision in ("fp32", "bf16")
            for batch in (64, 128)
            for name in STRATEGIES
            for size in (2, 4)
            for repeat in (0, 1)
        ],
    )  # fmt: skip


def disturbed_run(path: Path) -> Path:
    """Other programs took the machine from every repeat of `ddp`, whose rates are far apart."""
    kind, text = StabilityKind.OTHER_PROCESSES, "other programs used 95 % of the CPU"
    taken = {"stability": (StabilityFinding(kind=kind, text=text, severity=0.95),)}
    trials = [
        trial(
            name,
            size,
            repeat,
            {"samples_per_second": 300.0 + 100 * repeat} if name == "ddp" else {},
            **(taken if name == "ddp" else {}),
        )
        for name, size in (("single", 1), ("ddp", 2), ("fsdp", 2))
        for repeat in range(4)
    ]
    load = {"average": [1.9], "busy_processes": [{"name": "burner", "cpu_percent": 195.0}]}
    return store(path, trials, environment={"host": "invented", "load": load})


def trial(
    strategy: str,
    world_size: int,
    repeat: int,
    metrics: dict[str, Any] | None = None,
    **fields: Any,
) -> TrialResult:
    """A trial of `STEPS` steps in three epochs; servers stand beside a parameter server's."""
    rate = 400.0 * world_size ** SPEED.get(strategy, 0.8)
    rate *= 1 + 0.01 * math.sin(7.0 * repeat + len(strategy))
    served = strategy.startswith("ps-")
    values: dict[str, float | None] = {
        **{f"{part}_seconds": share * 64 / rate for part, share in PARTS.items()},
        "samples_per_second": rate,
        "samples_per_second_per_rank": rate / world_size,
        "activation_peak_bytes": 60e6,
        "peak_memory_bytes": 2**20 * (PEAK_MEBIBYTES.get(strategy, 300) - 10.0 * world_size),
        "staleness_mean": 0.5 * (world_size - 1) if served else None,
    }
    result = trained_trial(
        strategy,
        world_size,
        repeat,
        qualities=[{"validation_loss": 2.1 / at, "accuracy_top1": 0.3 * at} for at in (1, 2, 3)],
        steps=STEPS // 3,
        seconds=STEPS // 3 * STEP_SECONDS,
        slower=0.0,
        warmup=5,
        record=lambda _: {
            "steps_per_epoch": STEPS // 3,
            "samples": 64 // world_size * (STEPS - 5),
        },
        metrics=values | (metrics or {}),
        **fields,
    )
    ranks = (
        *result.ranks,
        *([server_record(world_size, {"0": 1})] if served and result.ranks else []),
    )
    spec = {"name": strategy, "options": result.strategy_options}
    inside = {**result.trial, "strategy": spec, "world_size": world_size}
    return result.model_copy(update={"trial": inside, "ranks": ranks})


def verdict(strategy: str, world_size: int, **fields: Any) -> Verdict:
    cell = cell_id(trial(strategy, world_size, 0).trial)
    return invented_verdict(strategy, world_size, id=cell, **fields)


def store(
    path: Path, trials: Iterable[TrialResult], verdicts: Iterable[Verdict] = (), **files: Any
) -> Path:
    """Store whole raw files for the first repeat, and a log for every trial."""
    write_run(path, trials, **{"steps": steps, "samples": samples, "log": LOG, **files})
    if verdicts:
        write_verification(
            path, Verification(reference="one process", steps=3, verdicts=tuple(verdicts))
        )
    return path


def steps(result: TrialResult) -> Iterator[dict[str, Any]]:
    for rank in range(result.world_size if result.repeat == 0 else 1):
        for step in range(STEPS):
            yield {
                "rank": rank,
                "step": step,
                "epoch": step * 3 // STEPS,
                "measured": step >= 5,
                "samples": 64 // result.world_size,
                "loss": 2.5 - step / STEPS + 0.1 * math.sin(step),
                "started_at_seconds": FIRST_STEP_AT_SECONDS + step * STEP_SECONDS,
                "step_seconds": STEP_SECONDS,
            }


def samples(result: TrialResult) -> Iterator[dict[str, Any]]:
    for number in range(40 if result.repeat == 0 else 2):
        yield sample_line(
            0.25 * number - 0.5,
            sent=10**6 * number**2,
            cpu=dict.fromkeys(range(result.world_size), 0.2 * number),
            rss_bytes=500_000_000,
            threads=4,
        )
