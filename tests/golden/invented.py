"""Invented trials with plausible values, for tests and for each version's stored run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from shardmark.base.errors import InputError
from shardmark.base.evidence.checks import Check
from shardmark.base.files.run_files import LOG_FILE, SAMPLES_FILE, STEPS_FILE
from shardmark.base.layout import Layout, data_parallel
from shardmark.base.metrics import METRICS, TRIAL_METRICS
from shardmark.base.results.schema import (
    CollectiveRecord,
    EpochRecord,
    ExchangeRecord,
    Failure,
    Outcome,
    ProbeRecord,
    RankRecord,
    Summary,
    TrialResult,
    WindowRecord,
)
from shardmark.base.results.store import RunFolder, StoredRun, load_run
from shardmark.base.results.verification import REFERENCE, Verdict, Verification, write_verification
from shardmark.bench.analysis.compare.comparison import Comparison, compare
from shardmark.extras.studies.study import load_study
from shardmark.ranks.strategies import build_strategy

STARTED_AT_SECONDS = 1_767_225_600.0
FIRST_STEP_AT_SECONDS = STARTED_AT_SECONDS + 6.25
"""When the invented ranks took their first step."""
NO_GPU = "no CUDA device"
MISSING = {
    "mfu": "the peak of `cpu` is not known",
    "hfu": "the peak of `cpu` is not known",
    "peak_reserved_bytes": NO_GPU,
    "device_used_bytes": NO_GPU,
    "gpu_utilization": NO_GPU,
    "power_watts": NO_GPU,
    "energy_joules": NO_GPU,
    "temperature_celsius": NO_GPU,
    **dict.fromkeys(
        (
            *("map", "map_50", "map_75", "mask_map", "mask_map_50", "mask_map_75"),
            *("tokens_per_second", "tokens_per_second_per_rank", "bits_per_byte", "perplexity"),
        ),
        "the workload has no such metric",
    ),
}
EXPERIMENT = {
    "name": "invented",
    "workload": {"name": "classification", "model": "resnet18", "dataset": "digits"},
    "recipe": {"global_batch": 64, "epochs": 2, "optimizer": {"name": "sgd", "lr": 5e-05}},
    "matrix": {"strategy": ["single", "ddp", "fsdp"], "world_size": [1, 2]},
    "measure": {"warmup_steps": 5, "repeats": 2},
    "device": "cpu",
}


def invented_trial(
    strategy: str = "ddp",
    world_size: int = 2,
    repeat: int = 0,
    *,
    outcome: Outcome = Outcome.OK,
    failure: Failure | None = None,
    metrics: Mapping[str, float | None] | None = None,
    **fields: Any,
) -> TrialResult:
    """A trial; `metrics` changes single values, `fields` those of the result."""
    options = "".join(f"-{key}-{value}" for key, value in fields.get("varied", {}).items())
    identity = f"{strategy}-{world_size}{options}-{repeat}"
    ok = outcome is Outcome.OK
    values = invented_values(strategy, world_size, repeat) | dict(metrics or {}) if ok else {}
    content: dict[str, Any] = {
        "id": identity,
        "trial": {
            "id": identity,
            "experiment": "invented",
            "workload": {"name": "classification", "model": "resnet18", "dataset": "digits"},
            "recipe": {"global_batch": 64, "per_rank_batch": None, "epochs": 2, "steps": None},
            "device_type": "cpu",
        },
        "strategy": strategy,
        "strategy_options": {},
        "world_size": world_size,
        "layout": invented_layout(strategy, world_size, fields.get("strategy_options", {})),
        "precision": "fp32",
        "varied": {},
        "synthetic": False,
        "repeat": repeat,
        "order": 10 * repeat + world_size,
        "outcome": outcome,
        "failure": failure,
        "started_at_seconds": STARTED_AT_SECONDS + 100 * repeat,
        "total_seconds": 21.5,
        "ranks": tuple(invented_rank(rank) for rank in range(world_size)) if ok else (),
        "metrics": {name: _summary(name, values.get(name)) for name in TRIAL_METRICS},
        "missing": {
            name: MISSING.get(name, "not recorded" if ok else "the trial did not end ok")
            for name in TRIAL_METRICS
            if values.get(name) is None
        },
        "files": {},
    }
    return TrialResult.model_validate(content | fields)


def invented_layout(strategy: str, world_size: int, options: Mapping[str, Any]) -> Layout:
    """The strategy's own; replicas for one that is invented too."""
    return _layout(strategy, world_size, json.dumps(options))


@cache
def _layout(strategy: str, world_size: int, options: str) -> Layout:
    try:
        return build_strategy(strategy, json.loads(options)).layout(world_size)
    except InputError:
        return data_parallel(world_size)


