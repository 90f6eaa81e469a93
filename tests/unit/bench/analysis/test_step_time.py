"""The step of a row is divided into the parts that `why` has for a script."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardmark.base.results.schema import CollectiveRecord
from shardmark.bench.analysis.compare.rows import Row
from shardmark.bench.analysis.compare.step_time import division_of
from shardmark.bench.analysis.parts import NAMES, Division
from shardmark.bench.report.answers.overview import overview, overview_json
from shardmark.bench.report.answers.parts import parts_table
from tests import present
from tests.unit.bench.report.answers.invented_rows import BATCH, Cell, compared, steps

SPANS = steps(data=0.05, forward=0.1, backward=0.2, optimizer=0.05)


def cell(metrics: Mapping[str, float | None], step_seconds: float | None = None) -> Cell:
    """A row whose mean step is the median one, unless it is given."""
    rate = BATCH / (step_seconds or present(metrics["step_seconds"]))
    return Cell(strategy="ddp", world_size=2, rates=(rate,), metrics=metrics)


def row_of(path: Path, made: Cell, repeats: int = 3) -> Row:
    return compared(path, [made], repeats=repeats).rows[0]


def seconds_of(division: Division) -> dict[str, float]:
    parts = {part.kind: part.seconds.value for part in division.parts}
    return {**parts, "computing": division.computing_seconds}


@pytest.mark.parametrize(
    ("metrics", "step_seconds", "parts", "unknown"),
    [
        ({"exposed_communication_seconds": 0.1}, None,
         {"communication": 0.1, "input": 0.05, "computing": 0.25}, ()),
        ({"exposed_communication_seconds": 3.0}, None,  # no more than the spans
         {"communication": 0.35, "input": 0.05, "computing": 0.0}, ()),
        ({}, None, {"input": 0.05, "computing": 0.35}, ("communication",)),
        ({"data_seconds": 0.005, "exposed_communication_seconds": 0.0}, None,  # too small to name
         {"computing": 0.4}, ()),
        ({"forward_seconds": None, "exposed_communication_seconds": 0.0}, None,
         {"input": 0.05, "computing": 0.35}, ("own_code",)),
        # A pipeline waits for a fifth of its passes, and half of that for messages.
        ({"pipeline_bubble_fraction": 0.2, "exposed_communication_seconds": 0.0375,
          "step_seconds": 0.475}, None,
         {"input": 0.05, "communication": 0.0375, "pipeline": 0.0375, "computing": 0.35}, ()),
        ({"exposed_communication_seconds": 0.0}, 0.5,
         {"slow_steps": 0.1, "input": 0.05, "computing": 0.35}, ()),
    ],
    ids=["measured", "capped", "no probe", "small", "script", "pipeline", "slow steps"],
)  # fmt: skip
def test_a_step_is_divided_by_what_was_measured(
    tmp_path: Path,
    metrics: dict[str, float | None],
    step_seconds: float | None,
    parts: dict[str, float],
    unknown: tuple[str, ...],
) -> None:
    division = present(division_of(row_of(tmp_path, cell(SPANS | metrics, step_seconds))))
    assert seconds_of(division) == pytest.approx(parts, abs=1e-9)
    assert sum(parts.values()) == pytest.approx(division.step.value)
    assert division.unknown == unknown


def test_one_repeat_shows_nothing(tmp_path: Path) -> None:
    made = cell(SPANS | {"exposed_communication_seconds": 0.1})
    comparison = compared(tmp_path, [made], repeats=1)
    division = present(division_of(comparison.rows[0]))
    assert (division.parts, division.update, division.step.low) == ((), None, None)
    assert {part.kind for part in division.undecided} == {"communication", "input"}
    assert parts_table(comparison) is None


@pytest.mark.parametrize("step_seconds", [0.3999, 0.4001, 0.411, 0.45])
def test_one_repeat_leaves_no_noise_open(tmp_path: Path, step_seconds: float) -> None:
    """The median step takes 400 ms: a mean that differs by less than 3 % says nothing."""
    made = cell(SPANS | {"exposed_communication_seconds": 0.0}, step_seconds)
    division = present(division_of(row_of(tmp_path, made, repeats=1)))
    kinds = {part.kind for part in division.undecided}
    assert kinds == ({"input", "slow_steps"} if step_seconds > 0.42 else {"input"})


@pytest.mark.parametrize(
    ("exposed", "repeats", "late"),
    [((0.2, 0.2, 0.05), 3, True), ((0.2, 0.2, 0.05), 1, False), ((0.2, 0.2, 0.19), 3, False)],
    ids=["late", "one repeat shows nothing", "even ranks"],
)
def test_the_rank_that_waits_for_none_is_late(
    tmp_path: Path, exposed: tuple[float, ...], repeats: int, late: bool
) -> None:
    waiting = Cell(strategy="ddp", world_size=3, rates=(100.0,), exposed_by_rank=exposed)
    comparison = compared(tmp_path, [waiting], repeats=repeats)
    division = present(division_of(comparison.rows[0]))
    late_ranks = [part.rank for part in division.parts if part.kind == "late_rank"]
    assert late_ranks == [2] * late
    if not late:
        return
    rest = present(division.step).value - 0.15 - 0.05
    expected = {"late_rank": 0.15, "communication": 0.05, "computing": rest}
    assert seconds_of(division) == pytest.approx(expected)
    assert "ddp on 3 ranks: the others wait for rank 2." in present(parts_table(comparison)).notes


def test_what_the_repeats_leave_open_is_named(tmp_path: Path) -> None:
    """The mean step takes 240, 880 and 57 ms longer than the median one."""
    metrics = SPANS | {"exposed_communication_seconds": 0.0}
    made = Cell(strategy="ddp", world_size=2, rates=(100.0, 50.0, 140.0), metrics=metrics)
    notes = present(parts_table(compared(tmp_path, [made]))).notes
    left_open = f"these repeats do not decide: {NAMES['slow_steps']}"
    assert notes == (f"Computing includes what {left_open}.",)


@pytest.mark.parametrize(("phase", "known"), [("backward", True), ("update", False)])
def test_the_update_is_known_where_it_calls_no_collective(
    tmp_path: Path, phase: str, known: bool
) -> None:
    """The spans do not tell which of them holds the communication that nothing hides."""
    row = row_of(tmp_path, cell(SPANS | {"exposed_communication_seconds": 0.1}))
    assert present(division_of(row)).update is None
    collectives = {phase: {"all_reduce": CollectiveRecord(calls=1, payload_bytes=8)}}

    def probed(rank: Any) -> Any:
        probe = rank.probe.model_copy(update={"collectives_by_phase": collectives})
        return rank.model_copy(update={"probe": probe})

    trials = [
        trial.model_copy(update={"ranks": tuple(map(probed, trial.ranks))}) for trial in row.trials
    ]
    update = present(division_of(replace(row, trials=tuple(trials)))).update
    assert (update is not None) is known
    assert update is None or update.value == pytest.approx(0.05)


def test_ranks_are_averaged(tmp_path: Path) -> None:
    """Maxima of different ranks do not add up to the step of any of them."""
    row = row_of(tmp_path, cell(SPANS | {"exposed_communication_seconds": 0.0}))
    trials = []
    for trial in row.trials:
        uneven = present(trial.metrics["data_seconds"]).model_copy(update={"mean": 0.03})
        metrics = {**trial.metrics, "data_seconds": uneven}
        trials.append(trial.model_copy(update={"metrics": metrics}))
    division = present(division_of(replace(row, trials=tuple(trials))))
    assert seconds_of(division)["input"] == pytest.approx(0.03)


def test_uneven_ranks_have_no_slow_steps(tmp_path: Path) -> None:
    """Ranks that wait for nobody take 0.4 and 0.8 s for each of their steps."""
    row = row_of(tmp_path, cell(SPANS | {"exposed_communication_seconds": 0.0}))
    trials = []
    for trial in row.trials:
        first, second = trial.ranks
        windows = tuple(
            window.model_copy(update={"window_seconds": 2 * window.window_seconds})
            for window in second.windows
        )
        ranks = (first, second.model_copy(update={"windows": windows}))
        step = present(trial.metrics["step_seconds"])
        uneven = step.model_copy(update={"value": 2 * step.value, "mean": 1.5 * step.value})
        metrics = {**trial.metrics, "step_seconds": uneven}
        trials.append(trial.model_copy(update={"ranks": ranks, "metrics": metrics}))
    division = present(division_of(replace(row, trials=tuple(trials))))
    assert division.step.value == pytest.approx(0.6)
    assert {part.kind for part in division.parts} == {"input"}


def test_a_comparison_has_the_words_of_why(tmp_path: Path) -> None:
    exposed = {"exposed_communication_seconds": 0.1}
    made = [cell(SPANS | exposed), Cell(strategy="fsdp", world_size=2, rates=(100.0,))]
    comparison = compared(tmp_path, made)
    text = overview(comparison)
    assert "Where a step's time goes" in text
    (line,) = (row for row in text.splitlines() if row.startswith("ddp") and "50.0" in row)
    assert line.split()[2:] == ["400", "±0", "250", "50.0", "±0", "100", "±0"]
    assert f"Computing includes what was not measured: {NAMES['communication']}." in text
    rows = json.loads(overview_json(comparison))["rows"]
    step = next(row["step"] for row in rows if row["strategy"] == "ddp")
    assert step["computing_seconds"] == pytest.approx(0.25)
    first = step["parts"][0]
    assert (first["kind"], first["how"]) == ("communication", "measured")
    assert first["text"] == NAMES["communication"]
    assert first["seconds"] == pytest.approx({"value": 0.1, "low": 0.1, "high": 0.1})
