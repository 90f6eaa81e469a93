"""Runs to report: many trials with raw files, and one whose every text is hostile."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from shardmark.core.run_files import LOG_FILE, SAMPLES_FILE, STEPS_FILE
from shardmark.results.schema import (
    EpochRecord,
    Failure,
    Outcome,
    RankRecord,
    TrialResult,
    WindowRecord,
)
from shardmark.results.store import RunFolder
from shardmark.results.verification import Cause, Verdict, Verification, write_verification
from shardmark.trials.trial import cell_id
from tests.golden.invented import EXPERIMENT, STARTED_AT_SECONDS, invented_rank, invented_trial

STEPS = 60
STEP_SECONDS = 0.125
STRATEGIES = ("ddp", "fsdp", "zero-1", "zero-3", "ps-sync", "ps-async")
SPEED = {"single": 1.0, "ddp": 0.9, "fsdp": 0.75, "zero-1": 0.85, "zero-3": 0.6, "ps-sync": 0.4}
PEAK_MEBIBYTES = {"single": 400, "ddp": 410, "fsdp": 220, "zero-1": 330, "zero-3": 180}
HOSTILE = (
    "<script>alert(1)</script>",
    "\"><img src=x onerror='alert(2)'>",
    "</script><script>alert(3)</script>",
    "'\"`${alert(4)}{{ 7 * 7 }}",
    "<!--<script>",
    "<a href='javascript:alert(5)'>x</a>",
    "\u202eesrever \u05d0\u05d1\u05d2 \u0627\u0644",
    "&lt;b&gt; &amp; \u2028 \U0001f600",
)
LOG = "\n".join(
    [*(f"line {number}" for number in range(100)), "\x1b[31mlast words\x1b[0m", *HOSTILE]
)


def small_run(path: Path) -> Path:
    """Three strategies, two repeats, one trial that ran out of memory, verdicts of all kinds."""
    trials = [
        *(trial("single", 1, repeat) for repeat in range(3)),
        *(trial(name, size, repeat) for name in ("ddp", "fsdp") for size in (2, 4)
          for repeat in range(3)),
        complete(
            invented_trial(
                "zero-3",
                2,
                outcome=Outcome.OUT_OF_MEMORY,
                failure=Failure(reason="rank 1 was killed", remedy="a smaller batch", rank=1),
            )
        ),
    ]  # fmt: skip
    store(path, trials)
    verdicts = [
        *(verdict("ddp", size, equivalent=True) for size in (2, 4)),
        verdict(
            "fsdp",
            2,
            equivalent=False,
            cause=Cause(
                text="gradients are summed, not averaged",
                evidence="the ratio of the norms is 2",
                setting="averaging",
                first_deviation="gradients of the first step",
            ),
        ),
        verdict("zero-3", 2, equivalent=None, guarantee="every gradient is applied once"),
    ]
    write_verification(
        path, Verification(reference="one process", steps=3, verdicts=tuple(verdicts))
    )
    return path


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
    """Other programs took the machine: one repeat far from the others, one that drifts."""
    slow = {"samples_per_second": 150.0, "step_seconds": 64 / 150}
    trials = [
        trial(name, size, repeat, **({"changed": slow} if (name, repeat) == ("ddp", 2) else {}))
        for name, size in (("single", 1), ("ddp", 2), ("fsdp", 2))
        for repeat in range(4)
    ]
    store(path, trials)
    load = {"average": [1.9], "busy_processes": [{"name": "burner", "cpu_percent": 195.0}]}
    RunFolder(path).write_environment({"host": "invented", "load": load})
    return path


def hostile_run(path: Path) -> Path:
    """Whatever text a run can hold tries to be more than text."""
    trials = []
    for number, text in enumerate(HOSTILE):
        options: dict[str, Any] = {"strategy_options": {"wrap": text}}
        made = trial("ddp", 2, number, **options)
        failed = invented_trial(
            "fsdp",
            2,
            number,
            outcome=Outcome.FAILED,
            failure=Failure(reason=text, remedy=text, rank=0),
            **options,
        )
        for one in (made, complete(failed)):
            inside = {**one.trial, "experiment": HOSTILE[0] + HOSTILE[1]}
            inside["workload"] = {"name": text, "model": HOSTILE[1], "dataset": HOSTILE[2]}
            identity = f"{one.id} {text.replace('/', ' ')}"
            trials.append(one.model_copy(update={"trial": inside, "id": identity}))
    store(path, trials)
    folder = RunFolder(path)
    folder.write_experiment({**EXPERIMENT, "name": HOSTILE[2]})
    folder.write_environment(
        {
            "host": HOSTILE[0],
            "cpu": {"model": HOSTILE[1]},
            "packages": {HOSTILE[2]: HOSTILE[0]},
            "load": {"average": [1.0], "busy_processes": [{"name": HOSTILE[1]}]},
        }
    )
    cause = Cause(text=HOSTILE[0], evidence=HOSTILE[1], setting=HOSTILE[2], first_deviation="x")
    verdicts = (verdict(HOSTILE[0], 2, equivalent=False, cause=cause),)
    write_verification(path, Verification(reference=HOSTILE[1], steps=3, verdicts=verdicts))
    return path


def trial(
    strategy: str,
    world_size: int,
    repeat: int,
    changed: Mapping[str, float] | None = None,
    **fields: Any,
) -> TrialResult:
    """A trial of `STEPS` steps in three epochs; servers stand beside a parameter server's."""
    served = strategy.startswith("ps-")
    ranks = [rank_record(number, world_size) for number in range(world_size)]
    if served:
        server = ranks[0].model_copy(
            update={"rank": world_size, "role": "server", "windows": (), "epochs": (), "samples": 0}
        )
        ranks.append(server)
    drift = 1 + 0.01 * math.sin(7.0 * repeat + len(strategy))
    rate = 400.0 * world_size ** SPEED.get(strategy, 0.8) * drift
    metrics: dict[str, float | None] = {
        "samples_per_second": rate,
        "samples_per_second_per_rank": rate / world_size,
        "step_seconds": 64 / rate,
        "data_seconds": 0.05 * 64 / rate,
        "forward_seconds": 0.3 * 64 / rate,
        "backward_seconds": 0.5 * 64 / rate,
        "optimizer_seconds": 0.1 * 64 / rate,
        "exposed_communication_seconds": 0.05 * 64 / rate,
        "activation_peak_bytes": 60e6,
        "peak_memory_bytes": 2**20 * (PEAK_MEBIBYTES.get(strategy, 300) - 10.0 * world_size),
        "staleness_mean": 0.5 * (world_size - 1) if served else None,
        **(changed or {}),
    }
    made = invented_trial(
        strategy, world_size, repeat, metrics=metrics, ranks=tuple(ranks), **fields
    )
    return complete(made)


