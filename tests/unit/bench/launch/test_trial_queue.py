"""The order of trials: rounds, cells that need no more repeats, a budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from shardmark.base.results.schema import Outcome, StabilityFinding, StabilityKind, TrialResult
from shardmark.bench.launch.trial_queue import TrialQueue, cell_of, expected_seconds
from shardmark.experiment.matrix import expand
from shardmark.ranks.trial import Trial
from tests.golden.invented import invented_trial
from tests.unit.bench.launch.fakes import experiment

DISTURBED = StabilityFinding(
    kind=StabilityKind.OTHER_PROCESSES, text="other programs used 50 % of the CPU", severity=0.5
)
ADAPTIVE = "measure.repeats={at_least: 3, at_most: 9, until: 0.05}"


def result_of(trial: Trial, rate: float = 100.0, **fields: Any) -> TrialResult:
    ok = fields.get("outcome", Outcome.OK) is Outcome.OK
    return invented_trial(
        trial.strategy.name,
        trial.world_size,
        trial.repeat,
        metrics={"samples_per_second": rate} if ok else None,
        **{"id": trial.id, "trial": trial.model_dump(mode="json"), **fields},
    )


def run_queue(
    *overrides: str,
    refused: str = "",
    rates: Callable[[Trial], float] = lambda _: 100.0,
    budget_seconds: float | None = None,
    stored: Sequence[TrialResult] = (),
    **fields: Any,
) -> list[Trial]:
    """Return the trials in the order in which they are run; each takes 10 s."""
    made = experiment(*overrides)
    ran: list[Trial] = []
    queue = TrialQueue(
        expand(made),
        made.measure.repeats,
        stored,
        budget_seconds=budget_seconds,
        clock=lambda: 10.0 * len(ran),
    )
    trials = expand(made).trials
    queue.refused = frozenset(cell_of(t) for t in trials if t.strategy.name == refused)
    while (upcoming := queue.next()) is not None:
        _, trial = upcoming
        ran.append(trial)
        changed = {key: value(trial) if callable(value) else value for key, value in fields.items()}
        queue.results[trial.id] = result_of(trial, rates(trial), total_seconds=10.0, **changed)
    return ran


def repeats_of(ran: Sequence[Trial]) -> dict[str, int]:
    names = [trial.strategy.name for trial in ran]
    return {name: names.count(name) for name in names}


def noisy(trial: Trial) -> float:
    """Return rates that are known to about 30 % after three repeats, and never to 5 %."""
    return 100.0 * (1.0, 1.2, 0.9)[trial.repeat % 3]


def test_fixed_repeats_are_rounds_of_all_cells() -> None:
    ran = run_queue("measure.repeats=3", rates=noisy)
    assert [trial.repeat for trial in ran] == [0, 0, 1, 1, 2, 2]


def test_cells_with_a_precise_rate_get_no_more_repeats() -> None:
    assert repeats_of(run_queue(ADAPTIVE)) == {"single": 3, "ddp": 3}
    many = repeats_of(run_queue(ADAPTIVE, rates=noisy))
    assert many == {"single": 9, "ddp": 9}, "no rate is precise, so all repeats run"


def test_cells_that_are_compared_get_the_same_repeats() -> None:
    """A repeat without one of its baseline cannot show a difference."""
    ran = run_queue(ADAPTIVE, rates=lambda t: 100.0 if t.strategy.name == "single" else noisy(t))
    assert repeats_of(ran) == {"single": 9, "ddp": 9}


@pytest.mark.parametrize(
    "fields", [{"stability": (DISTURBED,)}, {"outcome": Outcome.OUT_OF_MEMORY}]
)
def test_cells_that_fail_or_are_disturbed_get_no_more_repeats(fields: dict[str, Any]) -> None:
    assert repeats_of(run_queue(ADAPTIVE, rates=noisy, **fields)) == {"single": 3, "ddp": 3}


def test_stored_results_count_as_repeats() -> None:
    made = experiment(ADAPTIVE)
    stored = [result_of(t, noisy(t)) for t in expand(made).trials if t.repeat < 4]
    ran = run_queue(ADAPTIVE, rates=noisy, stored=stored)
    assert min(trial.repeat for trial in ran) == 4
    precise = [result_of(t) for t in expand(made).trials if t.repeat < 4]
    assert run_queue(ADAPTIVE, stored=precise) == []


@pytest.mark.parametrize(
    ("seconds", "count"),
    [(60.0, 6), (59.0, 4), (35.0, 2), (15.0, 1), (9.0, 1), (0.0, 1)],
    ids=["all", "whole rounds", "one", "a part of the first", "less than one", "none"],
)
def test_a_budget_is_spent_in_complete_rounds(seconds: float, count: int) -> None:
    """The time of a trial is unknown before the first one."""
    ran = run_queue("measure.repeats=3", budget_seconds=seconds)
    assert len(ran) == count


RACE = "measure.repeats={at_least: 2, at_most: 9, margin: 0.01}"


@pytest.mark.parametrize("others", [["ddp"], ["ddp", "zero-2"]], ids=["two", "decided"])
def test_the_trials_of_a_pair_run_in_the_same_round(others: list[str]) -> None:
    """A candidate that is new, or interrupted, is not compared with a trial of another time."""
    matrix = f"matrix.strategy=[single, {', '.join(others)}]"
    rates = {"single": 100.0, "ddp": 50.0, "zero-2": 100.0}
    stored = [
        result_of(trial, rates[trial.strategy.name] * (1 + trial.repeat / 1000))
        for trial in expand(experiment(RACE, matrix)).trials
        if trial.repeat < 4 and trial.strategy.name != others[-1]
    ]
    ran = run_queue(RACE, matrix, stored=stored, rates=noisy)
    first = [trial.strategy.name for trial in ran if trial.repeat == 4]
    assert sorted(first) == sorted(["single", *others])
    assert not [trial for trial in ran if trial.repeat < 4]
    assert repeats_of(ran)["single"] == repeats_of(ran)[others[-1]]


def test_time_is_expected_from_the_same_cell_or_else_the_mean() -> None:
    single, ddp = sorted(expand(experiment()).trials, key=lambda trial: -len(trial.strategy.name))
    assert expected_seconds([single, ddp], []) is None
    measured = result_of(single, total_seconds=8.0)
    assert expected_seconds([single], [measured]) == 8.0
    assert expected_seconds([single, ddp], [measured]) == 16.0
    other = result_of(ddp, total_seconds=2.0)
    assert expected_seconds([single, single, ddp], [measured, other]) == 18.0
    broken = result_of(ddp, total_seconds=500.0, outcome=Outcome.FAILED)
    assert expected_seconds([single, ddp], [measured, broken]) == 16.0
    assert cell_of(single) != cell_of(ddp)


def test_a_twin_runs_once_after_the_first_round_and_counts_as_no_repeat() -> None:
    ran = run_queue("measure.verify=true", "measure.repeats=2")
    assert [(trial.twin, trial.repeat) for trial in ran] == [
        *((False, 0), (False, 0), (True, 0)),
        *((False, 1), (False, 1)),
    ]
    failed = run_queue(
        "measure.verify=true",
        outcome=lambda t: Outcome.FAILED if t.strategy.name == "single" else Outcome.OK,
    )
    assert not any(trial.twin for trial in failed)


def test_a_refused_cell_is_run_as_often_as_is_needed_at_least() -> None:
    ran = run_queue(ADAPTIVE, refused="ddp", rates=noisy)
    assert repeats_of(ran) == {"single": 3, "ddp": 3}, "alone, it needs no more either"
