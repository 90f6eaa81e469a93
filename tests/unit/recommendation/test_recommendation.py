"""What is recommended, and what is not: each case with invented rows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardmark.analysis.advise.candidates import headline_qualities
from shardmark.analysis.advise.recommendation import total_memory
from shardmark.analysis.compare.comparison import Comparison
from shardmark.analysis.compare.rows import Row
from shardmark.report.answers.recommendation import recommendation_json, recommendation_lines
from shardmark.results.schema import Outcome
from tests.unit.recommendation.invented_rows import MIB, Cell, compared
from tests.unit.recommendation.questions import ASYNC, DDP, FSDP, SINGLE, line_of, one_of, with_


def test_winner_with_margin_and_interval(tmp_path: Path) -> None:
    comparison = compared(tmp_path, [SINGLE, DDP, FSDP])
    found = one_of(comparison, "speed").selection
    assert found is not None
    assert found.second is not None
    assert found.margin is not None
    assert (found.state, found.best.strategy, found.second.strategy) == ("shown", "ddp", "fsdp")
    assert found.margin.value == pytest.approx(181 / 151, rel=1e-3)
    low, high = (100 * (end - 1) for end in (found.margin.low or 0, found.margin.high or 0))
    assert line_of(comparison, "Fastest: ") == (
        "Fastest: ddp on 2 ranks, 181.0 samples/s, 20 % faster (95 % interval"
        f" {low:.0f} to {high:.0f} %) than fsdp on 2 ranks. By ranks: on 2 ranks ddp."
    )


def test_memory_by_number_of_ranks_and_of_all_together(tmp_path: Path) -> None:
    """A rank of two holds less than one of one: only ranks of as many are held together."""
    comparison = compared(tmp_path, [SINGLE, DDP, FSDP])
    assert line_of(comparison, "Least memory") == (
        "Least memory in the fullest rank: on 1 rank single, 90.0 MiB (nothing else competes); on 2"
        " ranks fsdp, 40.0 MiB, 50 % less than ddp. All ranks together: fsdp on 2 ranks, 80.0 MiB,"
        " 11 % less than single on 1 rank."
    )


def test_total_memory_counts_servers_and_only_shared_devices(tmp_path: Path) -> None:
    server = Cell(strategy="ps-sync", world_size=1, rates=(90,), peaks=(60 * MIB,), servers=1)
    comparison = compared(tmp_path, [SINGLE, server])
    rows = {row.strategy: row for row in comparison.rows}
    assert set(total_memory(rows["single"]).values()) == {90 * MIB}
    assert set(total_memory(rows["ps-sync"]).values()) == {120 * MIB}
    apart = [
        trial.model_copy(
            update={
                "ranks": tuple(
                    rank.model_copy(update={"device": f"cuda:{rank.rank}"}) for rank in trial.ranks
                )
            }
        )
        for trial in rows["ps-sync"].trials
    ]
    assert total_memory(replace(rows["ps-sync"], trials=tuple(apart))) == {}


def test_best_for_each_number_of_ranks(tmp_path: Path) -> None:
    slow = Cell(strategy="ps-sync", world_size=1, rates=(60, 61, 62))
    comparison = compared(tmp_path, [SINGLE, slow, DDP, FSDP])
    assert "By ranks: on 1 rank single; on 2 ranks ddp." in line_of(comparison, "Fastest: ")


def test_tie_crowns_nobody(tmp_path: Path) -> None:
    even = Cell(strategy="zero-2", world_size=2, rates=(182, 180, 181.5), peaks=(70 * MIB,))
    comparison = compared(tmp_path, [SINGLE, DDP, even])
    found = one_of(comparison, "speed").selection
    assert found is not None
    assert found.state == "tie"
    assert {found.best.strategy, *(row.strategy for row in found.ties)} == {"ddp", "zero-2"}
    line = line_of(comparison, "Fastest: ")
    assert "no measurable difference between zero-2 on 2 ranks (181.2 samples/s) and ddp" in line
    assert "faster" not in line


def test_many_ties_are_counted(tmp_path: Path) -> None:
    cells = [
        Cell(strategy=f"s{place}", world_size=2, rates=(100 + place, 108, 92 - place))
        for place in range(8)
    ]
    line = line_of(compared(tmp_path, cells), "Fastest: ")
    assert "and 5 more (the last 100.0 samples/s)" in line


def test_one_repeat_says_so(tmp_path: Path) -> None:
    line = line_of(compared(tmp_path, [SINGLE, DDP], repeats=1), "Fastest: ")
    assert line == (
        "Fastest: ddp on 2 ranks, 180.0 samples/s, 80 % faster than single on 1 rank; one repeat:"
        " the order is not shown to be real."
    )


def test_alone(tmp_path: Path) -> None:
    line = line_of(compared(tmp_path, [DDP]), "Fastest: ")
    assert line == "Fastest: ddp on 2 ranks, 181.0 samples/s (nothing else competes)."


def test_nothing_verified_is_said(tmp_path: Path) -> None:
    cells = [with_(cell, equivalent=None) for cell in (SINGLE, DDP)]
    comparison = compared(tmp_path, cells)
    assert one_of(comparison, "speed").field.unverified
    assert recommendation_lines(comparison)[-1].startswith("Nothing was verified: ")
    assert line_of(comparison, "Fastest: ").startswith("Fastest: ddp on 2 ranks")


def test_verified_says_nothing_of_it(tmp_path: Path) -> None:
    lines = recommendation_lines(compared(tmp_path, [SINGLE, DDP]))
    assert not [line for line in lines if "verified" in line]


def test_not_equivalent_is_left_out_with_its_cause(tmp_path: Path) -> None:
    wrong = with_(DDP, equivalent=False, deviation="gradients are summed, not averaged")
    comparison = compared(tmp_path, [SINGLE, wrong, FSDP])
    assert line_of(comparison, "Fastest: ").startswith("Fastest: fsdp on 2 ranks")
    assert line_of(comparison, "Left out") == (
        "Left out: ddp on 2 ranks (not equivalent: gradients are summed, not averaged)."
    )


def test_not_verified_is_left_out_beside_proven_ones(tmp_path: Path) -> None:
    comparison = compared(tmp_path, [SINGLE, with_(DDP, equivalent=None), FSDP])
    assert line_of(comparison, "Fastest: ").startswith("Fastest: fsdp on 2 ranks")
    assert line_of(comparison, "Left out") == "Left out: ddp on 2 ranks (not verified)."


def test_nothing_proven_gives_no_answer(tmp_path: Path) -> None:
    wrong = [with_(cell, equivalent=False, deviation="it clips") for cell in (SINGLE, DDP)]
    line = line_of(compared(tmp_path, wrong), "Fastest: ")
    assert line == "Fastest: no answer: no row is proven to train what the reference trains."


def test_only_one_fits(tmp_path: Path) -> None:
    full = Cell(strategy="ddp", world_size=2, outcome=Outcome.OUT_OF_MEMORY, reason="rank 1 full")
    comparison = compared(tmp_path, [SINGLE, full, FSDP])
    lines = recommendation_lines(comparison)
    assert "On 2 ranks only fsdp fits: ddp ran out of memory." in lines
    assert "Left out: ddp on 2 ranks (out of memory)." in lines


def test_outcomes_are_named_once_for_all_sizes(tmp_path: Path) -> None:
    gone = [
        Cell(strategy="dp", world_size=size, outcome=Outcome.UNAVAILABLE, equivalent=None)
        for size in (2, 4)
    ]
    assert "Left out: dp on 2 and 4 ranks (unavailable)." in recommendation_lines(
        compared(tmp_path, [SINGLE, DDP, *gone])
    )


def test_no_trial_ended_ok(tmp_path: Path) -> None:
    gone = Cell(strategy="ddp", world_size=2, outcome=Outcome.FAILED, equivalent=None)
    lines = recommendation_lines(compared(tmp_path, [gone]))
    assert lines[0] == "Fastest: no answer: no trial ended ok."


def test_no_rows_say_nothing() -> None:
    empty = Comparison(rows=(), baseline="single", notes=(), damaged=(), missing=())
    assert recommendation_lines(empty) == ()


def test_asynchronous_never_wins_but_is_named_with_its_price(tmp_path: Path) -> None:
    cells = [with_(one, qualities=(0.80, 0.81, 0.79)) for one in (SINGLE, DDP)]
    comparison = compared(tmp_path, [*cells, ASYNC])
    one = one_of(comparison, "speed")
    assert one.selection is not None
    assert one.selection.best.strategy == "ddp"
    assert [weaker.shown_better for weaker in one.weaker] == [True]
    assert (
        " Not ranked, because it promises less: ps-async on 2 ranks, 240.0 samples/s, top-1 50.0 %"
        " at the end."
    ) in line_of(comparison, "Fastest: ")


def test_asynchronous_that_leads_by_chance_is_named_with_the_doubt(tmp_path: Path) -> None:
    noisy = with_(ASYNC, rates=(300, 120, 160), qualities=())
    assert line_of(compared(tmp_path, [SINGLE, DDP, noisy]), "Fastest: ").endswith(
        "Not ranked, because it promises less: ps-async on 2 ranks, 193.3 samples/s (not shown to"
        " be better)."
    )


def test_slower_asynchronous_is_not_named(tmp_path: Path) -> None:
    slow = with_(ASYNC, rates=(120, 121, 119))
    assert "ps-async" not in line_of(compared(tmp_path, [SINGLE, DDP, slow]), "Fastest: ")


def test_a_row_with_one_trial_left_says_so_and_spoils_no_other(tmp_path: Path) -> None:
    """`fsdp` lost two of three trials: it alone has no interval, and is not crowned in silence."""
    comparison = compared(tmp_path, [SINGLE, DDP, with_(FSDP, rates=(150, 150, 150))])
    rows = tuple(_failing(row) if row.strategy == "fsdp" else row for row in comparison.rows)
    line = line_of(replace(comparison, rows=rows), "Fastest: ")
    assert "fsdp on 2 ranks (1 of 3 trials ok)" in line
    assert "the order is not shown to be real" not in line
    rows = tuple(_failing(row) if row.strategy == "ddp" else row for row in comparison.rows)
    line = line_of(replace(comparison, rows=rows), "Fastest: ")
    assert line.startswith("Fastest: ddp on 2 ranks (1 of 3 trials ok), 18")
    assert "the order is not shown to be real" in line


def _failing(row: Row) -> Row:
    """Of its trials only the first is left."""
    gone = {"outcome": Outcome.FAILED}
    trials = tuple(
        trial.model_copy(update=gone if place else {}) for place, trial in enumerate(row.trials)
    )
    values = {name: {0: found[0]} if found else {} for name, found in row.values.items()}
    return replace(row, trials=trials, values=values)


def test_headline_qualities_begin_with_the_one_most_rows_have(tmp_path: Path) -> None:
    both = {"validation_loss": 0.5}
    cells = [with_(SINGLE, metrics=both), with_(DDP, metrics=both), with_(FSDP, qualities=(0.5,))]
    rows = compared(tmp_path, cells).rows
    assert headline_qualities(rows) == ("validation_loss", "accuracy_top1")
    assert headline_qualities([replace(row, synthetic=True) for row in rows]) == ()


def test_groups_do_not_compete(tmp_path: Path) -> None:
    """Other precisions and other batches train something else: one line for each and goal."""
    cells = [
        with_(cell, precision=precision, varied={"recipe.global_batch": batch})
        for cell in (SINGLE, DDP)
        for precision in ("fp32", "bf16")
        for batch in (32, 64)
    ]
    lines = recommendation_lines(compared(tmp_path, cells))
    fastest = [line.partition(":")[0] for line in lines if line.startswith("Fastest")]
    assert sorted(fastest) == [
        "Fastest (bf16, 32)",
        "Fastest (bf16, 64)",
        "Fastest (fp32, 32)",
        "Fastest (fp32, 64)",
    ]


def test_what_is_left_out_of_one_group_names_it(tmp_path: Path) -> None:
    wrong = with_(DDP, precision="bf16", equivalent=False, deviation="it clips")
    full = with_(FSDP, precision="bf16", outcome=Outcome.OUT_OF_MEMORY)
    gone = Cell(strategy="dp", world_size=2, outcome=Outcome.UNAVAILABLE, equivalent=None)
    cells = [DDP, FSDP, gone, wrong, full, with_(gone, precision="bf16")]
    lines = recommendation_lines(compared(tmp_path, cells))
    (line,) = [one for one in lines if one.startswith("Left out")]
    assert "dp on 2 ranks (unavailable)" in line
    assert "ddp on 2 ranks in bf16 (not equivalent: it clips)" in line
    assert "bf16: On 2 ranks only ddp fits: fsdp ran out of memory." in lines


def test_execution_competes(tmp_path: Path) -> None:
    """Checkpointing changes how a step is computed, not what: both rows are in one group."""
    key = "recipe.activation_checkpointing"
    cells = [
        with_(DDP, varied={key: False}),
        with_(DDP, varied={key: True}, rates=(120, 121, 122), peaks=(30 * MIB,)),
    ]
    lines = recommendation_lines(compared(tmp_path, cells))
    assert lines[0].startswith("Fastest: ddp on 2 ranks, activation_checkpointing=false, 181.0")
    start = "Least memory in the fullest rank: ddp on 2 ranks, activation_checkpointing=true, 30.0"
    assert lines[1].startswith(start)


def test_json_has_the_numbers_of_the_text(tmp_path: Path) -> None:
    cells = [with_(one, qualities=(0.8,)) for one in (SINGLE, DDP, FSDP)]
    comparison = compared(tmp_path, [*cells, ASYNC])
    document: Any = json.loads(json.dumps(recommendation_json(comparison), allow_nan=False))
    speed = document["recommendations"][0]
    assert speed["best"]["strategy"] == "ddp"
    assert speed["second"]["strategy"] == "fsdp"
    assert speed["margin"]["value"] == pytest.approx(181 / 151, rel=1e-3)
    assert speed["values"][0]["value"] == pytest.approx(181)
    assert speed["promises_less"][0]["row"]["strategy"] == "ps-async"
    assert [one["goal"] for one in document["recommendations"]] == [
        *("speed",) * 3,
        *("memory",) * 4,
        "quality",
    ]
    assert document["recommendations"][-2]["metric"] == "total_memory_bytes"
    quality = document["recommendations"][-1]
    assert quality["target_is_chance"] is False
    assert quality["quality_in_time"]["fastest"]["strategy"] == "ddp"
