"""Time to a target: end of the epoch, training alone, and no mean over the survivors."""

from __future__ import annotations

import pytest

from shardmark.analysis.compare.time_to_quality import (
    TARGET_METRICS,
    TimeTo,
    common_target,
    time_to_quality,
)
from shardmark.core.errors import InputError
from shardmark.report.table.formats import records
from shardmark.report.table.table import Table
from shardmark.report.views.time_to_quality import time_to_tables
from shardmark.results.schema import Failure, Outcome, TrialResult
from tests.golden.invented import invented_trial
from tests.unit.report_compare.runs import compared, learning_trial

TOP1 = "accuracy_top1"


def of(*trials: TrialResult, metric: str = TOP1, target: float = 0.7) -> TimeTo:
    (row,) = compared(*trials).rows
    return time_to_quality(row, metric, target)


def viewed(text: str, *trials: TrialResult) -> Table:
    (table,) = time_to_tables(compared(*trials), text)
    return table


def test_time_ends_with_the_epoch_on_the_slowest_rank() -> None:
    """Two epochs of eleven seconds on rank 1; the evaluation's three are not in it."""
    found = of(learning_trial(accuracies=(0.5, 0.75, 0.9)))
    (reach,) = found.repeats
    assert (reach.epoch, reach.seconds, reach.trained_seconds) == (2, 22.0, 33.0)
    assert (reach.best, reach.reason) == (0.9, None)
    assert found.estimate is not None
    assert (found.estimate.value, found.estimate.low) == (22.0, None)
    assert found.reason is None
    assert found.at_least_seconds is None


def test_the_first_epoch_counts_even_if_a_later_one_is_worse() -> None:
    assert of(learning_trial(accuracies=(0.7, 0.2))).repeats[0].epoch == 1


@pytest.mark.parametrize(("metric", "target", "epoch"), [("train_loss", 0.5, 2), (TOP1, 0.5, 1)])
def test_direction_is_the_catalogue_s(metric: str, target: float, epoch: int) -> None:
    """Losses are 1, 0.5: lower is better, and equal is reached."""
    assert of(learning_trial(), metric=metric, target=target).repeats[0].epoch == epoch


def test_every_quality_with_a_direction_is_a_target() -> None:
    assert {"train_loss", "validation_loss", TOP1, "map_50"} <= set(TARGET_METRICS)
    assert not {"speedup", "staleness_mean", "samples_per_second"} & set(TARGET_METRICS)


def test_mean_has_an_interval_over_the_repeats() -> None:
    found = of(learning_trial(repeat=0, seconds=9.0), learning_trial(repeat=1, seconds=11.0))
    assert found.seconds_by_repeat == {0: 20.0, 1: 24.0}
    assert found.estimate is not None
    assert (found.estimate.value, found.estimate.n) == (22.0, 2)
    assert found.estimate.low is not None


def test_a_repeat_that_missed_it_leaves_no_mean_but_a_bound() -> None:
    """The mean of the one that reached it, 11 seconds, would be too short."""
    found = of(
        learning_trial(repeat=0, accuracies=(0.8, 0.8)),
        learning_trial(repeat=1, accuracies=(0.1, 0.2)),
    )
    assert found.estimate is None
    assert found.reached == 1
    assert found.reason == "not reached in 1 of 2 repeats"
    assert found.at_least_seconds == (11.0 + 22.0) / 2
    assert found.seconds_by_repeat == {0: 11.0}


def test_a_diverging_repeat_missed_it() -> None:
    diverged = learning_trial(losses=(None, None))
    found = of(diverged, metric="train_loss", target=1.0)
    assert found.repeats[0].best is None
    assert found.reason == "not reached in 1 of 1 repeat"
    assert found.at_least_seconds == 22.0


def test_what_was_never_recorded_was_not_missed() -> None:
    found = of(learning_trial(), metric="map", target=0.1)
    assert found.reason == "the metric was not recorded"
    assert found.at_least_seconds is None
    assert found.reached == 0


def test_reasons_where_there_is_no_epoch_or_no_trial() -> None:
    steps = {**learning_trial().trial, "recipe": {"steps": 20, "global_batch": 8}}
    by_steps = of(learning_trial(trial=steps))
    assert by_steps.reason == "the recipe counts 20 steps and no epochs"
    failed = of(invented_trial(outcome=Outcome.FAILED, failure=Failure(reason="x")))
    assert failed.reason == "no trial ended ok"
    assert failed.repeats == ()
    assert failed.at_least_seconds is None


def test_an_untimed_epoch_is_no_time() -> None:
    trial = learning_trial(accuracies=(0.9, 0.9))
    ranks = tuple(rank.model_copy(update={"windows": rank.windows[1:]}) for rank in trial.ranks)
    found = of(trial.model_copy(update={"ranks": ranks}))
    assert found.repeats[0].epoch == 1
    assert found.estimate is None
    assert found.reason == "all its steps are warm-up, which is not timed"
    assert found.at_least_seconds is None


