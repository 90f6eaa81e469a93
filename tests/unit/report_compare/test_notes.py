"""What is said below the table: short, cautions first, and only where it is due."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from shardmark.report.table.notes import NoteKind, notes_of
from shardmark.results.schema import CheckpointRecord, Failure, Outcome, Summary, TrialResult
from shardmark.results.store import Damaged
from tests.golden.invented import invented_trial
from tests.unit.report_compare.runs import compared, learning_trial


def texts(*trials: TrialResult, kind: NoteKind | None = None) -> list[str]:
    return [note.text for note in notes_of(compared(*trials)) if kind in (None, note.kind)]


def pair(repeats: int, *, synthetic: bool = False) -> list[TrialResult]:
    return [
        invented_trial(strategy, size, repeat, synthetic=synthetic)
        for strategy, size in (("single", 1), ("ddp", 2))
        for repeat in range(repeats)
    ]


def with_seed(trial: TrialResult, seed: int) -> TrialResult:
    recipe = {"recipe": {**trial.trial["recipe"], "seed": seed}}
    return trial.model_copy(update={"trial": trial.trial | recipe})


def with_checkpoints(trial: TrialResult, count: int, seconds: float) -> TrialResult:
    """Rank 1's windows are the longest: two of `seconds` + 1."""
    written = tuple(
        CheckpointRecord(step=step, seconds=seconds, written_bytes=10) for step in range(count)
    )
    ranks = tuple(rank.model_copy(update={"checkpoints": written}) for rank in trial.ranks)
    metrics = trial.metrics | {"checkpoint_seconds": Summary(value=seconds, over="mean")}
    return trial.model_copy(update={"ranks": ranks, "metrics": metrics})


@pytest.mark.parametrize(("repeats", "said"), [(1, []), (3, ["3 repeats"])])
def test_repeats(repeats: int, said: list[str]) -> None:
    notes = texts(*pair(repeats), kind=NoteKind.REPEATS)
    assert all(any(text in note for note in notes) for text in said)
    assert bool(notes) is bool(said)


def test_cautions_come_first_in_the_order_of_the_kinds() -> None:
    failure = Failure(reason="NCCL is missing", remedy="install it")
    failed = invented_trial(
        "fsdp",
        outcome=Outcome.UNAVAILABLE,
        failure=failure,
        varied={"workload.model": "resnet18", "recipe.global_batch": 64},
    )
    damaged = (Damaged(Path("x"), "is not whole JSON"),)
    comparison = replace(compared(*pair(2), failed), damaged=damaged, missing=("y", "z"))
    notes = notes_of(comparison)
    order = list(NoteKind)
    assert [note.kind for note in notes] == sorted((n.kind for n in notes), key=order.index)
    first, second, third, *_ = (note.text for note in notes)
    assert first == (
        "fsdp on 2 ranks, resnet18, recipe.global_batch=64: 1 x unavailable: NCCL is missing;"
        " install it"
    )
    assert second == "Damaged, left out: x: is not whole JSON"
    assert third == "Begun without a result: y; z."


def test_shared_seeds_are_told() -> None:
    def told(*trials: TrialResult) -> bool:
        return any("share one seed" in text for text in texts(*trials))

    trials = pair(2)
    assert told(*trials)
    assert told(*(with_seed(trial, 5) for trial in trials))
    assert not told(*(with_seed(trial, trial.repeat) for trial in trials))
    assert not told(*pair(1)), "one repeat shows no interval"
    assert not told(*pair(2, synthetic=True)), "its quality means nothing"


def test_a_missing_rate_or_baseline_is_told_and_other_gaps_are_not() -> None:
    silent = {"samples_per_second": None, "mfu": None}
    assert texts(invented_trial(metrics=silent), kind=NoteKind.GAP) == [
        "ddp on 2 ranks: no samples_per_second: not recorded."
    ]
    (note,) = texts(invented_trial(), kind=NoteKind.RELATION)
    assert note.startswith("No speed-up: invented has no `single`")


def test_what_checkpoints_add_names_the_dearest_row() -> None:
    assert texts(learning_trial(), kind=NoteKind.CHECKPOINTS) == []
    cheap = with_checkpoints(learning_trial("ddp", seconds=9.0), 2, 0.25)
    dear = with_checkpoints(learning_trial("fsdp", seconds=9.0), 4, 1.0)
    (text,) = texts(cheap, dear, kind=NoteKind.CHECKPOINTS)
    assert "20 % to the time of fsdp" in text
