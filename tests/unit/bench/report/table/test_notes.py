"""Notes below the table are short, have cautions first, and appear only where they are due."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from shardmark.base.results.schema import Failure, Outcome, TrialResult
from shardmark.base.results.store import Damaged
from shardmark.bench.report.answers.overview import overview
from shardmark.bench.report.table.comparison import WIDE
from shardmark.bench.report.table.notes import MOST_LINES, NoteKind, brief_notes, notes_of
from tests.golden.invented import compare_trials, invented_rank, invented_trial


def texts(*trials: TrialResult, kind: NoteKind) -> list[str]:
    return [note.text for note in notes_of(compare_trials(*trials)) if note.kind is kind]


def pair(repeats: int, *, synthetic: bool = False, seed: int | None = None) -> list[TrialResult]:
    """`seed` of the first repeat; each other one has the next."""
    trials = [
        invented_trial(strategy, size, repeat, synthetic=synthetic)
        for strategy, size in (("single", 1), ("ddp", 2))
        for repeat in range(repeats)
    ]
    for trial in trials:
        if seed is not None:
            trial.trial["recipe"]["seed"] = seed + trial.repeat
    return trials


def test_cautions_come_first_in_the_order_of_the_kinds() -> None:
    failure = Failure(reason="NCCL is missing", remedy="install it")
    varied = {"workload.model": "vit_cifar", "recipe.global_batch": 64}
    failed = invented_trial("fsdp", outcome=Outcome.UNAVAILABLE, failure=failure, varied=varied)
    damaged = (Damaged(Path("x"), "is not whole JSON"),)
    comparison = replace(compare_trials(*pair(2), failed), damaged=damaged, missing=("y", "z"))
    notes = notes_of(comparison)
    order = list(NoteKind)
    assert [note.kind for note in notes] == sorted((n.kind for n in notes), key=order.index)
    first, second, third, *_ = (note.text for note in notes)
    for part in ("fsdp on 2 ranks, vit_cifar, recipe.global_batch=64", "1 x unavailable: NCCL is"):
        assert part in first
    assert "x: is not whole JSON" in second
    assert "2 trials" in third


@pytest.mark.parametrize(
    ("trials", "shared_seed", "interval"),
    [
        pytest.param(pair(3), True, "3 repeats", id="no seed is an axis"),
        pytest.param(pair(2, seed=3), False, "2 repeats", id="a seed a repeat"),
        pytest.param(pair(1), True, None, id="one repeat shows no interval"),
        pytest.param(pair(2, synthetic=True), False, "2 repeats", id="its quality means nothing"),
    ],
)
def test_repeats_and_shared_seeds_have_notes(
    trials: list[TrialResult], shared_seed: bool, interval: str | None
) -> None:
    notes = " ".join(texts(*trials, kind=NoteKind.REPEATS))
    assert ("from one seed" in notes) is shared_seed
    assert ("±" in notes) is (interval is not None)
    assert (interval or "") in notes


def test_only_a_missing_rate_or_baseline_has_a_note() -> None:
    silent = {"samples_per_second": None, "mfu": None}
    (gap,) = texts(invented_trial(metrics=silent), kind=NoteKind.GAP)
    assert "ddp on 2 ranks: no samples_per_second" in gap
    (note,) = texts(invented_trial(), kind=NoteKind.RELATION)
    assert note.startswith("No speed-up where `single` did not run")
    script = invented_trial(strategy="script")
    script.trial["workload"] = {"name": "script", "command": "train.py"}
    assert texts(script, kind=NoteKind.RELATION) == [], "a script has no strategy `single`"


def test_intended_numerics_have_a_note() -> None:
    told = {"mathematics": ["gradients are reduced in bf16"]}
    ranks = tuple(invented_rank(rank).model_copy(update={"settings": told}) for rank in range(2))
    trial = invented_trial(strategy_options={"compress": "bf16"}, ranks=ranks)
    (note,) = texts(trial, kind=NoteKind.OTHER_NUMERICS)
    assert note == "ddp (compress=bf16): by its own definition, gradients are reduced in bf16."
    others = [invented_trial(name, ranks=ranks) for name in ("zero-1", "zero-2")]
    (note,) = texts(*others, kind=NoteKind.OTHER_NUMERICS)
    assert note == "zero-1 and zero-2: by their own definition, gradients are reduced in bf16."


def test_a_screen_has_few_lines_of_notes_and_every_failure() -> None:
    failed = [
        invented_trial(
            "zero-1", 2, repeat=repeat, outcome=Outcome.FAILED, metrics={},
            failure=Failure(reason=f"reason {repeat} " + "x" * 90),
        )
        for repeat in range(9)
    ]  # fmt: skip
    healthy = pair(3)
    assert len(brief_notes(compare_trials(*healthy), 80)) <= MOST_LINES
    assert brief_notes(compare_trials(*healthy), 5), "a screen narrower than the indent"
    comparison = compare_trials(*healthy, *failed)
    brief = brief_notes(comparison, 80)
    assert all(any(f"reason {repeat} " in text for text in brief) for repeat in range(9))
    omitted = len(notes_of(comparison)) - len(brief) + 1
    assert brief[-1].startswith(f"{omitted} more note")
    shown = overview(comparison)
    assert brief[-1] in shown
    assert "more note" not in overview(comparison, columns=WIDE)