def complete(result: TrialResult) -> TrialResult:
    """With all in its trial that a verdict refers to."""
    spec = {"name": result.strategy, "options": result.strategy_options}
    inside = {**result.trial, "strategy": spec, "world_size": result.world_size}
    return result.model_copy(update={"trial": inside})


def rank_record(rank: int, world_size: int) -> RankRecord:
    per_epoch = STEPS // 3
    began = STARTED_AT_SECONDS + 6
    epochs = [
        EpochRecord(
            epoch=epoch,
            first_step=epoch * per_epoch,
            end_step=(epoch + 1) * per_epoch,
            train_loss=2.0 / (epoch + 1),
            evaluation_seconds=0.25,
            quality={"validation_loss": 2.1 / (epoch + 1), "accuracy_top1": 0.3 * (epoch + 1)},
        )
        for epoch in range(3)
    ]
    windows = [
        WindowRecord(
            first_step=max(5, one.first_step),
            end_step=one.end_step,
            started_at_seconds=began + max(5, one.first_step) * STEP_SECONDS + 0.25 * one.epoch,
            window_seconds=(one.end_step - max(5, one.first_step)) * STEP_SECONDS,
        )
        for one in epochs
    ]
    changes = {
        "epochs": tuple(epochs),
        "windows": tuple(windows),
        "first_step_at_seconds": began,
        "steps_per_epoch": per_epoch,
        "samples": 64 // world_size * (STEPS - 5),
    }
    return invented_rank(rank).model_copy(update=changes)


def verdict(
    strategy: str,
    world_size: int,
    *,
    equivalent: bool | None,
    cause: Cause | None = None,
    guarantee: str | None = None,
) -> Verdict:
    return Verdict(
        id=cell_id(complete(invented_trial(strategy, world_size)).trial),
        strategy=strategy,
        strategy_options={},
        world_size=world_size,
        precision="fp32",
        varied={},
        equivalent=equivalent,
        checks=(),
        cause=cause,
        guarantee=guarantee,
    )


def store(path: Path, trials: Iterable[TrialResult]) -> Path:
    """With whole raw files for the first repeat, and a log for everything."""
    folder = RunFolder.create(path)
    folder.write_experiment(EXPERIMENT)
    folder.write_environment(
        {"date": "2026-01-01T00:00:00+00:00", "host": "invented", "python": "3.11", "git": None}
    )
    for result in trials:
        place = folder.create_trial(result.id)
        (place / LOG_FILE).write_text(LOG, encoding="utf-8")
        if result.outcome is Outcome.OK:
            (place / STEPS_FILE).write_text("".join(steps(result)))
            (place / SAMPLES_FILE).write_text("".join(samples(result)))
        folder.write_result(result)
    return path


def steps(result: TrialResult) -> Iterable[str]:
    for rank in range(result.world_size if result.repeat == 0 else 1):
        for step in range(STEPS):
            line = {
                "rank": rank,
                "step": step,
                "epoch": step * 3 // STEPS,
                "measured": step >= 5,
                "samples": 64 // result.world_size,
                "loss": 2.5 - step / STEPS + 0.1 * math.sin(step),
                "learning_rate": 0.01,
                "started_at_seconds": STARTED_AT_SECONDS + 6 + step * STEP_SECONDS,
                "step_seconds": STEP_SECONDS,
                "data_seconds": 0.01,
                "forward_seconds": 0.04,
                "backward_seconds": 0.06,
                "optimizer_seconds": 0.01,
            }
            yield json.dumps(line) + "\n"


def samples(result: TrialResult) -> Iterable[str]:
    for number in range(40 if result.repeat == 0 else 2):
        ranks = [
            {
                "rank": rank,
                "pid": 4000 + rank,
                "cpu_seconds": 0.2 * number,
                "rss_bytes": 500_000_000 + 1_000_000 * number,
                "threads": 4,
                "processes": 1,
                "open_files": 40,
                "context_switches": 100 * number,
            }
            for rank in range(result.world_size)
        ]
        sent = {"bytes_sent": 1_000_000 * number**2, "bytes_received": 1_000_000 * number**2}
        line = {
            "at_seconds": STARTED_AT_SECONDS + 5.5 + 0.25 * number,
            "ranks": ranks,
            "network": {"lo": sent},
            "gpus": [],
        }
        yield json.dumps(line) + "\n"
