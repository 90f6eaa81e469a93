"""Dominance is a statistical claim: shown gain, no shown loss, no loss that noise could hide."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest

from shardmark.analysis.compare.comparison import Comparison
from shardmark.analysis.compare.edges import Edge
from shardmark.analysis.compare.rows import Row
from shardmark.report.table.formats import records
from shardmark.report.table.table import Table
from shardmark.report.views.pareto import pareto_tables
from shardmark.results.schema import Failure, Outcome
from tests.golden.invented import invented_rank, invented_trial
from tests.unit.report_compare.runs import compared, row_with

SAME = (100.0, 101.0, 99.0)


def row(
    name: str,
    rates: Sequence[float] = SAME,
    peaks: Sequence[float] = SAME,
    accuracies: Sequence[float] = (0.9, 0.91, 0.89),
    **fields: object,
) -> Row:
    names = ("samples_per_second", "peak_memory_bytes", "accuracy_top1")
    values = dict(zip(names, (rates, peaks, accuracies), strict=True))
    return row_with(values, name, **fields)


def comparison(*rows: Row) -> Comparison:
    return replace(compared(), rows=rows)


def viewed(*rows: Row) -> Table:
    (table,) = pareto_tables(comparison(*rows))
    return table


def by_strategy(key: str, *rows: Row) -> dict[str, Any]:
    """Strategy -> value of the column, of those that have one."""
    return {line["strategy"]: line[key] for line in records(viewed(*rows)) if line[key]}


def notes(*rows: Row) -> str:
    return " ".join(viewed(*rows).notes)


FAST = (200.0, 202.0, 198.0)
HALF = (50.0, 50.5, 49.5)
EXACT = (64.0,) * 3
WORSE: dict[str, Any] = {"rates": FAST, "accuracies": (0.89,) * 3}
"""Faster, and of lower quality."""
GOOD: dict[str, Any] = {"accuracies": (0.9,) * 3}
PROVEN = {"equivalent": True}


@pytest.mark.parametrize(
    ("ddp", "fsdp", "beaten", "perhaps"),
    [
        pytest.param({"rates": FAST}, {}, {"fsdp"}, set(), id="better in one goal"),
        pytest.param({}, {"peaks": HALF}, {"ddp"}, set(), id="less memory is better"),
        pytest.param({"rates": FAST}, {"peaks": HALF}, set(), set(), id="a loss keeps both"),
        pytest.param(
            {"rates": (100.0, 140.0, 120.0)},
            *({"rates": (110.0, 95.0, 105.0)}, set(), set()),
            id="noise",
        ),
        pytest.param(
            {"rates": (200.0,), "peaks": (50.0,), "accuracies": (0.9,)},
            *({"rates": (100.0,), "peaks": (100.0,), "accuracies": (0.8,)}, set(), set()),
            id="one repeat shows nothing",
        ),
        pytest.param(
            {"rates": (100.0, 200.0, 50.0)},
            *({"rates": (100.0, 60.0, 160.0), "peaks": (95.0, 95.95, 94.05)}, set(), {"ddp"}),
            id="5 % less memory for sure, but the throughput may be half or double",
        ),
        pytest.param(
            {},
            *({"rates": (104.0, 97.0, 100.0), "peaks": HALF}, set(), {"ddp"}),
            id="a tenth may be lost",
        ),
        pytest.param(
            {},
            *({"rates": (101.0, 101.9, 100.2), "peaks": HALF}, {"ddp"}, set()),
            id="no loss that matters",
        ),
        pytest.param(
            {},
            *({"rates": (101.0, 101.0, 99.0), "peaks": (98.5, 99.9, 97.8)}, set(), None),
            id="one percent is saved, and two may be lost",
        ),
        pytest.param(*({"accuracies": (0.95,) * 3}, GOOD, set(), set()), id="one seed's quality"),
        pytest.param(
            *({"rates": FAST, "peaks": EXACT}, {"peaks": EXACT}, {"fsdp"}, set()), id="tie"
        ),
        pytest.param(*({"peaks": EXACT}, {"peaks": (60.0,) * 3}, {"ddp"}, set()), id="exact bytes"),
        pytest.param(*(WORSE | PROVEN, GOOD | PROVEN, {"fsdp"}, set()), id="proven to be the same"),
        pytest.param(*(WORSE, GOOD, set(), None), id="not verified: a worse quality counts"),
        pytest.param(
            WORSE | PROVEN | {"weak_scaling": True, "world_size": 4},
            *(GOOD | PROVEN | {"weak_scaling": True}, set(), None),
            id="weak scaling trains something else",
        ),
        pytest.param(
            {"rates": FAST, "accuracies": (0.5,) * 3, **PROVEN, "varied": {"recipe.lr": 0.1}},
            *(GOOD | PROVEN, set(), None),
            id="other conditions are another quality",
        ),
    ],
)
def test_dominance(
    ddp: dict[str, Any], fsdp: dict[str, Any], beaten: set[str], perhaps: set[str] | None
) -> None:
    rows = row("ddp", **ddp), row("fsdp", **fsdp)
    assert set(by_strategy("dominated_by", *rows)) == beaten
    assert perhaps is None or set(by_strategy("perhaps_dominated_by", *rows)) == perhaps


def test_a_row_says_who_beats_it_and_programs_get_the_gains() -> None:
    rows = (row("ddp"), row("fsdp", peaks=HALF))
    assert by_strategy("dominated_by", *rows) == {"ddp": ["fsdp on 2 ranks: peak memory -50 %"]}
    assert viewed(*rows).cells("standing") == ("front", "dominated by fsdp on 2 ranks")
    assert "Eligible though not proven to train the same thing: fsdp on 2 ranks" in notes(*rows)
    open_rows = (
        row("ddp", (100.0, 200.0, 50.0)),
        row("fsdp", (100.0, 60.0, 160.0), peaks=(95.0, 95.95, 94.05)),
    )
    assert by_strategy("standing", *open_rows)["ddp"] == "front, unless fsdp on 2 ranks"
    assert "more repeats decide" in notes(*open_rows)
    assert "One repeat: no difference can be shown" in notes(row("ddp", (200.0,), (50.0,), (0.9,)))


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
        ({"workload": "other"}, "invented, other"),
        ({"varied": {"workload.training_samples": 10}}, "workload.training_samples=10"),
    ],
)
def test_tasks_and_runs_have_fronts_of_their_own(other: dict[str, Any], named: str) -> None:
    tables = pareto_tables(comparison(row("ddp", FAST), row("fsdp", **other)))
    assert [table.cells("standing") for table in tables] == [("front",), ("front",)]
    assert tables[1].title.endswith(named)


def test_every_axis_is_a_column() -> None:
    batches = (row("ddp", varied={"recipe.global_batch": size}) for size in (64, 128))
    assert viewed(*batches).cells("recipe.global_batch") == ("64", "128")


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
    """Six rows of one law: in at most 5 % of the comparisons any of them is; 200 draws, 3 sigma."""
    rng = random.Random(0)
    template = row("ddp")

    def drawn(index: int) -> Row:
        values = {
            name: {repeat: level * rng.lognormvariate(0, 0.05) for repeat in range(4)}
            for name, level in (("samples_per_second", 100.0), ("peak_memory_bytes", 1e8))
        }
        return replace(template, strategy=f"s{index}", values=values)

    false = sum(bool(by_strategy("dominated_by", *map(drawn, range(6)))) for _ in range(200))
    assert false / 200 <= 0.05 + 3 * (0.05 * 0.95 / 200) ** 0.5


def test_real_differences_are_found() -> None:
    """A tenth of the noise's inverse: one row is twice as fast with as much memory."""
    rng = random.Random(1)
    right = 0
    for _ in range(50):
        rates = [[level * rng.lognormvariate(0, 0.01) for _ in range(4)] for level in (200, 100)]
        peaks = [[1e8 * rng.lognormvariate(0, 0.01) for _ in range(4)] for _ in range(2)]
        both = (row("ddp", rates[0], peaks[0]), row("fsdp", rates[1], peaks[1]))
        right += set(by_strategy("dominated_by", *both)) == {"fsdp"}
    assert right >= 45
