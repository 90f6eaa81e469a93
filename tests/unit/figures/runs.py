"""Comparisons of invented trials, for the tests of figures."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tests.golden.invented import STARTED_AT_SECONDS, invented_rank, write_run

from shardmark.analysis.compare.comparison import Comparison, compare
from shardmark.core.run_files import SAMPLES_FILE, STEPS_FILE
from shardmark.report.figures import Figure, Panel, Series, figures_of
from shardmark.results.schema import EpochRecord, ExchangeRecord, RankRecord, TrialResult
from shardmark.results.store import load_run

FIRST_STEP_AT_SECONDS = STARTED_AT_SECONDS + 6.25
"""When the invented ranks took their first step."""
LAST_WINDOW_SECONDS = 8.0
"""From the first step to the end of the last window."""


def comparison_of(path: Path, trials: Iterable[TrialResult]) -> Comparison:
    return compare([load_run(write_run(path, trials))])


def figures_by_name(comparison: Comparison) -> dict[str, Figure]:
    return {figure.name: figure for figure in figures_of(comparison)}


def series_of(panel: Panel, name: str) -> Series:
    return next(one for one in panel.series if one.name == name)


def two_epochs(rank: int, losses: tuple[float, float] = (1.5, 0.5)) -> RankRecord:
    """An invented rank that recorded both of its epochs."""
    epochs = [
        EpochRecord(
            epoch=number,
            first_step=22 * number,
            end_step=22 * (number + 1),
            train_loss=loss,
            evaluation_seconds=0.25,
            quality={"validation_loss": loss / 2, "accuracy_top1": 0.5 + number / 4},
        )
        for number, loss in enumerate(losses)
    ]
    return invented_rank(rank).model_copy(update={"epochs": tuple(epochs)})


def server(rank: int, staleness: Mapping[str, int]) -> RankRecord:
    exchange = ExchangeRecord(pushes=sum(staleness.values()), staleness=dict(staleness))
    changes = {"role": "server", "exchange": exchange, "windows": (), "epochs": ()}
    return invented_rank(rank).model_copy(update=changes)


def write_samples(run: Path, trial: str, samples: Iterable[Mapping[str, Any]]) -> None:
    """Replaces the samples; call it before the run is read, and without its records of files."""
    _write(run, trial, SAMPLES_FILE, samples)


def write_steps(run: Path, trial: str, lines: Iterable[Mapping[str, Any]]) -> None:
    _write(run, trial, STEPS_FILE, lines)


def _write(run: Path, trial: str, name: str, lines: Iterable[Mapping[str, Any]]) -> None:
    folder = run / "trials" / trial
    (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = json.loads((folder / "result.json").read_text())
    del result["files"][name]
    (folder / "result.json").write_text(json.dumps(result))


def sample(
    seconds: float, *, sent: float, cpu: Mapping[int, float], gpus: Iterable[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    """So many seconds after the first step: bytes sent and CPU seconds by rank, since any start."""
    return {
        "at_seconds": FIRST_STEP_AT_SECONDS + seconds,
        "ranks": [
            {"rank": rank, "pid": 4000 + rank, "cpu_seconds": used} for rank, used in cpu.items()
        ],
        "network": {
            "lo": {"bytes_sent": sent, "bytes_received": 0},
            "gone": {"bytes_sent": 5} if seconds < 1 else {},
        },
        "gpus": list(gpus),
    }
