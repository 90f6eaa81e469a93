"""Seconds of an epoch: training alone, on the slowest rank, the warm-up in the first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardmark.analysis.compare.comparison import Comparison, compare
from shardmark.analysis.compare.epochs import epochs_of, training_seconds
from shardmark.report.table.formats import records
from shardmark.report.views.epochs import epochs_tables
from shardmark.results.schema import Failure, Outcome, TrialResult
from shardmark.results.store import StoredRun
from tests.unit.studies.runs import STEPS, detection_trial


def compared(*trials: TrialResult) -> Comparison:
    return compare([StoredRun(path=Path("run"), trials=trials)])


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
    assert training_seconds(late, 0) == "all its steps are warm-up, which is not timed"
    assert training_seconds(late, 1) == "some of its steps are warm-up, which is not timed"
    assert training_seconds(changed(trial, epochs=()), 0) == "rank 0 did not record this epoch"


def test_epochs_are_means_over_the_repeats_that_ended_ok() -> None:
    failed = detection_trial(repeat=2, outcome=Outcome.FAILED, failure=Failure(reason="x"))
    comparison = compared(
        detection_trial(repeat=0, seconds=10.0), detection_trial(repeat=1, seconds=12.0), failed
    )
    found = epochs_of(comparison.rows[0])
    assert [epoch.number for epoch in found.epochs] == [1, 2]
    seconds = found.epochs[1].metrics["epoch_seconds"]
    assert seconds is not None
    assert (seconds.value, seconds.n) == (12.0, 2)
    assert seconds.low is not None
    assert found.epochs[0].metrics["map_50"] is None
    assert found.epochs[0].missing == {"map_50": "it is not a finite number"}
    (table,) = epochs_tables(comparison)
    assert "Left out, not ok: ddp on 2 ranks (1 x failed)." in table.notes
    assert any("includes its 4 warm-up steps" in note for note in table.notes)


def test_a_recipe_of_steps_has_no_epochs() -> None:
    trial = detection_trial(recipe={"epochs": None, "steps": 20})
    found = epochs_of(compared(trial).rows[0])
    assert found.epochs == ()
    assert found.reason == "the recipe counts 20 steps and no epochs"
    (table,) = epochs_tables(compared(trial))
    assert table.notes == ("No epochs: the recipe counts 20 steps and no epochs.",)


def test_without_success_there_is_no_epoch() -> None:
    failed = detection_trial(outcome=Outcome.FAILED, failure=Failure(reason="x"))
    assert epochs_of(compared(failed).rows[0]).reason == "no trial ended ok"


def test_table_and_programs() -> None:
    (table,) = epochs_tables(compared(detection_trial()))
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
    assert second["missing"]["map_50"] == "it is not a finite number"
