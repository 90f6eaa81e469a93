"""Dominance is a statistical claim: shown gain, no shown loss, no loss that noise could hide."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest

from shardmark.analysis.compare.comparison import Comparison
from shardmark.analysis.compare.rows import Row
from shardmark.analysis.statistics.edges import Edge
from shardmark.report.table.formats import records
from shardmark.report.table.table import Table
from shardmark.report.views.pareto import NOT_EQUIVALENT, pareto_tables
from shardmark.results.schema import Failure, Outcome
from tests.golden.invented import invented_trial
from tests.unit.report_compare.runs import compared, row_with

SAME = (100.0, 101.0, 99.0)


def row(
    name: str,
    rates: Sequence[float] = SAME,
    peaks: Sequence[float] = SAME,
    accuracies: Sequence[float] = (0.9, 0.91, 0.89),
    **fields: object,
) -> Row:
    values = {
        "samples_per_second": rates,
        "peak_memory_bytes": peaks,
        "accuracy_top1": accuracies,
    }
    return row_with(values, name, **fields)


def comparison(*rows: Row) -> Comparison:
    return replace(compared(), rows=rows)


def viewed(*rows: Row) -> Table:
    (table,) = pareto_tables(comparison(*rows))
    return table


def standings(*rows: Row) -> dict[str, str]:
    """Strategy -> standing."""
    return {line["strategy"]: line["standing"] for line in records(viewed(*rows))}


def dominated(*rows: Row) -> dict[str, str]:
    """Strategy -> what dominates it, with the gains."""
    return {
        line["strategy"]: line["dominated_by"]
        for line in records(viewed(*rows))
        if line["dominated_by"]
    }


def notes(*rows: Row) -> str:
    return " ".join(viewed(*rows).notes)


FAST = (200.0, 202.0, 198.0)
HALF = (50.0, 50.5, 49.5)
EXACT = (64.0,) * 3
PROVEN = {"equivalent": True}


@pytest.mark.parametrize(
    ("ddp", "fsdp", "beaten", "open_"),
    [
        pytest.param({"rates": FAST}, {}, {"fsdp": ["ddp"]}, [], id="better in one goal"),
        pytest.param({}, {"peaks": HALF}, {"ddp": ["fsdp"]}, [], id="less memory is better"),
        pytest.param({"rates": FAST}, {"peaks": HALF}, {}, [], id="a loss keeps both"),
        pytest.param(
            {"rates": (100.0, 140.0, 120.0)}, {"rates": (110.0, 95.0, 105.0)}, {}, [], id="noise"
        ),
        pytest.param(
            {"rates": (200.0,), "peaks": (50.0,), "accuracies": (0.9,)},
            {"rates": (100.0,), "peaks": (100.0,), "accuracies": (0.8,)},
            {},
            [],
            id="one repeat shows nothing",
        ),
        pytest.param(
            {"rates": (100.0, 200.0, 50.0)},
            {"rates": (100.0, 60.0, 160.0), "peaks": (95.0, 95.95, 94.05)},
            {},
            ["ddp"],
            id="5 % less memory for sure, but the throughput may be half or double",
        ),
        pytest.param(
            {},
            {"rates": (104.0, 97.0, 100.0), "peaks": HALF},
            {},
            ["ddp"],
            id="a tenth may be lost",
        ),
        pytest.param(
            {},
            {"rates": (101.0, 101.9, 100.2), "peaks": HALF},
            {"ddp": ["fsdp"]},
            [],
            id="no loss that matters",
        ),
        pytest.param(
            {},
            {"rates": (101.0, 101.0, 99.0), "peaks": (98.5, 99.9, 97.8)},
            {},
            None,
            id="one percent is saved, and two may be lost",
        ),
        pytest.param(
            {"accuracies": (0.95,) * 3}, {"accuracies": (0.9,) * 3}, {}, [], id="one seed's quality"
        ),
        pytest.param(
            {"rates": FAST, "peaks": EXACT}, {"peaks": EXACT}, {"fsdp": ["ddp"]}, [], id="tie"
        ),
        pytest.param(
            {"peaks": EXACT}, {"peaks": (60.0,) * 3}, {"ddp": ["fsdp"]}, [], id="exact bytes"
        ),
        pytest.param(
            {"rates": FAST, "accuracies": (0.89,) * 3, **PROVEN},
            {"accuracies": (0.9,) * 3, **PROVEN},
            {"fsdp": ["ddp"]},
            [],
            id="proven to be the same: one quality",
        ),
        pytest.param(
            {"rates": FAST, "accuracies": (0.89,) * 3},
            {"accuracies": (0.9,) * 3},
            {},
            None,
            id="not verified: a worse quality counts",
        ),
        pytest.param(
            {
                "rates": FAST,
                "accuracies": (0.89,) * 3,
                **PROVEN,
                "weak_scaling": True,
                "world_size": 4,
            },
            {"accuracies": (0.9,) * 3, **PROVEN, "weak_scaling": True},
            {},
            None,
            id="weak scaling trains something else",
        ),
        pytest.param(
            {"rates": FAST, "accuracies": (0.5,) * 3, **PROVEN, "varied": {"recipe.lr": 0.1}},
            {"accuracies": (0.9,) * 3, **PROVEN},
            {},
            None,
            id="other conditions are another quality",
        ),
    ],
)
def test_dominance(
    ddp: dict[str, Any],
    fsdp: dict[str, Any],
    beaten: dict[str, list[str]],
    open_: list[str] | None,
) -> None:
    rows = row("ddp", **ddp), row("fsdp", **fsdp)
    found = dominated(*rows)
    assert {name: [by.split(" on ")[0]] for name, by in found.items()} == beaten
    unsure = [name for name, standing in standings(*rows).items() if standing == "front, not sure"]
    assert open_ is None or unsure == open_


def test_gains_are_named_in_the_metric_s_own_direction() -> None:
    assert dominated(row("ddp"), row("fsdp", peaks=HALF)) == {
        "ddp": "fsdp on 2 ranks: peak memory -50 %"
    }
    rows = [row(f"s{i}", (200.0 + i, 202.0 + i, 198.0 + i)) for i in range(4)]
    assert "s2 on 2 ranks: samples/s +102 % and 2 more." in notes(*rows, row("fsdp"))


def test_what_is_open_is_named() -> None:
    rows = (
        row("ddp", (100.0, 200.0, 50.0)),
        row("fsdp", (100.0, 60.0, 160.0), peaks=(95.0, 95.95, 94.05)),
    )
    assert "ddp on 2 ranks (by fsdp on 2 ranks: peak memory -5.0 %)" in notes(*rows)
    assert "One repeat: no difference can be shown" in notes(row("ddp", (200.0,), (50.0,), (0.9,)))


def test_what_trains_something_else_or_lacks_a_goal_is_left_out() -> None:
    wrong = row("zero-3", (900.0, 901.0, 899.0), (1.0, 1.1, 1.2), equivalent=False)
    lacking = row("dp", peaks=(), missing={"peak_memory_bytes": "the device cannot tell"})
    rows = (row("ddp", equivalent=True), wrong, lacking)
    assert standings(*rows) == {
        "ddp": "front",
        "zero-3": f"not eligible: {NOT_EQUIVALENT}",
        "dp": "not eligible: it has no peak_memory_bytes: the device cannot tell",
    }
    assert dominated(*rows) == {}


def test_goals_are_what_the_rows_have() -> None:
    for rows, goals in (
        ([row("ddp")], "samples/s (higher), peak memory (lower), accuracy_top1 (higher)"),
        ([row("ddp", peaks=())], "samples/s (higher), accuracy_top1 (higher)"),
        ([row("ddp", synthetic=True)], "samples/s (higher), peak memory (lower)"),
    ):
        assert viewed(*rows).title == f"Pareto front of {goals}"


def test_tasks_and_runs_have_fronts_of_their_own() -> None:
    for other in (
        row("fsdp", experiment="other"),
        row("fsdp", workload="other"),
        row("fsdp", varied={"workload.training_samples": 10}),
    ):
        tables = pareto_tables(comparison(row("ddp", FAST), other))
        assert [table.cells("standing") for table in tables] == [("front",), ("front",)]
    _, second = pareto_tables(comparison(row("ddp"), row("fsdp", experiment="b")))
    assert second.title.endswith(": b, classification resnet18 digits")


def test_rows_that_beat_one_another_in_a_ring_all_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pairs are not compared over the same repeats where some failed, so that a ring can be."""
    gain = Edge(metric="samples_per_second", factor=2.0, low=1.5, high=3.0, shown=True)
    loss = Edge(metric="samples_per_second", factor=0.5, low=0.3, high=0.7, shown=False)
    beats = {(0, 1), (1, 2), (2, 0), (0, 3)}

    def ring(rows: Sequence[Row], _: Sequence[str]) -> dict[tuple[int, int], list[Edge]]:
        pairs = permutations(range(len(rows)), 2)
        return {pair: [gain if pair in beats else loss] for pair in pairs}

    monkeypatch.setattr("shardmark.report.views.pareto.edges_of", ring)
    assert set(dominated(row("a"), row("b"), row("c"), row("d"))) == {"d"}


