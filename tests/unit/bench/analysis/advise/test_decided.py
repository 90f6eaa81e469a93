"""Repeats end where a cell is decided, and verdicts keep their promise all the same."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from shardmark.base.cells import cell_id
from shardmark.base.results.schema import Outcome
from shardmark.bench.analysis.advise.decided import decided_cells, undecided_rows
from shardmark.bench.analysis.compare.verdicts import FASTER, SLOWER, with_verdicts
from tests.unit.bench.analysis.advise.test_selection import rows_with
from tests.unit.bench.report.answers.invented_rows import Cell, compared

CALM = (100.0, 100.1, 99.9)
NOISY = (80.0, 100.0, 125.0)


def cell(strategy: str, rates: Sequence[float], factor: float = 1.0, **changes: object) -> Cell:
    made = Cell(strategy=strategy, world_size=2, rates=[factor * rate for rate in rates])
    return replace(made, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("cells", "decided"),
    [
        ([cell("ddp", CALM), cell("fsdp", CALM, 0.5)], {"ddp", "fsdp"}),
        ([cell("ddp", NOISY)], set()),
        # The noisy one is held against the fastest, which goes on with it.
        ([cell("ddp", CALM, 2.0), cell("fsdp", NOISY), cell("zero-1", CALM)], {"zero-1"}),
        # The precise one is held against the noisy one by its repeats.
        ([cell("ddp", NOISY, 2.0), cell("fsdp", CALM)], set()),
        # All noise is shared: the difference is known, though no value is.
        ([cell("ddp", NOISY), cell("fsdp", (40.0, 50.01, 62.48))], {"ddp", "fsdp"}),
        ([cell("ddp", CALM), cell("fsdp", CALM, disturbed=(0, 1, 2))], set()),
        ([cell("ddp", CALM), cell("fsdp", CALM, outcome=Outcome.OUT_OF_MEMORY)], {"ddp", "fsdp"}),
    ],
    ids=["narrow", "noisy", "pairs stay together", "beside noise", "shown", "disturbed", "failed"],
)
def test_precise_or_inferior_cells_are_decided(
    tmp_path: Path, cells: list[Cell], decided: set[str]
) -> None:
    rows = compared(tmp_path, cells).rows
    names = {cell_id(row.trials[0].trial): row.strategy for row in rows}
    given = decided_cells([trial for row in rows for trial in row.trials], until=0.05)
    assert {names[each] for each in given} == decided


def test_one_repeat_decides_nothing(tmp_path: Path) -> None:
    rows = compared(tmp_path, [cell("ddp", CALM), cell("fsdp", CALM, 0.5)], repeats=1).rows
    assert decided_cells([trial for row in rows for trial in row.trials], until=0.5) == frozenset()


def test_early_stopping_keeps_the_error_rate_of_verdicts() -> None:
    """Verdicts on equal rows stand in at most 5 % of the tables, and two standard errors."""
    draw = random.Random(0)
    tables, wrong = 100, 0
    for _ in range(tables):
        values: list[list[float]] = [[], [], []]
        for repeat in range(10):
            for own in values:
                own.append(draw.lognormvariate(0, 0.03))
            rows = [replace(row, baseline="s0 on 1 rank") for row in rows_with(values)]
            rows = list(with_verdicts(rows, [rows[0]] * len(rows)))
            if repeat >= 2 and not undecided_rows(rows, until=0.0):
                break
        wrong += any(row.verdict in (FASTER, SLOWER) for row in rows)
    assert wrong / tables <= 0.05 + 2 * 0.0218
