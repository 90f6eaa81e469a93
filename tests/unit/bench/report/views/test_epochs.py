"""Epoch by epoch, and the time to a target: training alone, on the slowest rank."""

from __future__ import annotations

from typing import Any

import pytest

from shardmark.base.errors import InputError
from shardmark.base.results.schema import Failure, Outcome, TrialResult
from shardmark.base.table.formats import records
from shardmark.base.table.table import Table
from shardmark.bench.analysis.compare.epochs import epochs_of, training_seconds
from shardmark.bench.report.views.epochs import epochs_tables, time_to_tables
from tests.golden.invented import compare_trials, detection_trial, invented_trial, trained_trial

FAILED: dict[str, Any] = {"outcome": Outcome.FAILED, "failure": Failure(reason="x")}
TOP1 = "accuracy_top1"
BY_STEPS = {**trained_trial().trial, "recipe": {"steps": 20, "global_batch": 8}}


def by_epoch(*trials: TrialResult) -> Table:
    (table,) = epochs_tables(compare_trials(*trials))
    return table


def time_to(text: str, *trials: TrialResult) -> Table:
    (table,) = time_to_tables(compare_trials(*trials), text)
    return table


def changed(trial: TrialResult, **fields: Any) -> TrialResult:
    ranks = tuple(rank.model_copy(update=fields) for rank in trial.ranks)
    return trial.model_copy(update={"ranks": ranks})


def test_epoch_seconds_are_those_of_the_slowest_rank() -> None:
    """The slowest rank's, with the warm-up in the first; of all windows where it has several."""
    trial = detection_trial(seconds=10.0)
    assert training_seconds(trial, 0) == pytest.approx(11.0)
    assert training_seconds(trial, 1) == 11.0
    first, second = trial.ranks[0].windows
    late = changed(trial, windows=(second.model_copy(update={"first_step": 12}),))
    assert str(training_seconds(late, 0)).startswith("all its steps are warm-up")
    assert str(training_seconds(late, 1)).startswith("some of its steps are warm-up")
    assert training_seconds(changed(trial, epochs=()), 0) == "rank 0 did not record this epoch"
    middle = second.first_step + 1
    halves = (
        second.model_copy(update={"end_step": middle, "window_seconds": 4.0}),
        second.model_copy(update={"first_step": middle, "window_seconds": 5.0}),
        # steps that were added later are in none
        second.model_copy(update={"first_step": second.end_step, "end_step": second.end_step + 9}),
    )
    cut = changed(trial, windows=(first, *halves))
    assert training_seconds(cut, 0) == training_seconds(changed(trial, windows=(first,)), 0)
    assert training_seconds(cut, 1) == 9.0


def test_epochs_are_means_over_the_repeats_that_ended_ok() -> None:
    repeats = [detection_trial(repeat=n, seconds=s) for n, s in enumerate((10.0, 12.0))]
    table = by_epoch(*repeats, detection_trial(repeat=2, **FAILED))
    first, second = records(table)
    seconds = second["epoch_seconds"]
    assert (seconds["value"], seconds["n"]) == (12.0, 2)
    assert seconds["low"] is not None
    assert first["missing"] == {"map_50": "it is not a finite number"}
    notes = " ".join(table.notes)
    assert "ddp on 2 ranks (1 x failed)" in notes
    assert "includes its 4 warm-up steps" in notes


def test_missing_epochs_have_a_reason() -> None:
    by_steps = detection_trial(recipe={"epochs": None, "steps": 20})
    for trial, reason in (
        (by_steps, "the recipe counts 20 steps and no epochs"),
        (detection_trial(**FAILED), "no trial ended ok"),
    ):
        epochs = epochs_of(compare_trials(trial).rows[0])
        assert (epochs.epochs, epochs.reason) == ((), reason)
    assert by_epoch(by_steps).notes == ("No epochs: the recipe counts 20 steps and no epochs.",)


def test_table_has_a_row_for_each_epoch() -> None:
    table = by_epoch(detection_trial())
    columns, rows = table.for_people()
    assert [column.key for column in columns] == [
        *("label", "ranks", "epoch", "train_loss", "epoch_seconds", "elapsed_seconds"),
        *("evaluation_seconds", "map"),
    ]
    assert rows[0] == ["ddp", "2", "1", "0.7500", "11.0", "11.0", "3.00", "0.1250"]
    assert rows[1] == ["ddp", "2", "2", "0.5000", "11.0", "22.0", "3.00", "0.2500"]


def untimed() -> TrialResult:
    """The first epoch has no window of its own."""
    trial = trained_trial(accuracies=(0.9, 0.9))
    return changed(trial, windows=trial.ranks[0].windows[1:])


