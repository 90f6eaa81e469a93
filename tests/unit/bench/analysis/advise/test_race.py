"""A race ends when its candidates are decided, and keeps what is faster and trains the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardmark.base.cells import cell_id
from shardmark.base.results.schema import Outcome
from shardmark.bench.analysis.advise.decided import decided_cells
from shardmark.bench.analysis.compare.race import Race, race_of
from shardmark.bench.report.answers.race import race_facts
from tests.unit.bench.report.answers.invented_rows import MIB, Cell, compared

NOISE = (1.0, 1.004, 0.997, 1.002, 0.999, 1.003, 0.998, 1.001)
OTHER_NOISE = (1.001, 0.999, 1.002, 0.998, 1.0, 0.997, 1.003, 1.0)
MARGIN = 0.01


def racer(strategy: str, speed: float, noise: Sequence[float] = OTHER_NOISE, **more: Any) -> Cell:
    rates = [100 * speed * factor for factor in noise]
    return replace(Cell(strategy=strategy, world_size=2, rates=rates), **more)


def raced(path: Path, *candidates: Cell, repeats: int = 8) -> Race:
    rows = compared(path, [racer("first", 1.0, NOISE), *candidates], repeats=repeats).rows
    race = race_of(rows, "first", MARGIN)
    assert race is not None
    return race


LESS_MEMORY = tuple(80 * MIB for _ in NOISE)
SHIFTED: dict[str, Any] = {
    "equivalent": False,
    "deviation": "it does not train what `first` trains",
}


@pytest.mark.parametrize(
    ("candidate", "decision", "words"),
    [
        (racer("new", 1.1), "keep", ("1.1", "8 pairs", "trains the same")),
        (racer("new", 0.9), "discard", ("slower",)),
        (racer("new", 1.0), "discard", ("no difference of 1 % or more",)),
        (racer("new", 1.0, peaks=LESS_MEMORY), "keep", ("as fast", "20 % less memory")),
        (racer("new", 1.1, **SHIFTED), "discard", ("not the same training", "it does not")),
        (racer("new", 1.1, equivalent=None), "not decided", ("cannot be told",)),
        (racer("new", 1.02, (0.8, 1.2) * 4), "not decided", ("pairs would decide",)),
        (racer("new", 1.0, outcome=Outcome.FAILED), "discard", ("does not run",)),
    ],
    ids=["faster", "slower", "alike", "memory", "other", "unknown", "noisy", "fails"],
)
def test_a_candidate_is_kept_discarded_or_not_decided(
    tmp_path: Path, candidate: Cell, decision: str, words: tuple[str, ...]
) -> None:
    facts = race_facts(raced(tmp_path, candidate))
    assert facts[0]["decision"] == decision
    assert all(word in facts[0]["text"] for word in words), facts[0]["text"]
    assert facts[0]["same_training"] is candidate.equivalent


def test_the_candidate_to_keep_is_first_and_the_slower_ones_are_out(tmp_path: Path) -> None:
    race = raced(tmp_path, racer("slow", 0.8), racer("fast", 1.3), racer("fair", 1.1))
    assert race_facts(race)[0]["variant"] == "fast"
    assert {candidate.row.strategy for candidate in race.racers if candidate.out} == {
        "slow", "fast", "fair",
    }  # fmt: skip
    assert race.ended


def test_two_faster_candidates_go_on_until_they_are_told_apart(tmp_path: Path) -> None:
    wide = (0.99, 1.012, 1.0, 0.991, 1.01, 1.003, 0.99, 1.008)
    race = raced(tmp_path, racer("one", 1.3), racer("two", 1.302, wide))
    assert not any(candidate.out for candidate in race.racers)
    assert not race.ended


def test_disturbed_trials_decide_nothing(tmp_path: Path) -> None:
    race = raced(tmp_path, racer("new", 1.3, disturbed=tuple(range(8))))
    assert race_facts(race)[0]["decision"] == "not decided"
    assert race_facts(race)[0]["pairs"] == 0
    assert "no undisturbed pair with first" in race_facts(race)[0]["text"]


@pytest.mark.parametrize(("speed", "over"), [(1.3, {"first", "new"}), (1.012, set())])
def test_the_reference_runs_as_long_as_a_candidate(
    tmp_path: Path, speed: float, over: set[str]
) -> None:
    cells = [racer("first", 1.0, NOISE), racer("new", speed, (0.98, 1.02) * 4)]
    rows = compared(tmp_path, cells, repeats=8).rows
    names = {cell_id(row.trials[0].trial): row.strategy for row in rows}
    trials = [trial for row in rows for trial in row.trials]
    decided = decided_cells(trials, 0.05, ("first", "new"), margin=MARGIN)
    assert {names[each] for each in decided} == over
