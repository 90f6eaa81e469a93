"""Dominance is a statistical claim: shown gain, no shown loss, no loss that noise could hide."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations

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


def test_better_in_one_goal_and_no_worse_in_the_others_dominates() -> None:
    found = front(row("ddp", (200.0, 202.0, 198.0)), row("fsdp"))
    assert dominated(found) == {"fsdp": ["ddp"]}
    (dominance,) = found.standings[1].dominated_by
    assert [gain.metric for gain in dominance.gains] == ["samples_per_second"]
    assert dominance.largest.factor == pytest.approx(2.0)
    assert [one.row.strategy for one in found.standings] == ["ddp", "fsdp"]


def test_less_memory_is_better() -> None:
    found = front(row("ddp"), row("fsdp", peaks=(50.0, 50.5, 49.5)))
    assert dominated(found) == {"ddp": ["fsdp"]}
    gain = found.standings[1].dominated_by[0].largest
    assert gain.factor == pytest.approx(2.0)
    assert gain.ratios[0] == pytest.approx(0.5)
    assert gain.ratios[1] is not None
    assert gain.ratios[2] is not None
    assert gain.ratios[1] <= gain.ratios[0] <= gain.ratios[2]


def test_a_shown_loss_keeps_both_on_the_front() -> None:
    found = front(row("ddp", (200.0, 202.0, 198.0)), row("fsdp", peaks=(50.0, 50.5, 49.5)))
    assert dominated(found) == {}
    assert unsure(found) == []


def test_a_difference_inside_the_noise_does_not_dominate() -> None:
    noisy = front(row("ddp", (100.0, 140.0, 120.0)), row("fsdp", (110.0, 95.0, 105.0)))
    assert dominated(noisy) == {}
    assert unsure(noisy) == []


def test_one_repeat_shows_nothing() -> None:
    found = front(row("ddp", (200.0,), (50.0,), (0.9,)), row("fsdp", (100.0,), (100.0,), (0.8,)))
    assert dominated(found) == {}
    said = notes(row("ddp", (200.0,), (50.0,), (0.9,)), row("fsdp", (1.0,), (9.0,), (0.8,)))
    assert "One repeat: no difference can be shown" in said


def test_noise_that_could_hide_a_larger_loss_leaves_it_open() -> None:
    """5 % less memory for sure, but the throughput may be half or double."""
    rows = (
        row("ddp", (100.0, 200.0, 50.0)),
        row("fsdp", (100.0, 60.0, 160.0), peaks=(95.0, 95.95, 94.05)),
    )
    assert dominated(front(*rows)) == {}
    assert unsure(front(*rows)) == ["ddp"]
    assert "ddp on 2 ranks (by fsdp on 2 ranks: peak memory -5.0 %)" in notes(*rows)


def test_a_possible_loss_is_held_against_what_is_sure_of_the_gain() -> None:
    """Half the memory for sure; that the throughput may fall by a tenth is too much anyhow."""
    rates = (100.0, 101.0, 99.0)
    loose = front(row("ddp", rates), row("fsdp", (104.0, 97.0, 100.0), peaks=(50.0, 50.5, 49.5)))
    assert dominated(loose) == {}
    assert unsure(loose) == ["ddp"]
    close = front(row("ddp", rates), row("fsdp", (101.0, 101.9, 100.2), peaks=(50.0, 50.5, 49.5)))
    assert dominated(close) == {"ddp": ["fsdp"]}
    little = front(row("ddp", rates), row("fsdp", (101.0, 101.0, 99.0), peaks=(98.5, 99.9, 97.8)))
    assert dominated(little) == {}, "one percent is saved, and two may be lost"


def test_a_quality_of_one_seed_is_never_a_gain() -> None:
    """Nor is it where the repeats agree to the last digit."""
    for better in ((0.95, 0.951, 0.949), (0.95,) * 3):
        found = front(row("ddp", accuracies=better), row("fsdp", accuracies=(0.9,) * 3))
        assert dominated(found) == {}
        assert unsure(found) == []


def test_memory_that_is_the_same_to_the_byte_is_a_tie() -> None:
    found = front(row("ddp", (200.0, 202.0, 198.0), (64.0,) * 3), row("fsdp", SAME, (64.0,) * 3))
    assert dominated(found) == {"fsdp": ["ddp"]}
    exact = front(row("ddp", peaks=(64.0,) * 3), row("fsdp", peaks=(60.0,) * 3))
    assert dominated(exact) == {"ddp": ["fsdp"]}


def test_rows_that_are_proven_to_be_the_same_have_one_quality() -> None:
    """Repeats share a seed, so that rounding looks like a difference that is sure."""
    worse = (0.89,) * 3
    better = (0.9,) * 3
    fast = (200.0, 202.0, 198.0)
    proven = front(
        row("ddp", fast, accuracies=worse, equivalent=True),
        row("fsdp", accuracies=better, equivalent=True),
    )
    assert dominated(proven) == {"fsdp": ["ddp"]}
    unverified = front(row("ddp", fast, accuracies=worse), row("fsdp", accuracies=better))
    assert dominated(unverified) == {}
    weak = front(
        row("ddp", fast, accuracies=worse, equivalent=True, weak_scaling=True, world_size=4),
        row("fsdp", accuracies=better, equivalent=True, weak_scaling=True),
    )
    assert dominated(weak) == {}


def test_other_conditions_are_another_quality() -> None:
    """Another learning rate trains something else, however well each is verified."""
    changed = {"recipe.optimizer.lr": 0.1}
    found = front(
        row("ddp", (200.0, 202.0, 198.0), accuracies=(0.5,) * 3, equivalent=True, varied=changed),
        row("fsdp", accuracies=(0.9,) * 3, equivalent=True),
    )
    assert dominated(found) == {}


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
