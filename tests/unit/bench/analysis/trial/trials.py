"""Made-up records of a trial of two ranks: four steps of warm-up, then two windows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from shardmark.base.layout import data_parallel
from shardmark.base.results.schema import (
    CollectiveRecord,
    EpochRecord,
    ProbeRecord,
    RankRecord,
    Summary,
    WindowRecord,
)
from shardmark.bench.analysis.trial.summarise import summarise
from tests.golden.invented import invented_rank

Summarised = tuple[dict[str, Summary | None], dict[str, str]]
"""Metrics, and why one is missing."""
LAUNCHED = 1000.0
WARMUP = 4
STEPS = 10


def windows(rank: int) -> tuple[WindowRecord, ...]:
    """Rank 1 is slower: 2.2 s + 4.4 s in place of 2 s + 4 s."""
    factor = 1.0 + 0.1 * rank
    return (
        WindowRecord(
            first_step=4, end_step=6, started_at_seconds=1010.0, window_seconds=2 * factor
        ),
        WindowRecord(
            first_step=6, end_step=10, started_at_seconds=1020.0, window_seconds=4 * factor
        ),
    )


def probe(rank: int) -> ProbeRecord:
    return ProbeRecord(
        parameter_bytes=100,
        gradient_bytes=100,
        optimizer_state_bytes=200 + 100 * rank,
        peak_memory_bytes=1000,
        collectives={
            "all_reduce": CollectiveRecord(calls=3, payload_bytes=300),
            "broadcast": CollectiveRecord(calls=1, payload_bytes=10 * rank),
        },
        exposed_communication_seconds=0.25,
        flops_per_sample=10**9,
        hardware_flops_per_sample=13 * 10**8,
    )


def epochs(quality: dict[str, float | None] | None) -> tuple[EpochRecord, ...]:
    first = EpochRecord(
        epoch=0, first_step=0, end_step=6, train_loss=2.0, evaluation_seconds=None, quality=None
    )
    last = EpochRecord(
        epoch=1, first_step=6, end_step=10, train_loss=1.5, evaluation_seconds=1.0, quality=quality
    )
    return (first, last)


def record(rank: int, **changes: Any) -> RankRecord:
    values: dict[str, Any] = {
        "pid": 100 + rank,
        "first_step_at_seconds": LAUNCHED + 5 + rank,
        "windows": windows(rank),
        "samples": 66,
        "epochs": epochs({"validation_loss": 1.25, "accuracy_top1": 0.5}),
        "evaluation_seconds": (1.0, 2.0 + rank),
        "probe": probe(rank),
    }
    return invented_rank(rank).model_copy(update=values | changes)


def server_record(rank: int, **changes: Any) -> RankRecord:
    """A rank that holds parameters for the others and takes no step."""
    idle: dict[str, Any] = {
        "role": "server",
        "windows": (),
        "samples": 0,
        "first_step_at_seconds": None,
        "epochs": (),
        "evaluation_seconds": (),
        "probe": None,
    }
    return record(rank, **{**idle, **changes})


def step_lines(ranks: int = 2, steps: int = STEPS) -> list[dict[str, object]]:
    """Measured steps take 1, 2, 3, ... seconds (warm-up 50), ten percent more on rank 1."""
    return [
        {
            "rank": rank,
            "step": step,
            "measured": step >= WARMUP,
            "step_seconds": (1 + 0.1 * rank) * (step - WARMUP + 1 if step >= WARMUP else 50),
            "data_seconds": 0.125,
            "forward_seconds": 0.25,
            "backward_seconds": 0.5,
            "optimizer_seconds": 0.0625,
        }
        for rank in range(ranks)
        for step in range(steps)
    ]


def sample_lines(ranks: int = 2, gpus: Sequence[str] = ()) -> list[dict[str, object]]:
    """Samples of each second from 1000 to 1039; every counter rises evenly."""
    return [
        {
            "at_seconds": 1000.0 + second,
            "ranks": [
                {
                    "rank": rank,
                    "pid": 100 + rank,
                    "cpu_seconds": second * (0.5 + 0.5 * rank),
                    "rss_bytes": 1000 * (rank + 1) + (500 if second == 11 else 0),
                    "threads": 4 + rank,
                    "processes": 1 + rank,
                    "open_files": 20,
                    "context_switches": second * 10 if second % 2 == 0 or second == 39 else None,
                }
                for rank in range(ranks)
            ],
            "network": {
                "lo": {"bytes_sent": second * 100, "bytes_received": second * 100},
                "eth0": {"bytes_sent": second * 10, "bytes_received": second * 1000},
                **({"veth": {"bytes_sent": 10**9, "bytes_received": 10**9}} if second > 20 else {}),
            },
            "gpus": [
                {
                    "uuid": uuid,
                    "utilization_percent": 80 + index,
                    "power_watts": 300.0,
                    "energy_joules": 300.0 * second,
                    "temperature_celsius": 60 + index + (20 if second == 5 else 0),
                    "memory_used_bytes": 10_000,
                }
                for index, uuid in enumerate(gpus)
            ],
        }
        for second in range(40)
    ]


def summarised(
    ranks: Sequence[RankRecord] | None = None,
    steps: Sequence[Mapping[str, object]] | None = None,
    samples: Sequence[Mapping[str, object]] | None = None,
    **changes: Any,
) -> Summarised:
    recipe = SimpleNamespace(
        precision=changes.get("precision", "fp32"), tf32=changes.get("tf32", False)
    )
    trial: Any = SimpleNamespace(
        device_type=changes.get("device_type", "cpu"),
        recipe=recipe,
        layout=changes.get("layout", data_parallel(2)),
        samples_per_step=changes.get("samples_per_step"),
    )
    return summarise(
        trial,
        [record(0), record(1)] if ranks is None else ranks,
        step_lines() if steps is None else steps,
        sample_lines() if samples is None else samples,
        launched_at_seconds=LAUNCHED,
        total_seconds=60.0,
        steps_per_epoch=changes.get("steps_per_epoch", 6),
    )


def value(metrics: Mapping[str, Summary | None], name: str) -> float:
    summary = metrics[name]
    assert summary is not None, name
    return summary.value
