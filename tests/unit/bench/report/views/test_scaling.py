"""Speed-up over the fewest ranks, repeat by repeat; conditions are never mixed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardmark.base.results.schema import Failure, Outcome, TrialResult
from shardmark.base.table.formats import records
from shardmark.base.table.table import Table
from shardmark.bench.analysis.compare.comparison import Comparison
from shardmark.bench.report.answers.answers import next_commands
from shardmark.bench.report.table.comparison import WIDE, comparison_table
from shardmark.bench.report.views.scaling import scaling_tables
from tests.golden.invented import compare_trials, invented_trial

RATES = {("single", 1): 100.0, ("ddp", 2): 150.0, ("ddp", 4): 240.0}


def trial(name: str, size: int, rate: float = 100.0, repeat: int = 0, **fields: Any) -> TrialResult:
    return invented_trial(name, size, repeat, metrics={"samples_per_second": rate}, **fields)


def trials(noise: float = 0.0, repeats: int = 2) -> list[TrialResult]:
    """A repeat is faster than the one before by the noise, on any number of ranks."""
    return [
        trial(name, size, rate * (1 + noise * repeat), repeat)
        for (name, size), rate in RATES.items()
        for repeat in range(repeats)
    ]


def viewed(*given: TrialResult) -> Table:
    (table,) = scaling_tables(compare_trials(*given))
    return table


def gains(*given: TrialResult) -> list[tuple[str, int, int, float]]:
    """Strategy, ranks, those of the reference, and the speed-up."""
    return [
        (
            *(line["strategy"], line["world_size"], line["fewest_ranks"]),
            round(line["speedup_over_fewest"]["value"], 6),
        )
        for line in records(viewed(*given))
    ]


def test_speed_up_counts_from_the_fewest_ranks_that_exist() -> None:
    """`ddp` needs two ranks; `single` shows what one does.  A failed trial is no reference."""
    assert gains(*trials()) == [("single", 1, 1, 1.0), ("ddp", 2, 1, 1.5), ("ddp", 4, 1, 2.4)]
    failed = invented_trial("ddp", 1, outcome=Outcome.OUT_OF_MEMORY, failure=Failure(reason="x"))
    assert "`single`" in " ".join(viewed(*trials()).notes)
    alone = (failed, *trials()[2:])
    assert "`single`" not in " ".join(viewed(*alone).notes)
    assert gains(*alone) == [("ddp", 2, 2, 1.0), ("ddp", 4, 2, 1.6)]
    assert "ddp on 1 rank (1 x out_of_memory)" in " ".join(viewed(*alone).notes)


def test_the_brief_comparison_has_speed_up_over_ranks_where_they_vary() -> None:
    """Otherwise it has that over the baseline, so that one column never mixes both."""
    comparison = compare_trials(*trials())
    table = comparison_table(comparison)
    assert table.cells("speedup_over_fewest") == ("2.40", "1.50", "1.00")
    assert table.cells("efficiency_over_fewest") == ("60", "75", "100")
    assert any("--view scaling" in line for line in next_commands(stored(comparison)))
    page = comparison_table(comparison, WIDE)
    assert page.cells("speedup_over_fewest") == table.cells("speedup_over_fewest")
    assert [c.title for c in page.columns if c.key == "speedup"] == ["rate ratio"]
    same_ranks = compare_trials(trial("single", 1), trial("ddp", 2, 150.0), trial("fsdp", 2, 50.0))
    assert comparison_table(same_ranks).cells("speedup") == ("1.50", "1.00", "0.50")
    assert not any("--view scaling" in line for line in next_commands(stored(same_ranks)))


def stored(comparison: Comparison) -> Comparison:
    rows = tuple(replace(row, folder=Path("runs/invented")) for row in comparison.rows)
    return replace(comparison, rows=rows)


def test_noise_shared_by_a_repeat_cancels() -> None:
    table = viewed(*trials(noise=0.5, repeats=3))
    assert table.cells("speedup_over_fewest") == ("1.00", "1.50", "2.40")
    assert table.cells("efficiency_over_fewest") == ("100", "75", "60")
    last = records(table)[-1]
    for key, value in (("speedup_over_fewest", 2.4), ("efficiency_over_fewest", 0.6)):
        assert [last[key][end] for end in ("low", "high")] == pytest.approx([value] * 2)
    assert "slower" not in " ".join(table.notes)
    assert "One repeat: no interval." in viewed(*trials(repeats=1)).notes


@pytest.mark.parametrize(
    ("two", "four"),
    [
        ({"varied": {"recipe.global_batch": 64}}, {"varied": {"recipe.global_batch": 128}}),
        ({"precision": "bf16"}, {}),
        ({"strategy_options": {"bucket_mb": 1}}, {}),
    ],
)
def test_conditions_and_options_are_never_mixed(two: dict[str, Any], four: dict[str, Any]) -> None:
    given = (trial("ddp", 2, **two), trial("ddp", 4, **four))
    assert [speedup for *_, speedup in gains(*given)] == [1.0, 1.0]


def test_weak_scaling_has_a_table_of_its_own() -> None:
    recipe = {"global_batch": None, "per_rank_batch": 8, "epochs": 2, "steps": None}
    content = {**invented_trial("ddp", 2).trial, "recipe": recipe}
    varied = {"recipe.per_rank_batch": 8}
    weak = [trial("ddp", size, trial=content, varied=varied) for size in (2, 4)]
    titles = [table.title for table in scaling_tables(compare_trials(*weak, *trials()))]
    assert [title.partition(":")[0] for title in titles] == ["Strong scaling", "Weak scaling"]


@pytest.mark.parametrize(
    ("rates", "said"),
    [
        ((50.0, 50.6), "More ranks are slower: ddp on 4 ranks."),
        ((50.0, 150.0), "No difference shown to the fewest ranks: ddp on 4 ranks."),
        ((180.0, 181.9), None),
    ],
)
def test_notes_follow_the_interval(rates: tuple[float, float], said: str | None) -> None:
    made = [
        trial("ddp", size, rate, repeat)
        for size, pair in ((2, (100.0, 101.0)), (4, rates))
        for repeat, rate in enumerate(pair)
    ]
    growth = [note for note in viewed(*made).notes if "slower" in note or "No difference" in note]
    assert growth == ([] if said is None else [said])


def test_rows_without_throughput_have_a_note() -> None:
    table = viewed(invented_trial(outcome=Outcome.FAILED, failure=Failure(reason="x")))
    assert (table.rows, table.notes[0]) == ((), "No trial has a throughput.")


def test_more_nodes_are_more_ranks_unless_ranks_vary_beside_them() -> None:
    """On 1 and 2 nodes of 2 ranks each strategy scales; with ranks of its own, each node does."""

    def on(size: int, nodes: int) -> TrialResult:
        return trial("ddp", size, 100.0 * size, varied={"placement.nodes": nodes})

    assert [speedup for *_, speedup in gains(on(2, 1), on(4, 2))] == [1.0, 2.0]
    apart = gains(on(2, 1), on(4, 1), on(2, 2), on(4, 2))
    assert [(size, speedup) for _, size, _, speedup in apart] == [(2, 1.0), (4, 2.0)] * 2
    efficiency = compare_trials(on(2, 1), on(4, 2)).rows[-1].metrics["scaling_efficiency"]
    assert efficiency is not None
    assert efficiency.value == 1.0
