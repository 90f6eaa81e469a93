"""Speed-up over the fewest ranks, repeat by repeat; conditions are never mixed."""

from __future__ import annotations

import pytest

from shardmark.analysis.compare.comparison import Comparison
from shardmark.analysis.compare.scaling import scalings_of
from shardmark.report.table.formats import records
from shardmark.report.views.scaling import scaling_tables
from shardmark.results.schema import Failure, Outcome, TrialResult
from tests.golden.invented import invented_trial
from tests.unit.report_compare.runs import compared

RATES = {("single", 1): 100.0, ("ddp", 2): 150.0, ("ddp", 4): 240.0}


def trials(noise: float = 0.0, repeats: int = 2) -> list[TrialResult]:
    """A repeat is faster than the one before by the noise, on any number of ranks."""
    return [
        invented_trial(
            name, size, repeat, metrics={"samples_per_second": rate * (1 + noise * repeat)}
        )
        for (name, size), rate in RATES.items()
        for repeat in range(repeats)
    ]


def notes(comparison: Comparison) -> str:
    return " ".join(note for table in scaling_tables(comparison) for note in table.notes)


def test_speed_up_counts_from_the_fewest_ranks_that_exist() -> None:
    """`ddp` needs two ranks; `single` shows what one does."""
    single, ddp = scalings_of(compared(*trials()).rows)
    assert single.reference is ddp.reference
    assert (single.later, ddp.weak) == ((), False)
    gains = [
        (p.speedup.value, p.efficiency.value) for p in ddp.points if p.speedup and p.efficiency
    ]
    assert gains == [pytest.approx((1.5, 0.75)), pytest.approx((2.4, 0.6))]
    (alone,) = scalings_of(compared(*trials()[2:]).rows)
    assert alone.reference.world_size == 2
    first, second = alone.points
    assert first.speedup is not None
    assert (first.speedup.value, first.speedup.low) == (1.0, None)
    assert second.speedup is not None
    assert second.speedup.value == pytest.approx(1.6)


def test_what_disturbs_a_whole_repeat_cancels() -> None:
    ddp = scalings_of(compared(*trials(noise=0.5, repeats=3)).rows)[1]
    speedup, efficiency = ddp.points[1].speedup, ddp.points[1].efficiency
    assert speedup is not None
    assert efficiency is not None
    assert [speedup.low, speedup.high] == pytest.approx([2.4, 2.4])
    assert [efficiency.low, efficiency.high] == pytest.approx([0.6, 0.6])
    assert ddp.reference.metrics["samples_per_second"] is not None


def test_a_failure_on_the_fewest_ranks_is_no_reference() -> None:
    failed = invented_trial(
        "ddp", 1, outcome=Outcome.OUT_OF_MEMORY, failure=Failure(reason="no memory")
    )
    comparison = compared(failed, *trials()[2:])
    (ddp,) = scalings_of(comparison.rows)
    assert ddp.reference.world_size == 2
    assert "Left out, not ok: ddp on 1 rank (1 x out_of_memory)." in notes(comparison)


def test_conditions_and_options_are_kept_apart() -> None:
    rows = compared(
        invented_trial("ddp", 2, varied={"recipe.global_batch": 64}),
        invented_trial("ddp", 4, varied={"recipe.global_batch": 128}),
        invented_trial("fsdp", 2, precision="bf16"),
        invented_trial("fsdp", 4, precision="fp32"),
        invented_trial("zero-2", 2, strategy_options={"bucket_mb": 1}),
        invented_trial("zero-2", 4),
    ).rows
    assert not any(scaling.later for scaling in scalings_of(rows))


