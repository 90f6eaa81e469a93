"""Dominance is a statistical claim: shown gain, no shown loss, no loss that noise could hide."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest

from shardmark.analysis.compare.edges import Edge
from shardmark.analysis.compare.rows import Row
from shardmark.report.table.formats import records
from shardmark.report.table.table import Table
from shardmark.report.views.pareto import pareto_tables
from shardmark.results.schema import Failure, Outcome
from tests.golden.invented import invented_rank, invented_trial
from tests.unit.report_compare.runs import compared, row_with

SAME = (100.0, 101.0, 99.0)
FAST = (200.0, 202.0, 198.0)
HALF = (50.0, 50.5, 49.5)
WORSE: dict[str, Any] = {"rates": FAST, "accuracies": (0.89,) * 3}
"""Faster, and of lower quality."""
GOOD: dict[str, Any] = {"accuracies": (0.9,) * 3}
PROVEN = {"equivalent": True}
NOISY: dict[str, Any] = {"rates": (100.0, 60.0, 160.0), "peaks": (95.0, 95.95, 94.05)}
"""5 % less memory for sure, but the throughput may be half or double."""


def row(
    name: str,
    rates: Sequence[float] = SAME,
    peaks: Sequence[float] = SAME,
    accuracies: Sequence[float] = (0.9, 0.91, 0.89),
    **fields: object,
) -> Row:
    names = ("samples_per_second", "peak_memory_bytes", "accuracy_top1")
    return row_with(dict(zip(names, (rates, peaks, accuracies), strict=True)), name, **fields)


def viewed(*rows: Row) -> Table:
    (table,) = pareto_tables(replace(compared(), rows=rows))
    return table


def by_strategy(key: str, *rows: Row) -> dict[str, Any]:
    """Strategy -> value of the column, of those that have one."""
    return {line["strategy"]: line[key] for line in records(viewed(*rows)) if line[key]}


CASES: dict[str, tuple[dict[str, Any], dict[str, Any], set[str]]] = {
    "better in one goal": ({"rates": FAST}, {}, {"fsdp"}),
    "less memory is better": ({}, {"peaks": HALF}, {"ddp"}),
    "a loss keeps both": ({"rates": FAST}, {"peaks": HALF}, set()),
    "noise": ({"rates": (100.0, 200.0, 50.0)}, NOISY, set()),
    "one repeat shows nothing": (
        {"rates": (200.0,), "peaks": (50.0,), "accuracies": (0.9,)},
        {"rates": (100.0,), "peaks": (100.0,), "accuracies": (0.8,)},
        set(),
    ),
    "a tenth may be lost": ({}, {"rates": (104.0, 97.0, 100.0), "peaks": HALF}, set()),
    "no loss that matters": ({}, {"rates": (101.0, 101.9, 100.2), "peaks": HALF}, {"ddp"}),
    "one percent is saved, and two may be lost": (
        {},
        {"rates": (101.0, 101.0, 99.0), "peaks": (98.5, 99.9, 97.8)},
        set(),
    ),
    "one seed's quality": ({"accuracies": (0.95,) * 3}, GOOD, set()),
    "exact bytes": ({"peaks": (64.0,) * 3}, {"peaks": (60.0,) * 3}, {"ddp"}),
    "proven to be the same": (WORSE | PROVEN, GOOD | PROVEN, {"fsdp"}),
    "not verified: a worse quality counts": (WORSE, GOOD, set()),
    "weak scaling trains something else": (
        WORSE | PROVEN | {"weak_scaling": True, "world_size": 4},
        GOOD | PROVEN | {"weak_scaling": True},
        set(),
    ),
    "other conditions are another quality": (
        {"rates": FAST, "accuracies": (0.5,) * 3, **PROVEN, "varied": {"recipe.lr": 0.1}},
        GOOD | PROVEN,
        set(),
    ),
}


@pytest.mark.parametrize(("ddp", "fsdp", "beaten"), CASES.values(), ids=CASES)
def test_dominance(ddp: dict[str, Any], fsdp: dict[str, Any], beaten: set[str]) -> None:
    rows = row("ddp", **ddp), row("fsdp", **fsdp)
    assert set(by_strategy("dominated_by", *rows)) == beaten


def test_a_row_says_who_beats_it_and_programs_get_the_gains() -> None:
    rows = (row("ddp"), row("fsdp", peaks=HALF))
    assert by_strategy("dominated_by", *rows) == {"ddp": ["fsdp on 2 ranks: peak memory -50 %"]}
    assert viewed(*rows).cells("standing") == ("front", "dominated by fsdp on 2 ranks")
    assert any("not proven" in note and "fsdp on 2 ranks" in note for note in viewed(*rows).notes)
    once = viewed(row("ddp", (200.0,), (50.0,), (0.9,)))
    assert any(note.startswith("One repeat") for note in once.notes)


def test_what_trains_something_else_or_lacks_a_goal_is_left_out() -> None:
    wrong = row("zero-3", (900.0, 901.0, 899.0), (1.0, 1.1, 1.2), equivalent=False)
    lacking = row("dp", peaks=(), missing={"peak_memory_bytes": "the device cannot tell"})
    rows = (row("ddp", equivalent=True), wrong, lacking)
    assert by_strategy("standing", *rows) == {
        "ddp": "front",
        "zero-3": "not eligible: trains something else",
        "dp": "not eligible: it has no peak_memory_bytes: the device cannot tell",
    }
    assert by_strategy("dominated_by", *rows) == {}


def test_goals_are_what_the_rows_have() -> None:
    for only, goals in (
        (row("ddp"), "samples/s (higher), peak memory (lower), accuracy_top1 (higher)"),
        (row("ddp", peaks=()), "samples/s (higher), accuracy_top1 (higher)"),
        (row("ddp", synthetic=True), "samples/s (higher), peak memory (lower)"),
    ):
        assert viewed(only).title == f"Pareto front of {goals}"
    of_tokens = {"tokens_per_second": SAME, "samples_per_second": SAME, "rmse": SAME}
    rank = invented_rank(0).model_copy(update={"better": {"rmse": "lower"}})
    told = row_with(of_tokens, trials=(invented_trial(ranks=(rank,)),))
    assert viewed(told).title == "Pareto front of tokens/s (higher), rmse (lower)"
    failed = invented_trial(outcome=Outcome.FAILED, failure=Failure(reason="x"))
    (empty,) = pareto_tables(compared(failed))
    assert (empty.rows, empty.notes[0]) == ((), "No trial ended ok.")


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"experiment": "second"}, "second, classification resnet18 digits"),
        ({"varied": {"workload.training_samples": 10}}, "workload.training_samples=10"),
    ],
)
def test_tasks_and_runs_have_fronts_of_their_own(other: dict[str, Any], named: str) -> None:
    tables = pareto_tables(replace(compared(), rows=(row("ddp", FAST), row("fsdp", **other))))
    assert [table.cells("standing") for table in tables] == [("front",), ("front",)]
    assert tables[1].title.endswith(named)


def test_rows_that_beat_one_another_in_a_ring_all_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pairs are not compared over the same repeats where some failed, so that a ring can be."""
    name: dict[str, Any] = {"metric": "samples_per_second", "higher": True}
    gain = Edge(**name, factor=2.0, low=1.5, high=3.0, shown=True)
    loss = Edge(**name, factor=0.5, low=0.3, high=0.7, shown=False)
    beats = {(0, 1), (1, 2), (2, 0), (0, 3)}

    def ring(rows: Sequence[Row], _: Sequence[str]) -> dict[tuple[int, int], list[Edge]]:
        pairs = permutations(range(len(rows)), 2)
        return {pair: [gain if pair in beats else loss] for pair in pairs}

    monkeypatch.setattr("shardmark.report.views.pareto.edges_of", ring)
    assert set(by_strategy("dominated_by", *map(row, "abcd"))) == {"d"}


def test_equal_rows_are_seldom_called_dominated() -> None:
    """Six rows of one law: in at most 5 % of the comparisons any of them is; 60 draws, 3 sigma."""
    rng, draws = random.Random(0), 60
    template = row("ddp")

    def drawn(index: int) -> Row:
        values = {
            name: {repeat: level * rng.lognormvariate(0, 0.05) for repeat in range(4)}
            for name, level in (("samples_per_second", 100.0), ("peak_memory_bytes", 1e8))
        }
        return replace(template, strategy=f"s{index}", values=values)

    false = sum(bool(by_strategy("dominated_by", *map(drawn, range(6)))) for _ in range(draws))
    assert false / draws <= 0.05 + 3 * (0.05 * 0.95 / draws) ** 0.5