@pytest.mark.parametrize(
    ("trials", "text", "seconds", "at_least", "reason"),
    [
        # Epochs of eleven seconds on rank 1; the evaluation's three are not in it.
        ([trained_trial(accuracies=(0.5, 0.75, 0.9))], f"{TOP1}=0.7", 22.0, None, None),
        ([trained_trial(accuracies=(0.7, 0.2))], f"{TOP1}=0.7", 11.0, None, None),
        ([trained_trial()], "train_loss=0.5", 22.0, None, None),  # losses are 1, 0.5
        ([trained_trial()], f" {TOP1} = 5e-1 ", 11.0, None, None),
        (
            [trained_trial(repeat=0, seconds=9.0), trained_trial(repeat=1, seconds=11.0)],
            *(f"{TOP1}=0.7", 22.0, None, None),
        ),
        (  # the mean of the one that reached it, 11 seconds, would be too short
            [
                trained_trial(repeat=0, accuracies=(0.8, 0.8)),
                trained_trial(repeat=1, accuracies=(0.1, 0.2)),
            ],
            *(f"{TOP1}=0.7", None, (11.0 + 22.0) / 2, "not reached in 1 of 2 repeats"),
        ),
        (
            [trained_trial(losses=(None, None))],
            *("train_loss=1", None, 22.0, "not reached in 1 of 1 repeats"),
        ),
        ([trained_trial()], "map=0.1", None, None, "the metric was not recorded"),
        (
            [trained_trial(trial=BY_STEPS)],
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
    (line,) = records(time_to(text, *trials))
    time: dict[str, Any] = line["seconds"] or {"value": None, "low": None}
    assert (time["value"], line["more_than_seconds"]) == (seconds, at_least)
    assert line.get("missing", {}).get("seconds") == reason
    assert (time["low"] is not None) == (seconds is not None and len(trials) > 1)


def test_the_default_target_is_the_best_value_that_every_repeat_reached() -> None:
    """A row that failed or diverged at once sets none."""
    trials = [
        trained_trial("ddp", 2, 0, accuracies=(0.6, 0.9), losses=(1.0, 0.25)),
        trained_trial("ddp", 2, 1, accuracies=(0.8, 0.7)),
        trained_trial("fsdp", 2, 0, accuracies=(0.85, 0.1)),
        trained_trial("zero-1", 2, 0, accuracies=(None, 0.9), losses=(None, None)),
        invented_trial("zero-2", 2, **FAILED),
    ]
    table = time_to(TOP1, *trials)
    assert table.title == "Training time to accuracy_top1 ≥ 0.8"
    assert any("ddp on 2 ranks bounds it" in note for note in table.notes)
    assert [line["reached"] for line in records(table)] == [2, 1, 1]
    assert time_to("train_loss", *trials).title == "Training time to train_loss ≤ 0.5"


def test_the_table_marks_lower_bounds() -> None:
    table = time_to(
        f"{TOP1}=0.7",
        *(trained_trial("ddp", 2, repeat) for repeat in (0, 1)),
        trained_trial("fsdp", 2, 0, accuracies=(0.2, 0.7)),
        trained_trial("fsdp", 2, 1, accuracies=(0.2, 0.6)),
        trained_trial("zero-1", 2, 0, accuracies=()),
    )
    columns, rows = table.for_people()
    titles = ["strategy", "ranks", "time to", "after", "reached", "best"]
    assert [column.title for column in columns] == titles
    assert rows == [
        ["ddp", "2", "22.0 ±0", "2", "2 of 2", "0.7500"],
        ["fsdp", "2", "> 22.0", "2", "1 of 2", "0.6000"],
        ["zero-1", "2", "-", "-", "-", "-"],
    ]
    assert any(note.startswith("> : a repeat") for note in table.notes)
    missed = records(table)[1]["repeats"][1]
    assert (missed["epoch"], missed["seconds"], missed["best"]) == (None, 22.0, 0.6)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'' is no loss or quality; allowed are train_loss"),
        ("speedup=1", "'speedup' is no loss or quality"),
        (f"{TOP1}=80", "'80'; must be a fraction from 0 to 1"),
        (f"{TOP1}=high", "'high'; must be a fraction"),
        (f"{TOP1}=nan", "must be a fraction"),
        ("train_loss=inf", "must be a number from 0"),
        ("map", "no trial has map by epoch; recorded by epoch: train_loss, accuracy_top1"),
    ],
)
def test_bad_input_names_what_is_allowed(text: str, message: str) -> None:
    with pytest.raises(InputError, match=r"^--view time-to") as error:
        time_to(text, trained_trial())
    assert message in str(error.value)


def with_own_metric(values: tuple[float, float], better: str | None = "higher") -> TrialResult:
    """Two epochs with a metric that the user's task defines."""
    trial = detection_trial()
    made = changed(trial, better={"recall_at_5": better} if better else {})
    ranks = tuple(
        rank.model_copy(
            update={
                "epochs": tuple(
                    epoch.model_copy(update={"quality": {"recall_at_5": value}})
                    for epoch, value in zip(rank.epochs, values, strict=True)
                )
            }
        )
        for rank in made.ranks
    )
    summary = next(s for s in trial.metrics.values() if s is not None)
    metrics = {**trial.metrics, "recall_at_5": summary.model_copy(update={"value": values[-1]})}
    return made.model_copy(update={"ranks": ranks, "metrics": metrics})


def test_a_task_s_own_metric_is_shown_by_epoch_and_has_a_time_to_target() -> None:
    trial = with_own_metric((0.2, 0.6))
    table = by_epoch(trial)
    (column,) = [column for column in table.columns if column.key == "recall_at_5"]
    assert column.shown_to == "all"
    (row,) = records(time_to("recall_at_5=0.5", trial))
    assert (row["reached"], row["repeats"][0]["epoch"]) == (1, 2)
    (row,) = records(time_to("recall_at_5=0.15", trial))
    assert row["repeats"][0]["epoch"] == 1
    with pytest.raises(InputError, match=r"does not say which values .* better = "):
        time_to("recall_at_5=0.5", with_own_metric((0.2, 0.6), better=None))