def test_equal_rows_are_seldom_called_dominated() -> None:
    """Six rows of one law: in at most 5 % of the comparisons any of them is; 400 draws, 3 sigma."""
    rng = random.Random(0)
    template = row("ddp")

    def drawn(index: int) -> Row:
        values = {
            name: {repeat: level * rng.lognormvariate(0, 0.05) for repeat in range(4)}
            for name, level in (("samples_per_second", 100.0), ("peak_memory_bytes", 1e8))
        }
        return replace(template, strategy=f"s{index}", values=values)

    false = sum(bool(dominated(*map(drawn, range(6)))) for _ in range(400))
    assert false / 400 <= 0.05 + 3 * (0.05 * 0.95 / 400) ** 0.5


def test_real_differences_are_found() -> None:
    """A tenth of the noise's inverse: one row is twice as fast with as much memory."""
    rng = random.Random(1)
    found = 0
    for _ in range(100):
        rates = [[level * rng.lognormvariate(0, 0.01) for _ in range(4)] for level in (200, 100)]
        peaks = [[1e8 * rng.lognormvariate(0, 0.01) for _ in range(4)] for _ in range(2)]
        both = (row("ddp", rates[0], peaks[0]), row("fsdp", rates[1], peaks[1]))
        found += set(dominated(*both)) == {"fsdp"}
    assert found >= 90


def test_the_table() -> None:
    rows = [row("ddp", FAST), row("fsdp"), row("zero-3", equivalent=False)]
    table = viewed(*rows)
    assert table.cells("label") == ("ddp", "fsdp", "zero-3")
    said = notes(*rows)
    assert "Dominated: fsdp on 2 ranks, by ddp on 2 ranks: samples/s +100 %." in said
    assert "Eligible though not verified: ddp on 2 ranks; fsdp on 2 ranks." in said
    failed = invented_trial(outcome=Outcome.FAILED, failure=Failure(reason="x"))
    (empty,) = pareto_tables(compared(failed))
    assert (empty.rows, empty.notes[0]) == ((), "No trial ended ok.")
