"""Time to a target: end of the epoch, training alone, and no mean over the survivors."""

from __future__ import annotations

from typing import Any

import pytest

from shardmark.core.errors import InputError
from shardmark.report.table.formats import records
from shardmark.report.table.table import Table
from shardmark.report.views.time_to_quality import TARGET_METRICS, time_to_tables
from shardmark.results.schema import Failure, Outcome, TrialResult
from tests.golden.invented import invented_trial
from tests.unit.report_compare.runs import compared, learning_trial

TOP1 = "accuracy_top1"
FAILED = invented_trial("zero-2", 2, outcome=Outcome.FAILED, failure=Failure(reason="x"))
BY_STEPS = {**learning_trial().trial, "recipe": {"steps": 20, "global_batch": 8}}


def viewed(text: str, *trials: TrialResult) -> Table:
    (table,) = time_to_tables(compared(*trials), text)
    return table


def untimed() -> TrialResult:
    """The first epoch has no window of its own."""
    trial = learning_trial(accuracies=(0.9, 0.9))
    ranks = tuple(rank.model_copy(update={"windows": rank.windows[1:]}) for rank in trial.ranks)
    return trial.model_copy(update={"ranks": ranks})


@pytest.mark.parametrize(
    ("trials", "text", "seconds", "at_least", "reason"),
    [
        # Epochs of eleven seconds on rank 1; the evaluation's three are not in it.
        ([learning_trial(accuracies=(0.5, 0.75, 0.9))], f"{TOP1}=0.7", 22.0, None, None),
        ([learning_trial(accuracies=(0.7, 0.2))], f"{TOP1}=0.7", 11.0, None, None),
        ([learning_trial()], "train_loss=0.5", 22.0, None, None),  # losses are 1, 0.5
        ([learning_trial()], f" {TOP1} = 5e-1 ", 11.0, None, None),
        (
            [learning_trial(repeat=0, seconds=9.0), learning_trial(repeat=1, seconds=11.0)],
            *(f"{TOP1}=0.7", 22.0, None, None),
        ),
        (  # the mean of the one that reached it, 11 seconds, would be too short
            [
                learning_trial(repeat=0, accuracies=(0.8, 0.8)),
                learning_trial(repeat=1, accuracies=(0.1, 0.2)),
            ],
            *(f"{TOP1}=0.7", None, (11.0 + 22.0) / 2, "not reached in 1 of 2 repeats"),
        ),
        (
            [learning_trial(losses=(None, None))],
            *("train_loss=1", None, 22.0, "not reached in 1 of 1 repeats"),
        ),
        ([learning_trial()], "map=0.1", None, None, "the metric was not recorded"),
        (
            [learning_trial(trial=BY_STEPS)],
            *(f"{TOP1}=0.7", None, None, "the recipe counts 20 steps and no epochs"),
        ),
        (
            [untimed()],
            *(f"{TOP1}=0.7", None, None, "all its steps are warm-up, which is not timed"),
        ),
    ],
)
def test_time_ends_with_the_first_epoch_that_reached_it(
    trials: list[TrialResult],
    text: str,
    seconds: float | None,
    at_least: float | None,
    reason: str | None,
) -> None:
    (line,) = records(viewed(text, *trials))
    time: dict[str, Any] = line["seconds"] or {"value": None, "low": None}
    assert (time["value"], line["more_than_seconds"]) == (seconds, at_least)
    assert line.get("missing", {}).get("seconds") == reason
    assert (time["low"] is not None) == (seconds is not None and len(trials) > 1)


def test_every_quality_with_a_direction_is_a_target() -> None:
    assert {"train_loss", "validation_loss", TOP1, "map_50"} <= set(TARGET_METRICS)
    assert not {"speedup", "staleness_mean", "samples_per_second"} & set(TARGET_METRICS)


def test_without_a_value_the_target_is_what_every_repeat_of_every_row_reached() -> None:
    """A row that failed or diverged at once sets none."""
    trials = [
        learning_trial("ddp", 2, 0, accuracies=(0.6, 0.9), losses=(1.0, 0.25)),
        learning_trial("ddp", 2, 1, accuracies=(0.8, 0.7)),
        learning_trial("fsdp", 2, 0, accuracies=(0.85, 0.1)),
        learning_trial("zero-1", 2, 0, accuracies=(None, 0.9), losses=(None, None)),
        FAILED,
    ]
    table = viewed(TOP1, *trials)
    assert table.title == "Training time to accuracy_top1 ≥ 0.8"
    assert any("ddp on 2 ranks bounds it" in note for note in table.notes)
    assert [line["reached"] for line in records(table)] == [2, 1, 1]
    assert viewed("train_loss", *trials).title == "Training time to train_loss ≤ 0.5"


def test_the_table_marks_what_is_only_a_bound() -> None:
    table = viewed(
        f"{TOP1}=0.7",
        *(learning_trial("ddp", 2, repeat) for repeat in (0, 1)),
        learning_trial("fsdp", 2, 0, accuracies=(0.2, 0.7)),
        learning_trial("fsdp", 2, 1, accuracies=(0.2, 0.6)),
        learning_trial("zero-1", 2, 0, accuracies=()),
        FAILED,
    )
    columns, rows = table.for_people()
    titles = ["strategy", "ranks", "time to", "after", "reached", "best"]
    assert [column.title for column in columns] == titles
    assert rows == [
        ["ddp", "2", "22.00 ±0.00", "2", "2 of 2", "0.7500"],
        ["fsdp", "2", "> 22.00", "2", "1 of 2", "0.6000"],
        ["zero-1", "2", "-", "-", "0 of 1", "-"],
    ]
    text = " ".join(table.notes)
    for said in ("> : some repeat", "zero-2 on 2 ranks (1 x failed)", "no epoch was recorded"):
        assert said in text
    missed = records(table)[1]["repeats"][1]
    assert (missed["epoch"], missed["seconds"], missed["best"]) == (None, 22.0, 0.6)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'' is no loss or quality; allowed are train_loss"),
        (f"{TOP1}=80", "'80'; must be a fraction from 0 to 1"),
        (f"{TOP1}=high", "'high'; must be a fraction"),
        (f"{TOP1}=nan", "must be a fraction"),
        ("train_loss=-1", "must be a number from 0"),
        ("train_loss=inf", "must be a number from 0"),
        ("map", "no trial has map by epoch; recorded by epoch: train_loss, accuracy_top1"),
    ],
)
def test_bad_input_names_what_is_allowed(text: str, message: str) -> None:
    with pytest.raises(InputError) as error:
        viewed(text, learning_trial())
    assert message in str(error.value)
    assert str(error.value).startswith("--time-to")