def invented_values(strategy: str, world_size: int, repeat: int) -> dict[str, float | None]:
    """Throughput grows a little less than the ranks; each repeat is a little faster."""
    slowdown, gain = (1.0, 0.01) if strategy == "single" else (1.1, 0.02)
    rate = 400.0 * world_size / slowdown * (1 + gain * repeat)
    state = {"parameter_bytes": 44.7e6, "gradient_bytes": 44.7e6, "optimizer_state_bytes": 89.4e6}
    values: dict[str, float | None] = dict.fromkeys(TRIAL_METRICS, 1.0)
    values |= dict.fromkeys(MISSING)
    values |= state
    values |= {
        "samples_per_second": rate,
        "samples_per_second_per_rank": rate / world_size,
        "step_seconds": 64 / rate,
        "peak_memory_bytes": 250e6 / world_size + 180e6,
        "accuracy_top1": 0.953,
        "validation_loss": 0.1875,
        "nonfinite_steps": 0.0,
        "measured_steps": 39.0,
    }
    return values


@cache
def invented_rank(rank: int) -> RankRecord:
    """A rank of two epochs of 22 steps, the first five of them warm-up."""
    return RankRecord(
        rank=rank,
        role="worker",
        host="invented",
        pid=4000 + rank,
        device="cpu",
        threads=2,
        first_step_at_seconds=FIRST_STEP_AT_SECONDS,
        windows=(
            WindowRecord(
                first_step=5,
                end_step=22,
                started_at_seconds=STARTED_AT_SECONDS + 7.5,
                window_seconds=2.75,
            ),
            WindowRecord(
                first_step=22,
                end_step=44,
                started_at_seconds=STARTED_AT_SECONDS + 10.75,
                window_seconds=3.5,
            ),
        ),
        samples=1248,
        samples_total=1408,
        epochs=(
            EpochRecord(
                epoch=0,
                first_step=0,
                end_step=22,
                train_loss=1.5,
                evaluation_seconds=0.25,
                quality={"validation_loss": 0.75, "accuracy_top1": 0.875, "accuracy_top5": None},
            ),
        ),
        evaluation_seconds=(0.25,),
        initial_weights_sha256="0f" * 32,
        final_weights_sha256="1e" * 32,
        sample_order_sha256="2d" * 32,
        probe=ProbeRecord(
            parameter_bytes=44_700_000,
            gradient_bytes=44_700_000,
            optimizer_state_bytes=89_400_000,
            peak_memory_bytes=305_000_000,
            collectives={"all_reduce": CollectiveRecord(calls=2, payload_bytes=44_700_000)},
            reasons={"exposed_communication_seconds": "the profiler saw no communication"},
        ),
        settings={"averaging": "mean", "gradient_clipping": None, "momentum": 0.9},
    )


Lines = Iterable[Mapping[str, Any]]
STEP = {"rank": 0, "step": 0, "measured": False, "loss": 2.5, "step_seconds": 0.125}


def write_run(
    path: Path,
    trials: Iterable[TrialResult],
    *,
    experiment: Mapping[str, Any] = EXPERIMENT,
    environment: Mapping[str, Any] | None = None,
    steps: Callable[[TrialResult], Lines] = lambda _: [STEP],
    samples: Callable[[TrialResult], Lines] = lambda _: [{"at_seconds": STARTED_AT_SECONDS}],
    log: str = "[rank 0] invented\n",
) -> Path:
    """Store the trials as a run, with short raw files unless others are given."""
    folder = RunFolder.create(path)
    folder.write_experiment(experiment)
    folder.write_environment(environment or {"host": "invented", "python": "3.11", "git": None})
    for result in trials:
        place = folder.create_trial(result.id)
        for name, lines in ((STEPS_FILE, steps(result)), (SAMPLES_FILE, samples(result))):
            (place / name).write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        (place / LOG_FILE).write_text(log, encoding="utf-8")
        folder.write_result(result)
    return path


@cache
def _summary(name: str, value: float | None) -> Summary | None:
    if value is None:
        return None
    over = METRICS[name].over
    if over == "trial":
        return Summary(value=value, over=over)
    return Summary(value=value, over=over, mean=value, maximum=value, imbalance=0.0)


def invented_verdict(
    strategy: str = "ddp", world_size: int = 2, *, equivalent: bool | None = True, **fields: Any
) -> Verdict:
    content = {
        "id": strategy,
        "strategy": strategy,
        "strategy_options": {},
        "world_size": world_size,
        "precision": "fp32",
        "varied": {},
        "equivalent": equivalent,
        "checks": (),
        "cause": None,
    }
    return Verdict.model_validate(content | fields)


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


def store_and_compare(path: Path, trials: Iterable[TrialResult], **files: Any) -> Comparison:
    return compare([load_run(write_run(path, trials, **files))])


def compare_trials(*trials: TrialResult, baseline: str | None = None) -> Comparison:
    return compare([StoredRun(path=Path("run"), trials=trials)], baseline)


def write_golden(path: Path) -> Path:
    """The stored run of today's formats; once released, it is never written again."""
    trials = [
        invented_trial("single", 1),
        invented_trial("ddp", 2),
        invented_trial(
            "fsdp",
            2,
            outcome=Outcome.OUT_OF_MEMORY,
            failure=Failure(reason="rank 1 was killed", remedy="a smaller batch", rank=1),
        ),
    ]
    check = Check(name="loss", holds=True, found=2.5, expected=2.5, tolerance=1e-6)
    verdict = invented_verdict(id="0" * 12, checks=(check,))
    write_verification(path, Verification(reference=REFERENCE, steps=3, verdicts=(verdict,)))
    return write_run(path, trials)
