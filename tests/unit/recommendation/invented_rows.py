"""Invented rows: what each cell measured, repeat by repeat, as a stored run and a comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from shardmark.analysis.compare.comparison import Comparison, compare
from shardmark.core.metrics import TRIAL_METRICS
from shardmark.results.schema import Failure, Outcome, RankRecord, TrialResult
from shardmark.results.store import RunFolder, load_run
from tests.golden.invented import EXPERIMENT, invented_rank, invented_trial, write_run

BATCH = 64
MIB = 2.0**20
GROUPS_WITHOUT = (
    *("accuracy_top1", "accuracy_top5", "validation_loss", "perplexity"),
    *("map", "map_50", "map_75", "mask_map", "mask_map_50", "mask_map_75"),
    *("staleness_mean", "staleness_max"),
)
"""Metrics that a cell has only where a test gives them."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One cell; a sequence holds one value a repeat."""

    strategy: str
    world_size: int
    rates: Sequence[float] = ()
    peaks: Sequence[float] = (100 * MIB,)
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    qualities: Sequence[float] = ()
    outcome: Outcome = Outcome.OK
    reason: str = "the test wants it"
    equivalent: bool | None = True
    deviation: str | None = None
    guarantee: str | None = None
    varied: Mapping[str, Any] = field(default_factory=dict)
    precision: str = "fp32"
    threads: int = 1
    exposed_by_rank: Sequence[float] | None = None
    servers: int = 0


def steps(
    *, data: float = 0.0, forward: float = 0.0, backward: float = 0.0, optimizer: float = 0.0
) -> dict[str, float]:
    """Spans of a step in seconds, and a step that holds nothing else."""
    spans = {"data": data, "forward": forward, "backward": backward, "optimizer": optimizer}
    return {f"{name}_seconds": seconds for name, seconds in spans.items()} | {
        "step_seconds": sum(spans.values())
    }


def compared(
    path: Path, cells: Sequence[Cell], *, repeats: int = 3, cores: float | None = None
) -> Comparison:
    """The cells as a stored run, compared; the verdicts are set afterwards."""
    trials = [_trial(cell, repeat) for cell in cells for repeat in range(repeats)]
    folder = write_run(path / "run", trials)
    if cores is not None:
        environment = {"host": "invented", "cpu": {"usable_cores": cores, "quota_cores": None}}
        RunFolder(folder).write_environment(environment)
    comparison = compare([load_run(folder)])
    by_key = {_key(cell): cell for cell in cells}
    rows = []
    for row in comparison.rows:
        cell = by_key[row.strategy, row.world_size, row.precision, str(dict(row.varied))]
        rows.append(
            replace(
                row,
                equivalent=cell.equivalent,
                deviation=cell.deviation,
                guarantee=cell.guarantee,
            )
        )
    return replace(comparison, rows=tuple(rows))


def _key(cell: Cell) -> tuple[str, int, str, str]:
    return cell.strategy, cell.world_size, cell.precision, str(dict(cell.varied))


def _trial(cell: Cell, repeat: int) -> TrialResult:
    failed = cell.outcome is not Outcome.OK
    return invented_trial(
        cell.strategy,
        cell.world_size,
        repeat,
        outcome=cell.outcome,
        failure=Failure(reason=cell.reason) if failed else None,
        metrics=_metrics(cell, repeat),
        varied=dict(cell.varied),
        precision=cell.precision,
        ranks=() if failed else _ranks(cell, repeat),
        trial={
            "workload": EXPERIMENT["workload"],
            "recipe": {"global_batch": BATCH, "epochs": 2, "steps": None, "seed": 0},
            "measure": {"warmup_steps": 0},
            "strategy": {"name": cell.strategy},
            "world_size": cell.world_size,
            "device_type": "cpu",
        },
        id="-".join(map(str, (*_key(cell)[:3], *cell.varied.values(), repeat))),
    )


def _metrics(cell: Cell, repeat: int) -> dict[str, float | None]:
    if cell.outcome is not Outcome.OK:
        return {}
    values: dict[str, float | None] = dict.fromkeys(
        name for name in TRIAL_METRICS if name in GROUPS_WITHOUT
    )
    rate = cell.rates[repeat % len(cell.rates)]
    values |= steps(backward=BATCH / rate)
    values |= {"exposed_communication_seconds": None, "cpu_percent": None}
    values |= {
        "samples_per_second": rate,
        "peak_memory_bytes": cell.peaks[repeat % len(cell.peaks)],
    }
    if cell.qualities:
        values["accuracy_top1"] = cell.qualities[repeat % len(cell.qualities)]
    return values | dict(cell.metrics)


def _ranks(cell: Cell, repeat: int) -> tuple[RankRecord, ...]:
    """Workers that trained two epochs of 10 steps at the cell's rate, and servers."""
    return tuple(_rank(cell, rank, repeat) for rank in range(cell.world_size + cell.servers))


def _rank(cell: Cell, number: int, repeat: int) -> RankRecord:
    record = invented_rank(number)
    epoch_seconds = 10 * BATCH / cell.rates[repeat % len(cell.rates)]
    quality = cell.qualities[repeat % len(cell.qualities)] if cell.qualities else None
    probe = record.probe
    assert probe is not None
    if cell.exposed_by_rank is not None and number < cell.world_size:
        probe = probe.model_copy(
            update={"exposed_communication_seconds": cell.exposed_by_rank[number]}
        )
    windows = tuple(
        record.windows[0].model_copy(
            update={
                "first_step": 10 * epoch,
                "end_step": 10 * epoch + 10,
                "window_seconds": epoch_seconds,
            }
        )
        for epoch in (0, 1)
    )
    epochs = tuple(
        record.epochs[0].model_copy(
            update={
                "epoch": epoch,
                "first_step": 10 * epoch,
                "end_step": 10 * epoch + 10,
                "quality": None
                if quality is None
                else {"accuracy_top1": quality * (epoch + 1) / 2},
            }
        )
        for epoch in (0, 1)
    )
    return record.model_copy(
        update={
            "role": "worker" if number < cell.world_size else "server",
            "threads": cell.threads,
            "windows": windows,
            "epochs": epochs,
            "probe": probe,
        }
    )
