"""Speed-up over the fewest ranks, repeat by repeat; conditions are never mixed."""

from __future__ import annotations

import csv
import io
import json

import pytest

from shardmark.analysis.compare.comparison import Comparison
from shardmark.analysis.compare.scaling import scalings_of
from shardmark.report.views.scaling import scaling_csv, scaling_json, scaling_sections
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
    return " ".join(note for one in scaling_sections(comparison) for note in one.table.notes)


def test_speed_up_and_efficiency_refer_to_the_fewest_ranks() -> None:
    ddp, single = scalings_of(compared(*trials()).rows)[::-1]
    assert (single.scales, ddp.scales, ddp.weak) == (False, True, False)
    first, second = ddp.points
    assert ddp.reference.world_size == 2
    assert first.speedup is not None
    assert first.efficiency is not None
    assert second.speedup is not None
    assert second.efficiency is not None
    assert (first.speedup.value, first.efficiency.value) == (1.0, 1.0)
    assert first.speedup.low is None
    assert second.speedup.value == pytest.approx(1.6)
    assert second.efficiency.value == pytest.approx(0.8)


def test_what_disturbs_a_whole_repeat_cancels() -> None:
    ddp = scalings_of(compared(*trials(noise=0.5, repeats=3)).rows)[1]
    speedup, efficiency = ddp.points[1].speedup, ddp.points[1].efficiency
    assert speedup is not None
    assert efficiency is not None
    assert [speedup.low, speedup.high] == pytest.approx([1.6, 1.6])
    assert [efficiency.low, efficiency.high] == pytest.approx([0.8, 0.8])
    assert ddp.reference.metrics["samples_per_second"] is not None


def test_a_failure_on_the_fewest_ranks_is_no_reference() -> None:
    failed = invented_trial(
        "ddp", 1, outcome=Outcome.OUT_OF_MEMORY, failure=Failure(reason="no memory")
    )
    comparison = compared(failed, *trials())
    (ddp,) = [one for one in scalings_of(comparison.rows) if one.reference.strategy == "ddp"]
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
    assert not any(one.scales for one in scalings_of(rows))


def test_weak_scaling_has_a_table_of_its_own() -> None:
    recipe = {"global_batch": None, "per_rank_batch": 8, "epochs": 2, "steps": None}
    base = invented_trial("ddp", 2).trial
    weak = [
        invented_trial(
            "ddp", size, trial={**base, "recipe": recipe}, varied={"recipe.per_rank_batch": 8}
        )
        for size in (2, 4)
    ]
    titles = [one.title for one in scaling_sections(compared(*weak, *trials()))]
    assert [title.partition(":")[0] for title in titles] == ["Strong scaling", "Weak scaling"]
    assert [one.title.partition(":")[0] for one in scaling_sections(compared(*weak))] == [
        "Weak scaling"
    ]


def test_table() -> None:
    (section,) = scaling_sections(compared(*trials()))
    lines = {column.title.replace("\n", " "): column.cells for column in section.table.columns}
    assert lines["strategy"] == ("single", "ddp", "ddp")
    assert lines["ranks"] == ("1", "2", "4")
    assert lines["speed-up"] == ("1.00", "1.00", "1.60")
    assert lines["95 % interval"] == ("", "", "1.60 to 1.60")
    assert lines["eff. %"] == ("100", "100", "80")
    assert lines["peak MiB"] == ("410.1", "290.9", "231.3")
    text = notes(compared(*trials()))
    assert "On one number of ranks only, so without a speed-up: single on 1 rank." in text
    assert "slower" not in text
    assert "One repeat: no interval." in notes(compared(*trials(repeats=1)))


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


def test_programs_get_base_units() -> None:
    comparison = compared(*trials(noise=0.5))
    document = json.loads(json.dumps(scaling_json(comparison), allow_nan=False))
    last = document[-1]
    assert (last["strategy"], last["world_size"], last["fewest_ranks"]) == ("ddp", 4, 2)
    assert last["speedup_over_fewest"]["value"] == pytest.approx(1.6)
    assert last["efficiency_over_fewest"]["unit"] == "ratio"
    assert last["peak_memory_bytes"]["value"] == pytest.approx(242.5e6)
    lines = list(csv.DictReader(io.StringIO(scaling_csv(comparison))))
    assert [line["world_size"] for line in lines] == ["1", "2", "4"]
    assert float(lines[2]["speedup_over_fewest"]) == pytest.approx(1.6)
    assert float(lines[2]["efficiency_over_fewest_low"]) == pytest.approx(0.8)
    assert lines[1]["speedup_over_fewest_low"] == ""


def test_without_any_throughput_the_table_says_so() -> None:
    failed = invented_trial("ddp", 2, outcome=Outcome.FAILED, failure=Failure(reason="x"))
    (section,) = scaling_sections(compared(failed))
    assert section.table.columns == ()
    assert section.table.notes[0] == "No trial has a throughput."
    assert scaling_json(compared(failed)) == []


def test_more_nodes_are_more_ranks_unless_ranks_vary_beside_them() -> None:
    """On 1 and 2 nodes of 2 ranks each strategy scales; with ranks of its own, each node does."""

    def on(size: int, nodes: int) -> TrialResult:
        rates = {"samples_per_second": 100.0 * size}
        return invented_trial("ddp", size, varied={"placement.nodes": nodes}, metrics=rates)

    (both,) = scalings_of(compared(on(2, 1), on(4, 2)).rows)
    assert [point.row.varied["placement.nodes"] for point in both.points] == [1, 2]
    apart = scalings_of(compared(on(2, 1), on(4, 1), on(2, 2), on(4, 2)).rows)
    assert [[point.row.world_size for point in one.points] for one in apart] == [[2, 4], [2, 4]]
    efficiency = compared(on(2, 1), on(4, 2)).rows[-1].metrics["scaling_efficiency"]
    assert efficiency is not None
    assert efficiency.value == 1.0
