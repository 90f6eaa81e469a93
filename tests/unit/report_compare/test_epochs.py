"""Seconds of an epoch: training alone, on the slowest rank, the warm-up in the first."""

from __future__ import annotations

from typing import Any

import pytest

from shardmark.analysis.compare.epochs import epochs_of, training_seconds
from shardmark.report.table.formats import records
from shardmark.report.table.table import Table
from shardmark.report.views.epochs import epochs_tables
from shardmark.results.schema import Failure, Outcome, TrialResult
from tests.unit.report_compare.runs import compared
from tests.unit.studies.runs import STEPS, detection_trial

FAILED: dict[str, Any] = {"outcome": Outcome.FAILED, "failure": Failure(reason="x")}


def viewed(*trials: TrialResult) -> Table:
    (table,) = epochs_tables(compared(*trials))
    return table


def changed(trial: TrialResult, **fields: Any) -> TrialResult:
    ranks = tuple(rank.model_copy(update=fields) for rank in trial.ranks)
    return trial.model_copy(update={"ranks": ranks})


def test_seconds_are_the_slowest_ranks_with_the_warm_up_in_the_first_epoch() -> None:
    trial = detection_trial(seconds=10.0)
    assert training_seconds(trial, 0) == pytest.approx(10.0)
    assert training_seconds(trial, 1) == 11.0


def test_an_epoch_inside_the_warm_up_has_no_seconds() -> None:
    trial = detection_trial()
    second = trial.ranks[0].windows[1]
    late = changed(trial, windows=(second.model_copy(update={"first_step": STEPS + 2}),))
    assert str(training_seconds(late, 0)).startswith("all its steps are warm-up")
    assert str(training_seconds(late, 1)).startswith("some of its steps are warm-up")
    assert training_seconds(changed(trial, epochs=()), 0) == "rank 0 did not record this epoch"


def test_an_epoch_of_several_windows_has_the_seconds_of_all() -> None:
    """Long epochs are measured in stretches; steps that were added later are in none."""
    trial = detection_trial(seconds=10.0)
    first, second = trial.ranks[0].windows
    middle = second.first_step + 1
    halves = (
        second.model_copy(update={"end_step": middle, "window_seconds": 4.0}),
        second.model_copy(update={"first_step": middle, "window_seconds": 5.0}),
        second.model_copy(update={"first_step": second.end_step, "end_step": second.end_step + 9}),
    )
    cut = changed(trial, windows=(first, *halves))
    assert training_seconds(cut, 0) == training_seconds(changed(trial, windows=(first,)), 0)
    assert training_seconds(cut, 1) == 9.0


def test_epochs_are_means_over_the_repeats_that_ended_ok() -> None:
    repeats = [detection_trial(repeat=n, seconds=s) for n, s in enumerate((10.0, 12.0))]
    table = viewed(*repeats, detection_trial(repeat=2, **FAILED))
    first, second = records(table)
    seconds = second["epoch_seconds"]
    assert (seconds["value"], seconds["n"]) == (12.0, 2)
    assert seconds["low"] is not None
    assert first["missing"] == {"map_50": "it is not a finite number"}
    notes = " ".join(table.notes)
    assert "ddp on 2 ranks (1 x failed)" in notes
    assert "includes its 4 warm-up steps" in notes


def test_why_there_is_no_epoch() -> None:
    by_steps = detection_trial(recipe={"epochs": None, "steps": 20})
    for trial, reason in (
        (by_steps, "the recipe counts 20 steps and no epochs"),
        (detection_trial(**FAILED), "no trial ended ok"),
    ):
        epochs = epochs_of(compared(trial).rows[0])
        assert (epochs.epochs, epochs.reason) == ((), reason)
    assert viewed(by_steps).notes == ("No epochs: the recipe counts 20 steps and no epochs.",)


def test_table_and_programs() -> None:
    table = viewed(detection_trial())
    columns, rows = table.for_people()
    assert [column.key for column in columns] == [
        *("label", "ranks", "epoch", "train_loss", "epoch_seconds", "elapsed_seconds"),
        *("evaluation_seconds", "map"),
    ]
    assert rows[0] == ["ddp", "2", "1", "0.7500", "10.00", "10.00", "3.000", "0.1250"]
    assert rows[1] == ["ddp", "2", "2", "0.5000", "11.00", "21.00", "3.000", "0.2500"]
    first, second = records(table)
    assert (first["strategy"], first["world_size"], first["epoch"]) == ("ddp", 2, 1)
    assert (second["map"]["value"], second["map_50"]) == (0.25, None)
