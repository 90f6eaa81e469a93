"""Invented rows: what each cell measured, repeat by repeat, as a stored run and a comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from shardmark.base.metrics import METRICS, TRIAL_METRICS
from shardmark.base.results.schema import (
    Failure,
    Outcome,
    StabilityFinding,
    StabilityKind,
    TrialResult,
)
from shardmark.base.results.store import load_run
from shardmark.bench.analysis.compare.comparison import Comparison, compare
from shardmark.bench.analysis.compare.rounding import rounding_of
from tests.golden.invented import EXPERIMENT, invented_rank, trained_trial, write_run

BATCH = 64
MIB = 2.0**20
OTHERS = StabilityFinding(
    kind=StabilityKind.OTHER_PROCESSES,
    text="other programs used 95 % of the CPU",
    severity=0.95,
)
ONLY_WHERE_GIVEN = (
    *(name for name in TRIAL_METRICS if METRICS[name].group == "quality"),
    *("staleness_mean", "staleness_max", "exposed_communication_seconds"),
)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Measurements of a cell; a sequence has a value for each repeat."""

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
    mathematics: Sequence[str] = ()
    varied: Mapping[str, Any] = field(default_factory=dict)
    precision: str = "fp32"
    exposed_by_rank: Sequence[float] | None = None
    twin: float | None = None
    """Quality of a trial whose initial weights were changed by one rounding."""
    inherits: str | None = None
    disturbed: Sequence[int] = ()
    """Repeats beside which other programs ran."""


def steps(
    *, data: float = 0.0, forward: float = 0.0, backward: float = 0.0, optimizer: float = 0.0
) -> dict[str, float]:
    """Spans of a step in seconds, and a step that holds nothing else."""
    spans = {"data": data, "forward": forward, "backward": backward, "optimizer": optimizer}
    return {f"{name}_seconds": seconds for name, seconds in spans.items()} | {
        "step_seconds": sum(spans.values())
    }


def compared(path: Path, cells: Sequence[Cell], *, repeats: int = 3) -> Comparison:
    """The cells as a stored run, compared; the verdicts are set afterwards."""
    trials = [_trial(cell, repeat) for cell in cells for repeat in range(repeats)]
    trials += [_twin(cell) for cell in cells if cell.twin is not None]
    run = load_run(write_run(path / "run", trials))
    comparison = compare([run])
    by_key = {_key(cell): cell for cell in cells}
    rows = []
    for row in comparison.rows:
        cell = by_key[row.strategy, row.world_size, row.precision, str(dict(row.varied))]
        keys = ("equivalent", "deviation", "guarantee", "inherits")
        rows.append(replace(row, **{key: getattr(cell, key) for key in keys}))
    return replace(comparison, rows=tuple(rows), rounding=rounding_of([run], rows))


def _key(cell: Cell) -> tuple[str, int, str, str]:
    return cell.strategy, cell.world_size, cell.precision, str(dict(cell.varied))


def _twin(cell: Cell) -> TrialResult:
    assert cell.twin is not None
    made = _trial(replace(cell, qualities=(cell.twin,)), 0)
    return made.model_copy(update={"id": f"{made.id}-twin", "trial": {**made.trial, "twin": True}})


def _trial(cell: Cell, repeat: int) -> TrialResult:
    failed = cell.outcome is not Outcome.OK
    quality = cell.qualities[repeat % len(cell.qualities)] if cell.qualities else None
    return trained_trial(
        cell.strategy,
        cell.world_size,
        repeat,
        qualities=[
            None if quality is None else {"accuracy_top1": quality * share} for share in (0.5, 1.0)
        ],
        seconds=0.0 if failed else 10 * BATCH / cell.rates[repeat % len(cell.rates)],
        slower=0.0,
        record=lambda rank: _record(cell, rank),
        outcome=cell.outcome,
        failure=Failure(reason=cell.reason) if failed else None,
        metrics=_metrics(cell, repeat),
        stability=(OTHERS,) if repeat in cell.disturbed else (),
        varied=dict(cell.varied),
        precision=cell.precision,
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
    rate = cell.rates[repeat % len(cell.rates)]
    values: dict[str, float | None] = dict.fromkeys(ONLY_WHERE_GIVEN)
    values |= steps(backward=BATCH / rate)
    values["samples_per_second"] = rate
    values["peak_memory_bytes"] = cell.peaks[repeat % len(cell.peaks)]
    if cell.qualities:
        values["accuracy_top1"] = cell.qualities[repeat % len(cell.qualities)]
    return values | dict(cell.metrics)


def _record(cell: Cell, number: int) -> dict[str, Any]:
    rank = invented_rank(number)
    changes: dict[str, Any] = {"settings": {**rank.settings, "mathematics": list(cell.mathematics)}}
    if cell.exposed_by_rank is not None and rank.probe is not None:
        exposed = {"exposed_communication_seconds": cell.exposed_by_rank[number]}
        changes["probe"] = rank.probe.model_copy(update=exposed)
    return changes
