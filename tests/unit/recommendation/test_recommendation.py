"""What is recommended, and what is not: each case with invented rows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardmark.analysis.comparison import Comparison
from shardmark.analysis.recommendation import Recommendation, recommend
from shardmark.report.recommendation import recommendation_json, recommendation_lines
from shardmark.results.schema import Outcome
from tests.unit.recommendation.invented_rows import MIB, Cell, compared

SINGLE = Cell(strategy="single", world_size=1, rates=(100, 101, 99), peaks=(90 * MIB,))
DDP = Cell(strategy="ddp", world_size=2, rates=(180, 182, 181), peaks=(80 * MIB,))
FSDP = Cell(strategy="fsdp", world_size=2, rates=(150, 151, 152), peaks=(40 * MIB,))


def _one(comparison: Comparison, goal: str, size: int | None = None) -> Recommendation:
    (found,) = [one for one in recommend(comparison) if (one.goal, one.world_size) == (goal, size)]
    return found


def _line(comparison: Comparison, start: str) -> str:
    (found,) = [line for line in recommendation_lines(comparison) if line.startswith(start)]
    return found


def test_winner_with_margin_and_interval(tmp_path: Path) -> None:
    comparison = compared(tmp_path, [SINGLE, DDP, FSDP])
    found = _one(comparison, "speed").selection
    assert found is not None
    assert found.second is not None
    assert found.margin is not None
    assert (found.state, found.best.strategy, found.second.strategy) == ("shown", "ddp", "fsdp")
    assert found.margin.value == pytest.approx(181 / 151, rel=1e-3)
    low, high = (100 * (end - 1) for end in (found.margin.low or 0, found.margin.high or 0))
    assert _line(comparison, "Fastest: ") == (
        "Fastest: ddp on 2 ranks, 181.0 samples/s, 20 % faster (95 % interval"
        f" {low:.0f} to {high:.0f} %) than fsdp on 2 ranks."
    )


def test_memory_goes_to_the_emptiest_fullest_rank(tmp_path: Path) -> None:
    comparison = compared(tmp_path, [SINGLE, DDP, FSDP])
    assert _line(comparison, "Least memory") == (
        "Least memory: fsdp on 2 ranks, 40.0 MiB in its fullest rank, 50 % less (95 % interval:"
        " the same) than ddp on 2 ranks."
    )


def test_best_for_each_number_of_ranks(tmp_path: Path) -> None:
    comparison = compared(tmp_path, [SINGLE, DDP, FSDP])
    assert _line(comparison, "Fastest by") == (
        "Fastest by number of ranks: on 1 rank single; on 2 ranks ddp."
    )


def test_tie_crowns_nobody(tmp_path: Path) -> None:
    even = Cell(strategy="zero-2", world_size=2, rates=(182, 180, 181.5), peaks=(70 * MIB,))
    comparison = compared(tmp_path, [SINGLE, DDP, even])
    found = _one(comparison, "speed").selection
    assert found is not None
    assert found.state == "tie"
    assert {found.best.strategy, *(row.strategy for row in found.ties)} == {"ddp", "zero-2"}
    line = _line(comparison, "Fastest: ")
    assert "no measurable difference between zero-2 on 2 ranks (181.2 samples/s) and ddp" in line
    assert "faster" not in line


def test_many_ties_are_counted(tmp_path: Path) -> None:
    cells = [
        Cell(strategy=f"s{place}", world_size=2, rates=(100 + place, 108, 92 - place))
        for place in range(8)
    ]
    line = _line(compared(tmp_path, cells), "Fastest: ")
    assert "and 4 more, the last with 100.0 samples/s" in line


def test_one_repeat_says_so(tmp_path: Path) -> None:
    line = _line(compared(tmp_path, [SINGLE, DDP], repeats=1), "Fastest: ")
    assert line == (
        "Fastest: ddp on 2 ranks, 180.0 samples/s, 80 % faster than single on 1 rank; with one"
        " repeat the order is not shown to be real."
    )


def test_alone(tmp_path: Path) -> None:
    line = _line(compared(tmp_path, [DDP]), "Fastest: ")
    assert line == "Fastest: ddp on 2 ranks, 181.0 samples/s; nothing else competes."


def _with(cell: Cell, **changes: Any) -> Cell:
    return replace(cell, **changes)


def test_nothing_verified_is_said(tmp_path: Path) -> None:
    cells = [_with(cell, equivalent=None) for cell in (SINGLE, DDP)]
    comparison = compared(tmp_path, cells)
    assert _one(comparison, "speed").field.unverified
    assert recommendation_lines(comparison)[-1].startswith("Nothing was verified: ")
    assert _line(comparison, "Fastest: ").startswith("Fastest: ddp on 2 ranks")


def test_verified_says_nothing_of_it(tmp_path: Path) -> None:
    lines = recommendation_lines(compared(tmp_path, [SINGLE, DDP]))
    assert not [line for line in lines if "verified" in line]


def test_not_equivalent_is_left_out_with_its_cause(tmp_path: Path) -> None:
    wrong = _with(DDP, equivalent=False, deviation="gradients are summed, not averaged")
    comparison = compared(tmp_path, [SINGLE, wrong, FSDP])
    assert _line(comparison, "Fastest: ").startswith("Fastest: fsdp on 2 ranks")
    assert _line(comparison, "Left out") == (
        "Left out: ddp on 2 ranks (not equivalent: gradients are summed, not averaged)."
    )


def test_not_verified_is_left_out_beside_proven_ones(tmp_path: Path) -> None:
    comparison = compared(tmp_path, [SINGLE, _with(DDP, equivalent=None), FSDP])
    assert _line(comparison, "Fastest: ").startswith("Fastest: fsdp on 2 ranks")
    assert _line(comparison, "Left out") == "Left out: ddp on 2 ranks (not verified)."


def test_nothing_proven_gives_no_answer(tmp_path: Path) -> None:
    wrong = [_with(cell, equivalent=False, deviation="it clips") for cell in (SINGLE, DDP)]
    line = _line(compared(tmp_path, wrong), "Fastest: ")
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


ASYNC = Cell(
    strategy="ps-async",
    world_size=2,
    rates=(240, 241, 239),
    peaks=(85 * MIB,),
    equivalent=None,
    promise="every gradient is applied once, however stale",
    qualities=(0.50, 0.51, 0.49),
)


def test_asynchronous_never_wins_but_is_named_with_its_price(tmp_path: Path) -> None:
    cells = [_with(one, qualities=(0.80, 0.81, 0.79)) for one in (SINGLE, DDP)]
    comparison = compared(tmp_path, [*cells, ASYNC])
    one = _one(comparison, "speed")
    assert one.selection is not None
    assert one.selection.best.strategy == "ddp"
    assert [weaker.shown_better for weaker in one.weaker] == [True]
    assert (
        "ps-async on 2 ranks reaches 240.0 samples/s, but promises less: every gradient is applied"
        " once, however stale; top-1 50.0 % against 80.0 % at the end."
    ) in _line(comparison, "Fastest: ")


def test_slower_asynchronous_is_not_named(tmp_path: Path) -> None:
    slow = _with(ASYNC, rates=(120, 121, 119))
    assert "ps-async" not in _line(compared(tmp_path, [SINGLE, DDP, slow]), "Fastest: ")


def test_quality_is_the_time_to_what_all_reach(tmp_path: Path) -> None:
    """`single` reaches 0.8 at its end, and 0.4 after one of two epochs, `ddp` 0.6 at its end."""
    single = _with(SINGLE, qualities=(0.8,))
    ddp = _with(DDP, qualities=(0.6,))
    comparison = compared(tmp_path, [single, ddp])
    one = _one(comparison, "quality")
    assert one.target == pytest.approx(0.6)
    assert one.selection is not None
    times = {row.strategy: seconds for row, seconds in one.selection.values}
    assert times["ddp"] == pytest.approx(2 * 640 / 181, rel=1e-3)
    assert times["single"] == pytest.approx(2 * 640 / 100, rel=1e-3)
    assert _line(comparison, "Quality").startswith(
        "Quality in a given time: top-1 60.0 %, which every candidate reaches: ddp on 2 ranks,"
        " 7.07 s, 45 % sooner (95 % interval "
    )


def test_asynchronous_that_misses_the_target_has_no_time(tmp_path: Path) -> None:
    cells = [_with(one, qualities=(0.8,)) for one in (SINGLE, DDP)]
    one = _one(compared(tmp_path, [*cells, ASYNC]), "quality")
    assert [weaker.value for weaker in one.weaker] == [None]
    assert one.weaker[0].quality is not None


def test_without_evaluation_no_quality(tmp_path: Path) -> None:
    line = _line(compared(tmp_path, [SINGLE, DDP]), "Quality")
    assert line == "Quality in a given time: no answer: the validation set was not evaluated."


def test_groups_do_not_compete(tmp_path: Path) -> None:
    """Other precisions and other batches train something else: one line for each and goal."""
    cells = [
        _with(cell, precision=precision, varied={"recipe.global_batch": batch})
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
    wrong = _with(DDP, precision="bf16", equivalent=False, deviation="it clips")
    full = _with(FSDP, precision="bf16", outcome=Outcome.OUT_OF_MEMORY)
    gone = Cell(strategy="dp", world_size=2, outcome=Outcome.UNAVAILABLE, equivalent=None)
    cells = [DDP, FSDP, gone, wrong, full, _with(gone, precision="bf16")]
    lines = recommendation_lines(compared(tmp_path, cells))
    (line,) = [one for one in lines if one.startswith("Left out")]
    assert "dp on 2 ranks (unavailable)" in line
    assert "ddp on 2 ranks in bf16 (not equivalent: it clips)" in line
    assert "bf16: On 2 ranks only ddp fits: fsdp ran out of memory." in lines


def test_execution_competes(tmp_path: Path) -> None:
    """Checkpointing changes how a step is computed, not what: both rows are in one group."""
    key = "recipe.activation_checkpointing"
    cells = [
        _with(DDP, varied={key: False}),
        _with(DDP, varied={key: True}, rates=(120, 121, 122), peaks=(30 * MIB,)),
    ]
    lines = recommendation_lines(compared(tmp_path, cells))
    assert lines[0].startswith("Fastest: ddp on 2 ranks, activation_checkpointing=false, 181.0")
    assert lines[1].startswith("Least memory: ddp on 2 ranks, activation_checkpointing=true, 30.0")


def test_json_has_the_numbers_of_the_text(tmp_path: Path) -> None:
    cells = [_with(one, qualities=(0.8,)) for one in (SINGLE, DDP, FSDP)]
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
        "memory",
        "quality",
    ]