def test_weak_scaling_has_a_table_of_its_own() -> None:
    recipe = {"global_batch": None, "per_rank_batch": 8, "epochs": 2, "steps": None}
    base = invented_trial("ddp", 2).trial
    weak = [
        invented_trial(
            "ddp", size, trial={**base, "recipe": recipe}, varied={"recipe.per_rank_batch": 8}
        )
        for size in (2, 4)
    ]
    titles = [table.title for table in scaling_tables(compared(*weak, *trials()))]
    assert [title.partition(":")[0] for title in titles] == ["Strong scaling", "Weak scaling"]
    assert [table.title.partition(":")[0] for table in scaling_tables(compared(*weak))] == [
        "Weak scaling"
    ]


def test_table() -> None:
    (table,) = scaling_tables(compared(*trials(noise=0.5)))
    assert table.cells("label") == ("single", "ddp", "ddp")
    assert table.cells("fewest_ranks") == ("1", "1", "1")
    assert table.cells("speedup_over_fewest") == ("1.00", "1.50", "2.40")
    assert table.cells("efficiency_over_fewest") == ("100", "75", "60")
    assert table.cells("peak_memory_bytes") == ("410.1", "290.9", "231.3")
    text = notes(compared(*trials()))
    assert "On one number of ranks only: single on 1 rank." in text
    assert "slower" not in text
    assert "One repeat: no interval." in notes(compared(*trials(repeats=1)))
    last = records(table)[-1]
    assert (last["strategy"], last["world_size"], last["fewest_ranks"]) == ("ddp", 4, 1)
    assert last["efficiency_over_fewest"]["unit"] == "ratio"
    assert last["peak_memory_bytes"]["value"] == pytest.approx(242.5e6)


def test_only_what_the_interval_shows_is_called_slower() -> None:
    def at(rates: tuple[float, float]) -> list[TrialResult]:
        return [
            invented_trial("ddp", size, repeat, metrics={"samples_per_second": rate})
            for size, pair in ((2, (100.0, 101.0)), (4, rates))
            for repeat, rate in enumerate(pair)
        ]

    assert "More ranks are slower: ddp on 4 ranks." in notes(compared(*at((50.0, 50.6))))
    unclear = notes(compared(*at((50.0, 150.0))))
    assert "No difference shown to the fewest ranks: ddp on 4 ranks." in unclear
    assert "More ranks are slower" not in unclear
    faster = notes(compared(*at((180.0, 181.9))))
    assert "slower" not in faster
    assert "No difference" not in faster


def test_servers_are_named() -> None:
    trial = invented_trial("ps-async", 2)
    server = trial.ranks[0].model_copy(update={"rank": 2, "role": "server"})
    comparison = compared(trial.model_copy(update={"ranks": (*trial.ranks, server)}))
    assert "Parameter servers stand behind the +" in notes(comparison)
    assert "Parameter servers" not in notes(compared(*trials()))


def test_without_any_throughput_the_table_says_so() -> None:
    failed = invented_trial("ddp", 2, outcome=Outcome.FAILED, failure=Failure(reason="x"))
    (table,) = scaling_tables(compared(failed))
    assert (table.columns, table.rows) == ((), ())
    assert table.notes[0] == "No trial has a throughput."


def test_more_nodes_are_more_ranks_unless_ranks_vary_beside_them() -> None:
    """On 1 and 2 nodes of 2 ranks each strategy scales; with ranks of its own, each node does."""

    def on(size: int, nodes: int) -> TrialResult:
        rates = {"samples_per_second": 100.0 * size}
        return invented_trial("ddp", size, varied={"placement.nodes": nodes}, metrics=rates)

    (both,) = scalings_of(compared(on(2, 1), on(4, 2)).rows)
    assert [point.row.varied["placement.nodes"] for point in both.points] == [1, 2]
    apart = scalings_of(compared(on(2, 1), on(4, 1), on(2, 2), on(4, 2)).rows)
    assert [[point.row.world_size for point in part.points] for part in apart] == [[2, 4], [2, 4]]
    efficiency = compared(on(2, 1), on(4, 2)).rows[-1].metrics["scaling_efficiency"]
    assert efficiency is not None
    assert efficiency.value == 1.0
