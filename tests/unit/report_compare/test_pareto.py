"""Dominance is a statistical claim: shown gain, no shown loss, no loss that noise could hide."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest

from shardmark.analysis.compare.comparison import Comparison
from shardmark.analysis.compare.pareto import NOT_EQUIVALENT, Front, fronts_of
from shardmark.analysis.compare.rows import Row
from shardmark.analysis.statistics.edges import Edge
from shardmark.report.table.formats import records
from shardmark.report.views.pareto import pareto_tables
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


def front(*rows: Row) -> Front:
    (found,) = fronts_of(rows)
    return found


def dominated(found: Front) -> dict[str, list[str]]:
    return {
        one.row.strategy: [by.by.strategy for by in one.dominated_by]
        for one in found.standings
        if one.dominated_by
    }


def unsure(found: Front) -> list[str]:
    return [one.row.strategy for one in found.standings if one.perhaps_by and one.on_front]


def left_out(found: Front) -> dict[str, str]:
    return {one.row.strategy: one.reason for one in found.standings if one.reason is not None}


def notes(*rows: Row) -> str:
    return " ".join(note for table in pareto_tables(comparison(*rows)) for note in table.notes)


def comparison(*rows: Row) -> Comparison:
    return replace(compared(), rows=rows)


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
    found = front(row("ddp", **ddp), row("fsdp", **fsdp))
    assert dominated(found) == beaten
    assert open_ is None or unsure(found) == open_


def test_gains_are_ratios_in_the_metric_s_own_direction() -> None:
    found = front(row("ddp"), row("fsdp", peaks=HALF))
    gain = found.standings[1].dominated_by[0].largest
    assert gain.metric == "peak_memory_bytes"
    assert gain.factor == pytest.approx(2.0)
    value, low, high = gain.ratios
    assert low is not None
    assert high is not None
    assert value == pytest.approx(0.5)
    assert low <= value <= high


def test_what_is_open_is_named() -> None:
    rows = (
        row("ddp", (100.0, 200.0, 50.0)),
        row("fsdp", (100.0, 60.0, 160.0), peaks=(95.0, 95.95, 94.05)),
    )
    assert "ddp on 2 ranks (by fsdp on 2 ranks: peak memory -5.0 %)" in notes(*rows)
    assert "One repeat: no difference can be shown" in notes(row("ddp", (200.0,), (50.0,), (0.9,)))


def test_who_trains_something_else_is_named_and_left_out() -> None:
    wrong = row("zero-3", (900.0, 901.0, 899.0), (1.0, 1.1, 1.2), equivalent=False)
    found = front(row("ddp", equivalent=True), wrong)
    assert left_out(found) == {"zero-3": NOT_EQUIVALENT}
    assert dominated(found) == {}
    (table,) = pareto_tables(comparison(row("ddp", equivalent=True), wrong))
    assert table.cells("standing") == ("front", f"not eligible: {NOT_EQUIVALENT}")


def test_what_lacks_a_goal_is_left_out() -> None:
    lacking = row("dp", peaks=(), missing={"peak_memory_bytes": "the device cannot tell"})
    found = front(row("ddp"), lacking)
    assert left_out(found) == {"dp": "it has no peak_memory_bytes: the device cannot tell"}
    blind = front(row("ddp", peaks=()), row("fsdp", peaks=()))
    assert blind.goals == ("samples_per_second", "accuracy_top1")


def test_made_up_data_have_no_quality() -> None:
    assert front(row("ddp", synthetic=True)).goals == ("samples_per_second", "peak_memory_bytes")


def test_tasks_and_runs_have_fronts_of_their_own() -> None:
    fast = (200.0, 202.0, 198.0)
    for other in (
        row("fsdp", experiment="other"),
        row("fsdp", workload="other"),
        row("fsdp", varied={"workload.training_samples": 10}),
    ):
        fronts = fronts_of([row("ddp", fast), other])
        assert len(fronts) == 2
        assert all(not dominated(one) for one in fronts)
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

    monkeypatch.setattr("shardmark.analysis.compare.pareto.edges_of", ring)
    found = front(row("a"), row("b"), row("c"), row("d"))
    assert dominated(found) == {"d": ["a"]}


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

    false = sum(bool(dominated(front(*map(drawn, range(6))))) for _ in range(400))
    assert false / 400 <= 0.05 + 3 * (0.05 * 0.95 / 400) ** 0.5


def test_real_differences_are_found() -> None:
    """A tenth of the noise's inverse: one row is twice as fast with as much memory."""
    rng = random.Random(1)
    found = 0
    for _ in range(100):
        rates = [[level * rng.lognormvariate(0, 0.01) for _ in range(4)] for level in (200, 100)]
        peaks = [[1e8 * rng.lognormvariate(0, 0.01) for _ in range(4)] for _ in range(2)]
        both = front(row("ddp", rates[0], peaks[0]), row("fsdp", rates[1], peaks[1]))
        found += dominated(both) == {"fsdp": ["ddp"]}
    assert found >= 90


def test_table_and_programs() -> None:
    rows = [row("ddp", (200.0, 202.0, 198.0)), row("fsdp"), row("zero-3", equivalent=False)]
    (table,) = pareto_tables(comparison(*rows))
    for goal in ("samples/s (higher)", "peak memory (lower)", "accuracy_top1 (higher)"):
        assert goal in table.title
    assert table.cells("label") == ("ddp", "fsdp", "zero-3")
    assert table.cells("standing")[:2] == ("front", "dominated")
    said = notes(*rows)
    assert "Dominated: fsdp on 2 ranks, by ddp on 2 ranks: samples/s +100 %." in said
    assert "Eligible though not verified: ddp on 2 ranks; fsdp on 2 ranks." in said
    first, second, third = records(table)
    assert [line["standing"] for line in (first, second)] == ["front", "dominated"]
    assert second["dominated_by"] == "ddp on 2 ranks: samples/s +100 %"
    assert third["standing"].endswith(NOT_EQUIVALENT)


def test_many_that_dominate_are_counted() -> None:
    rows = [row(f"s{i}", (200.0 + i, 202.0 + i, 198.0 + i)) for i in range(4)]
    said = notes(*rows, row("fsdp"))
    assert "s2 on 2 ranks: samples/s +102 % and 2 more." in said


def test_without_success_the_table_says_so() -> None:
    failed = invented_trial(outcome=Outcome.FAILED, failure=Failure(reason="x"))
    (table,) = pareto_tables(compared(failed))
    assert table.notes[0] == "No trial ended ok."
    assert table.rows == ()