def test_common_target_is_what_every_repeat_of_every_row_reached() -> None:
    trials = [
        learning_trial("ddp", 2, 0, accuracies=(0.6, 0.9)),
        learning_trial("ddp", 2, 1, accuracies=(0.8, 0.7)),
        learning_trial("fsdp", 2, 0, accuracies=(0.85, 0.1)),
        invented_trial("zero-2", 2, outcome=Outcome.FAILED, failure=Failure(reason="x")),
    ]
    rows = compared(*trials).rows
    target = common_target(rows, TOP1)
    assert target == 0.8
    found = [time_to_quality(row, TOP1, target) for row in rows if row.ok_trials]
    assert all(one.estimate is not None for one in found)
    assert common_target(rows, "train_loss") == 0.5
    assert common_target(rows, "map") is None
    assert common_target([], TOP1) is None


def test_a_row_that_diverged_at_once_sets_no_target() -> None:
    """Only a repeat with a finite value can have reached anything."""
    rows = compared(
        learning_trial("ddp", 2, losses=(0.5, 0.25)),
        learning_trial("fsdp", 2, 0, losses=(None, None)),
        learning_trial("fsdp", 2, 1, losses=(0.9, 0.8)),
    ).rows
    assert common_target(rows, "train_loss") == 0.25


def test_table_marks_what_is_only_a_bound() -> None:
    table = viewed(
        f"{TOP1}=0.7",
        learning_trial("ddp", 2, 0),
        learning_trial("ddp", 2, 1),
        learning_trial("fsdp", 2, 0, accuracies=(0.2, 0.7)),
        learning_trial("fsdp", 2, 1, accuracies=(0.2, 0.6)),
        invented_trial("zero-2", 2, outcome=Outcome.FAILED, failure=Failure(reason="x")),
    )
    assert table.title == "Training time to accuracy_top1 ≥ 0.7"
    columns, rows = table.for_people()
    assert [column.title for column in columns] == [
        *("strategy", "ranks", "time to", "after", "reached", "best")
    ]
    assert rows == [
        ["ddp", "2", "22.00 ±0.00", "2", "2 of 2", "0.7500"],
        ["fsdp", "2", "> 22.00", "2", "1 of 2", "0.6000"],
    ]
    text = " ".join(table.notes)
    assert "> : some repeat never reached the target." in text
    assert "nothing is interpolated" in text
    assert "Left out, not ok: zero-2 on 2 ranks (1 x failed)." in text


def test_without_a_value_the_target_is_computed_and_says_by_whom() -> None:
    table = viewed(
        "train_loss",
        learning_trial("ddp", 2, losses=(1.0, 0.25)),
        learning_trial("fsdp", 2, losses=(1.0, 0.5)),
    )
    assert table.title == "Training time to train_loss ≤ 0.5"
    text = " ".join(table.notes)
    assert "fsdp on 2 ranks bounds it" in text
    assert "> :" not in text
    assert "One repeat: no interval." in text


def test_a_row_without_the_metric_says_why() -> None:
    table = viewed(f"{TOP1}=0.1", learning_trial(), learning_trial("fsdp", 2, accuracies=()))
    assert table.cells("time to") == ("11.00", "-")
    assert "Not known: no epoch was recorded (fsdp on 2 ranks)." in table.notes


def test_programs_get_every_repeat() -> None:
    ddp, fsdp = records(
        viewed(
            f"{TOP1}=0.7",
            learning_trial("ddp", 2, 0),
            learning_trial("fsdp", 2, 0, accuracies=(0.1, 0.2)),
        )
    )
    assert (ddp["metric"], ddp["target"]) == (TOP1, 0.7)
    assert (ddp["seconds"]["value"], ddp["seconds"]["unit"]) == (22.0, "seconds")
    assert (fsdp["seconds"], fsdp["more_than_seconds"]) == (None, 22.0)
    assert fsdp["missing"] == {"seconds": "not reached in 1 of 1 repeat"}
    assert fsdp["repeats"] == [
        {"repeat": 0, "epoch": None, "seconds": None, "best": 0.2, "reason": "not reached"}
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("speed=1", "'speed' is no loss or quality; allowed are train_loss"),
        ("samples_per_second=1", "is no loss or quality"),
        ("", "'' is no loss or quality"),
        (f"{TOP1}=80", "'80'; must be a fraction from 0 to 1"),
        (f"{TOP1}=", "''; must be a fraction from 0 to 1"),
        (f"{TOP1}=high", "'high'; must be a fraction"),
        (f"{TOP1}=nan", "must be a fraction"),
        ("train_loss=-1", "must be a number from 0"),
        ("train_loss=inf", "must be a number from 0"),
        ("map", "no trial has map by epoch; recorded by epoch: train_loss, accuracy_top1"),
    ],
)
def test_bad_input_names_what_is_allowed(text: str, message: str) -> None:
    with pytest.raises(InputError) as found:
        viewed(text, learning_trial())
    assert message in str(found.value)
    assert str(found.value).startswith("--time-to")


def test_a_value_may_have_blanks_and_an_exponent() -> None:
    assert viewed(" train_loss = 5e-1 ", learning_trial()).values("target") == (0.5,)
