"""What is read over time, and where a step's time goes."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.golden.invented import invented_trial
from tests.unit.figures.runs import comparison_of

from shardmark.analysis.compare.rows import Row
from shardmark.analysis.trial.series import MOST_POINTS, loss_by_step, sampled, thinned
from shardmark.analysis.trial.step_parts import step_parts
from shardmark.results.schema import Failure, Outcome


def row_of(path: Path, **metrics: float | None) -> Row:
    return comparison_of(path, [invented_trial("ddp", 2, metrics=metrics)]).rows[0]


def test_thinning_keeps_ends_and_extremes() -> None:
    points = [(float(x), float(x % 7)) for x in range(10_000)]
    points[4321] = (4321.0, 99.0)
    points[7654] = (7654.0, -99.0)
    found = thinned(points)
    assert len(found.x) <= MOST_POINTS
    assert (found.x[0], found.x[-1]) == (0.0, 9999.0)
    assert {99.0, -99.0} <= set(found.y)
    assert list(found.x) == sorted(found.x)
    assert set(zip(found.x, found.y, strict=True)) <= set(points)


def test_short_series_stay_as_they_are() -> None:
    points = [(1.0, 2.0), (2.0, 1.0)]
    assert thinned(points, most=2).y == (2.0, 1.0)
    assert thinned([]).x == ()


def test_broken_raw_files_give_nothing(tmp_path: Path) -> None:
    row = row_of(tmp_path)
    folder = tmp_path / "trials" / "ddp-2-0"
    (folder / "samples.jsonl").write_bytes(b'\xff{"at_seconds": \n[1]\n{"at_seconds": 1e9}\n')
    found = sampled(row)
    assert found is not None
    assert found.cpu_percent.x == ()
    (folder / "samples.jsonl").unlink()
    (folder / "steps.jsonl").unlink()
    assert sampled(row) is None
    assert loss_by_step(row).x == ()


def test_exposed_communication_takes_no_more_than_the_spans(tmp_path: Path) -> None:
    parts = step_parts(
        row_of(
            tmp_path,
            step_seconds=1.0,
            data_seconds=0.25,
            forward_seconds=0.25,
            backward_seconds=0.25,
            optimizer_seconds=0.0,
            exposed_communication_seconds=3.0,
        )
    )
    assert parts is not None
    assert parts.exposed_communication_seconds == 0.5
    assert (parts.forward_seconds, parts.backward_seconds) == (0.0, 0.0)
    assert parts.total_seconds == pytest.approx(1.0)


def test_unknown_communication_stays_in_the_spans(tmp_path: Path) -> None:
    parts = step_parts(row_of(tmp_path, step_seconds=4.0, exposed_communication_seconds=None))
    assert parts is not None
    assert parts.exposed_communication_seconds is None
    assert parts.forward_seconds == 1.0
    assert parts.rest_seconds == 0.0  # four spans of one second each


def test_a_span_that_is_not_marked_is_in_the_rest(tmp_path: Path) -> None:
    row = row_of(
        tmp_path, step_seconds=5.0, optimizer_seconds=None, exposed_communication_seconds=0.0
    )
    parts = step_parts(row)
    assert parts is not None
    assert parts.optimizer_seconds is None
    assert parts.rest_seconds == pytest.approx(2.0)


def test_parts_are_the_mean_over_ranks_not_the_maximum(tmp_path: Path) -> None:
    trial = invented_trial("ddp", 2, metrics={"exposed_communication_seconds": None})
    forward = trial.metrics["forward_seconds"]
    assert forward is not None
    uneven = forward.model_copy(update={"value": 3.0, "maximum": 3.0, "mean": 2.0})
    metrics = {**trial.metrics, "forward_seconds": uneven}
    row = comparison_of(tmp_path, [trial.model_copy(update={"metrics": metrics})]).rows[0]
    parts = step_parts(row)
    assert parts is not None
    assert parts.forward_seconds == 2.0


def test_without_marks_there_are_no_parts(tmp_path: Path) -> None:
    assert step_parts(row_of(tmp_path, step_seconds=None)) is None
    failed = invented_trial(outcome=Outcome.FAILED, failure=Failure(reason="it fell over"))
    assert step_parts(comparison_of(tmp_path / "other", [failed]).rows[0]) is None
