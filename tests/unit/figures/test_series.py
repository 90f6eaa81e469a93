"""What is read over time, and where a step's time goes."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.golden.invented import invented_trial
from tests.unit.figures.runs import comparison_of

from shardmark.analysis.compare.rows import Row
from shardmark.analysis.compare.series import MOST_POINTS, loss_curve, sampled, thinned
from shardmark.analysis.compare.step_time import step_time
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
    assert loss_curve(row).by_step.x == ()


QUARTERS = dict.fromkeys(("data", "forward", "backward"), 0.25)


@pytest.mark.parametrize(
    ("metrics", "parts"),
    [
        (  # no more than the spans is taken out of them
            {**QUARTERS, "step": 1.0, "optimizer": 0.0, "exposed_communication": 3.0},
            {"forward": 0.0, "backward": 0.0, "exposed communication": 0.5, "rest": 0.25},
        ),
        (  # unknown communication stays in the spans, of which four take a second each
            {"step": 4.0, "exposed_communication": None},
            {"forward": 1.0, "exposed communication": None, "rest": 0.0},
        ),
        (  # a span that is not marked is in the rest
            {"step": 5.0, "optimizer": None, "exposed_communication": 0.0},
            {"optimizer": None, "rest": 2.0},
        ),
    ],
)
def test_parts_of_a_step(
    tmp_path: Path, metrics: dict[str, float | None], parts: dict[str, float | None]
) -> None:
    named = {f"{name}_seconds": value for name, value in metrics.items()}
    known = step_time(row_of(tmp_path, **named))
    assert known is not None
    assert {name: known.parts()[name] for name in parts} == pytest.approx(parts)


def test_parts_are_the_mean_over_ranks_not_the_maximum(tmp_path: Path) -> None:
    trial = invented_trial("ddp", 2, metrics={"exposed_communication_seconds": None})
    forward = trial.metrics["forward_seconds"]
    assert forward is not None
    uneven = forward.model_copy(update={"value": 3.0, "maximum": 3.0, "mean": 2.0})
    metrics = {**trial.metrics, "forward_seconds": uneven}
    row = comparison_of(tmp_path, [trial.model_copy(update={"metrics": metrics})]).rows[0]
    known = step_time(row)
    assert known is not None
    assert known.spans["forward"] == 2.0


def test_without_marks_there_are_no_parts(tmp_path: Path) -> None:
    assert step_time(row_of(tmp_path, step_seconds=None)) is None
    failed = invented_trial(outcome=Outcome.FAILED, failure=Failure(reason="it fell over"))
    assert step_time(comparison_of(tmp_path / "other", [failed]).rows[0]) is None
