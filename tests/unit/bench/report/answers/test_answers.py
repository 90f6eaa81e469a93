"""The result begins with what was asked: fastest, memory, same training, and cautions."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardmark.base.results.schema import Outcome, TrialResult
from shardmark.base.results.store import load_run
from shardmark.bench.analysis.compare.comparison import Comparison
from shardmark.bench.analysis.compare.rounding import rounding_of
from shardmark.bench.report.answers.answers import (
    Answer,
    answer_grid,
    answer_lines,
    answers,
    next_commands,
)
from shardmark.bench.report.answers.overview import overview, overview_json
from shardmark.bench.report.answers.wording import rounding_text
from shardmark.bench.report.table.comparison import comparison_json
from tests import present
from tests.unit.bench.report.answers.invented_rows import MIB, OTHERS, Cell, compared

SINGLE = Cell(strategy="single", world_size=1, rates=(100, 101, 99), peaks=(90 * MIB,))
DDP = Cell(strategy="ddp", world_size=2, rates=(180, 182, 181), peaks=(80 * MIB,))
FSDP = Cell(strategy="fsdp", world_size=2, rates=(150, 151, 152), peaks=(40 * MIB,))
CASTS = replace(DDP, mathematics=("gradients are reduced in bf16",))
ASYNC = Cell(
    strategy="ps-async",
    world_size=2,
    rates=(240, 241, 239),
    equivalent=None,
    guarantee="every gradient is applied once, however stale",
)


def one_of(comparison: Comparison, question: str) -> Answer:
    (answer,) = [one for one in answers(comparison) if one.question == question]
    return answer


def test_three_short_lines_answer_a_run(tmp_path: Path) -> None:
    comparison = compared(tmp_path, [SINGLE, DDP, FSDP])
    fastest, memory, same = answers(comparison)
    assert (fastest.question, fastest.decided, fastest.strategy) == ("fastest", True, "ddp")
    assert fastest.text == "ddp, 181 samples/s (fsdp 151, 0.83x)"
    assert (memory.question, memory.decided, memory.strategy) == ("memory", True, "fsdp")
    assert memory.text == "fsdp, 40 MiB per rank (ddp 80)"
    assert (same.question, same.decided, same.strategy) == ("equivalent", True, None)
    assert same.text == "yes, 3 of 3 verified"
    assert [line.split()[0] for line in answer_lines(comparison)] == ["Fastest", "Memory", "Same"]
    first, second, third = json.loads(overview_json(comparison))["answers"]
    assert first["value"] == pytest.approx(181, abs=0.5)
    assert (first["unit"], first["ranks"], first["runner_up"]) == (
        "samples/s",
        2,
        "fsdp on 2 ranks",
    )
    assert first["ratio"] == pytest.approx(0.83, abs=0.005)
    assert (second["value"], second["unit"], second["ratio"]) == (40 * 2**20, "bytes", 2.0)
    assert (third["value"], third["runner_up"], third["same"]) == (None, None, [])
    assert next_commands(comparison) == []


def test_one_repeat_is_provisional(tmp_path: Path) -> None:
    comparison = compared(tmp_path, [SINGLE, DDP], repeats=1)
    caution, fastest, *_ = answers(comparison)
    assert caution.question == "caution"
    assert caution.text.startswith("Provisional: 1 repeat")
    assert (fastest.strategy, fastest.decided) == ("ddp", False)
    (command,) = next_commands(comparison)
    folder = tmp_path / "run"
    assert command.endswith(f"{folder}/experiment.yaml --out {folder} --set measure.repeats=3")


def test_one_repeat_in_common_is_provisional(tmp_path: Path) -> None:
    """Rows of an interrupted run: each has several repeats, and no pair has two in common."""
    cells = [SINGLE, replace(DDP, disturbed=(1, 2)), replace(FSDP, disturbed=(0, 1))]
    caution = answers(compared(tmp_path, cells))[1]
    assert caution.text.startswith("Provisional: ")
    assert "fsdp and single share fewer than 2 repeats with the fastest" in caution.text


@pytest.mark.parametrize(
    ("cells", "whose"),
    [
        ([SINGLE, replace(DDP, disturbed=range(3))], "the times of ddp on 2 ranks"),
        ([replace(cell, disturbed=range(3)) for cell in (SINGLE, DDP)], "these times"),
    ],
)
def test_nothing_is_decided_from_disturbed_trials(
    tmp_path: Path, cells: list[Cell], whose: str
) -> None:
    comparison = compared(tmp_path, cells)
    caution, fastest, memory, _ = answers(comparison)
    assert caution.text == f"Do not trust {whose}: {OTHERS.text}."
    assert (fastest.decided, fastest.strategy) == (False, None)
    assert fastest.text == "not decided: the times are disturbed"
    assert (memory.decided, memory.strategy) == (True, "ddp"), "bytes are what they are"
    ddp = next(row for row in comparison.rows if row.strategy == "ddp")
    assert (ddp.verdict, ddp.metrics["speedup"]) == ("not decided", None)
    assert ddp.missing["speedup"] == f"not decided: {OTHERS.text}"
    assert ddp.metrics["samples_per_second"] is not None, "measured, and kept"
    single = next(row for row in comparison.rows if row.strategy == "single")
    own = present(single.metrics["speedup"])
    assert own.value == 1.0
    assert next_commands(comparison)[0].endswith("--retry")


def test_a_disturbed_trial_does_not_count_beside_others(tmp_path: Path) -> None:
    comparison = compared(tmp_path, [SINGLE, replace(DDP, rates=(180, 20, 181), disturbed=(1,))])
    caution, fastest, *_ = answers(comparison)
    assert caution.text == "The times of 1 disturbed trial do not count."
    assert (fastest.decided, fastest.strategy) == (True, "ddp")
    assert fastest.text.startswith("ddp, 180 samples/s")
    (command,) = next_commands(comparison)
    assert command.endswith("--retry")
    fsdp = replace(DDP, strategy="fsdp", disturbed=(0, 1, 2))
    comparison = compared(tmp_path / "both", [SINGLE, replace(DDP, disturbed=(1,)), fsdp])
    untrusted, caution, *_ = answers(comparison)
    assert "the times of fsdp" in untrusted.text
    assert caution.text == "The times of 1 disturbed trial of other rows do not count."


@pytest.mark.parametrize(
    ("changes", "strategy", "decided", "said"),
    [
        ({"equivalent": False, "deviation": "gradients are summed"}, "fsdp", True, "no: fsdp"),
        (
            {"equivalent": False, "deviation": f"{'no words ' * 6}are cut"},
            "fsdp",
            True,
            "no: fsdp on 2 ranks (no words no words no words no words no words no words ...)",
        ),
        ({"equivalent": None}, None, False, "partly, 1 of 2"),
        ({"equivalent": True}, None, True, "yes, 2 of 2"),
    ],
)
def test_answer_says_whether_the_training_is_the_same(
    tmp_path: Path, changes: dict[str, Any], strategy: str | None, decided: bool, said: str
) -> None:
    comparison = compared(tmp_path, [DDP, replace(FSDP, **changes)])
    same = one_of(comparison, "equivalent")
    assert (same.strategy, same.decided) == (strategy, decided)
    assert same.text.startswith(said)
    if changes["equivalent"] is not True:
        assert one_of(comparison, "memory").strategy == "ddp", "only the verified one competes"


def test_nothing_verified_lets_all_compete_and_says_so(tmp_path: Path) -> None:
    cells = [replace(cell, equivalent=None) for cell in (DDP, FSDP)]
    comparison = compared(tmp_path, cells)
    assert one_of(comparison, "memory").strategy == "fsdp"
    assert one_of(comparison, "equivalent").text == "not verified"
    assert next_commands(comparison)[-1].startswith("Proof:  shardmark verify ")


@pytest.mark.parametrize(
    ("cells", "question", "strategy", "said"),
    [
        ([SINGLE, DDP, replace(DDP, world_size=4, rates=(300, 301, 302))], "fastest", "ddp",
         "ddp on 4 ranks, 301 samples/s (single on 1 rank 100, 0.33x)"),
        ([DDP, replace(FSDP, rates=(179, 183, 180))], "fastest", None,
         "ddp or fsdp (tie), 181 samples/s"),
        ([SINGLE, DDP, replace(FSDP, rates=(179, 183, 180))], "fastest", None,
         "ddp or fsdp (tie), 181 samples/s (single 100, 0.55x)"),
        ([DDP, replace(FSDP, rates=(120, 230, 130))], "fastest", None,
         "fsdp (not distinguishable)"),
        ([DDP, ASYNC], "fastest", "ddp", "ps-async 240 trains differently"),
        ([DDP, ASYNC], "equivalent", None, "ps-async differs by design"),
        ([CASTS, FSDP], "fastest", "ddp", "(fsdp 151, 0.83x); gradients are reduced in bf16"),
        ([CASTS, FSDP], "equivalent", None, "2 of 2 verified; ddp by its own definition"),
        ([FSDP, replace(DDP, outcome=Outcome.OUT_OF_MEMORY)], "memory", "fsdp",
         "out of memory: ddp on 2 ranks"),
    ],
    ids=["several sizes", "a tie has no winner", "the runner-up is not tied", "noise is no tie",
         "another training does not win", "another training is named",
         "what a winner computes otherwise", "whose definition", "who ran out of memory"],
)  # fmt: skip
def test_answers_name_what_matters(
    tmp_path: Path, cells: list[Cell], question: str, strategy: str | None, said: str
) -> None:
    comparison = compared(tmp_path, cells)
    answer = one_of(comparison, question)
    assert answer.strategy == strategy
    assert said in answer.text
    assert all(len(line.split()) <= 20 for line in answer_lines(comparison)), "a short line each"


def test_nothing_measured_answers_nothing(tmp_path: Path) -> None:
    failed = [replace(cell, outcome=Outcome.FAILED) for cell in (DDP, FSDP)]
    assert answers(compared(tmp_path, failed)) == []


def test_a_matrix_is_answered_along_its_axes(tmp_path: Path) -> None:
    cells = [
        replace(cell, precision=precision, rates=[factor * rate for rate in cell.rates])
        for precision, factor in (("fp32", 1.0), ("bf16", 2.0))
        for cell in (DDP, FSDP)
    ]
    comparison = compared(tmp_path, cells)
    fastest = one_of(comparison, "fastest")
    assert (fastest.strategy, fastest.decided) == ("ddp", True)
    assert fastest.text == "ddp in 2 of 2 groups"
    grid = present(answer_grid(comparison))
    assert set(grid.cells("precision")) == {"fp32", "bf16"}
    assert grid.cells("fastest") == ("ddp", "ddp")
    assert grid.cells("memory") == ("fsdp", "fsdp")
    (note,) = grid.notes
    assert note in (
        "precision fp32 against bf16: 0.50x the samples/s.",
        "precision bf16 against fp32: 2.00x the samples/s.",
    )
    assert answer_grid(compared(tmp_path / "one", [DDP, FSDP])) is None


def not_finite(result: TrialResult, **first: Any) -> TrialResult:
    """The trial with a loss that is not finite from the second of twenty steps on, on rank 1."""
    changes = {"nonfinite_steps": 19, "first_nonfinite": (1, "NaN")} | first
    ranks = (*result.ranks[:-1], result.ranks[-1].model_copy(update=changes))
    return result.model_copy(update={"ranks": ranks})


def with_trials(comparison: Comparison, changed: str, **first: Any) -> Comparison:
    rows = [
        replace(row, trials=tuple(not_finite(trial, **first) for trial in row.trials))
        if row.strategy == changed
        else row
        for row in comparison.rows
    ]
    return replace(comparison, rows=tuple(rows))


def test_a_loss_that_is_not_finite_is_the_first_caution_and_never_wins(tmp_path: Path) -> None:
    finite = compared(tmp_path, [SINGLE, DDP, FSDP])
    comparison = with_trials(finite, "ddp")
    caution, fastest, memory, _ = answers(comparison)
    assert caution.question == "caution"
    assert caution.text == "ddp on 2 ranks: the loss is NaN from step 2 on (rank 1)."
    assert (fastest.strategy, memory.strategy) == ("fsdp", "fsdp")
    text = overview(comparison)
    assert text.index("loss is NaN") < text.index("Fastest")
    assert text.index("\nsingle ") < text.index("loss not finite")  # below the finite ones
    (row,) = [row for row in comparison_json(comparison)["rows"] if row["strategy"] == "ddp"]
    assert row["diverged"] == "the loss is NaN from step 2 on (rank 1)"


def test_all_trainings_without_a_finite_loss_have_no_winner(tmp_path: Path) -> None:
    comparison = with_trials(with_trials(compared(tmp_path, [SINGLE, DDP]), "ddp"), "single")
    assert "no strategy both trains as the reference" in one_of(comparison, "fastest").text
    assert not any(line.startswith("For narrower intervals") for line in next_commands(comparison))


@pytest.mark.parametrize(
    ("first", "told"),
    [
        ({"nonfinite_steps": 2, "skipped_steps": 3}, None),
        ({"nonfinite_steps": 20, "skipped_steps": 20, "first_nonfinite": (0, "infinite")},
         "the loss is infinite from step 1 on"),
        ({"nonfinite_steps": 3}, "the loss is NaN from step 2 on in 3 of 20 steps"),
        ({"nonfinite_steps": 3, "first_nonfinite": None},
         "the loss is not finite in 3 of 20 steps"),
    ],
)  # fmt: skip
def test_skipped_steps_of_fp16_are_no_divergence(
    tmp_path: Path, first: dict[str, Any], told: str | None
) -> None:
    comparison = with_trials(compared(tmp_path, [SINGLE]), "single", **first)
    assert comparison.rows[0].diverged == told


def test_what_rounding_alone_does_makes_verified_rows_the_same(tmp_path: Path) -> None:
    cells = [
        replace(SINGLE, qualities=(0.80,), twin=0.82),
        replace(DDP, qualities=(0.79,)),
        replace(FSDP, qualities=(0.84,)),
        replace(ASYNC, qualities=(0.80,)),
    ]
    comparison = compared(tmp_path, cells)
    (rounding,) = comparison.rounding
    assert (rounding.metric, rounding.cell) == ("accuracy_top1", "single")
    assert rounding.distance == pytest.approx(0.02)
    assert rounding.same == ("ddp",)
    assert one_of(comparison, "equivalent").text.endswith(
        "rounding alone changes top-1 by 2 points; single and ddp are within that"
    )
    unchanged = rounding_text(replace(rounding, distance=0.0))
    assert unchanged == "rounding alone does not change top-1; single and ddp end alike"
    shown = json.loads(overview_json(comparison))
    assert shown["rounding"][0]["same"] == ["ddp"]
    assert [row["outcomes"] for row in shown["rows"]] == [{"ok": 3}] * 4  # the twin is no repeat
    assert " ".join(overview(comparison).split()).count("rounding alone") == 1


def test_equal_qualities_end_alike_whatever_the_number_of_repeats(tmp_path: Path) -> None:
    share = 318 / 360  # the mean of five differs in its last bit
    single = replace(SINGLE, qualities=(share,) * 3, twin=share)
    fsdp = replace(FSDP, rates=(150,) * 5, qualities=(share,) * 5)
    (rounding,) = compared(tmp_path, [single, fsdp]).rounding
    assert (rounding.distance, rounding.same) == (0.0, ("fsdp",))


@pytest.mark.parametrize(
    ("others", "batch_norms", "twin", "told"),
    [
        (DDP, 20, None, True),
        (DDP, 0, None, False),
        (replace(DDP, world_size=1), 20, None, False),
        (DDP, 20, 0.95, False),  # rounding alone does as much
    ],
)
def test_verified_rows_whose_batch_norms_see_other_shares_are_told_beside_the_answer(
    tmp_path: Path, others: Cell, batch_norms: int, twin: float | None, told: bool
) -> None:
    cells = [replace(SINGLE, qualities=(0.80,), twin=twin), replace(others, qualities=(0.70,))]
    comparison = compared(tmp_path, cells)

    def normed(trial: TrialResult) -> TrialResult:
        ranks = [
            rank.model_copy(
                update={"probe": rank.probe.model_copy(update={"batch_norms": batch_norms})}
            )
            for rank in trial.ranks
            if rank.probe is not None
        ]
        return trial.model_copy(update={"ranks": tuple(ranks)})

    rows = [replace(row, trials=tuple(map(normed, row.trials))) for row in comparison.rows]
    said = one_of(replace(comparison, rows=tuple(rows)), "equivalent").text
    assert said.startswith("yes, 2 of 2")
    assert ("batch norm sees one rank's share" in said) is told


def test_nothing_is_said_of_rounding_without_a_quality_of_the_twin(tmp_path: Path) -> None:
    cells = [replace(SINGLE, qualities=(0.80,), twin=0.82), replace(DDP, qualities=(0.79,))]
    assert (
        compared(tmp_path / "1", [replace(cells[0], equivalent=None), cells[1]]).rounding[0].same
        == ()
    )
    failed = with_trials(compared(tmp_path / "2", cells), "single")
    run = load_run(tmp_path / "2" / "run")
    assert rounding_of([run], failed.rows) == ()


def test_inherited_verdicts_are_counted_apart(tmp_path: Path) -> None:
    comparison = compared(
        tmp_path,
        [
            SINGLE,
            DDP,
            replace(DDP, world_size=4, inherits="2 ranks"),
            replace(FSDP, world_size=4, inherits="2 ranks"),
        ],
    )
    text = one_of(comparison, "equivalent").text
    assert text == "yes: 2 of 4 verified, 2 inherit (ddp on 4 ranks from 2 ranks, ...)"


def test_without_single_the_first_strategy_of_the_matrix_is_the_baseline(tmp_path: Path) -> None:
    comparison = compared(tmp_path, [FSDP, DDP])
    assert comparison.baseline == "ddp"  # the experiment of the invented run: single, ddp, fsdp
    verdicts = {row.strategy: row.verdict for row in comparison.rows}
    assert verdicts == {"ddp": "baseline", "fsdp": "slower"}
