"""Rounds of a script under interventions, on ranks that only leave files."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardmark.base.errors import InputError
from shardmark.base.files.run_files import rank_steps_file
from shardmark.bench import why
from shardmark.bench.analysis.taken_away import ALL, LOOK, PLAIN, Samples
from shardmark.bench.launch import session
from shardmark.ranks.trial import Trial
from tests.unit.bench.analysis.test_taken_away import QUIET
from tests.unit.bench.launch.fakes import (
    FAILED,
    TIMED_OUT,
    FakeEngine,
    RecordingListener,
    leave_files,
)

BUDGET_SECONDS = 60.0
SPANS = ("data", "backward", "optimizer")


class Scripts(FakeEngine):
    """Ranks of a script that waits for its input; `returned` batches are loaded again.

    The last rank of several is late, and a trial takes `trial_seconds` of `now`.
    """

    def __init__(self, *, returned: int = 20, trial_seconds: float = 0.0) -> None:
        super().__init__()
        self.now, self.trial_seconds = 0.0, trial_seconds
        look = {**QUIET, "shares": {"input": 0.5}, "functions": ["get_batch"]}
        self.facts: dict[str, Any] = {LOOK: {"Look": look}}
        self.facts["same_batch"] = {"SameBatch": {"returned": returned}}
        self.leave_files = self.leave

    def leave(self, directory: Path, ranks: int) -> None:
        name = Trial.model_validate_json((directory / "trial.json").read_text()).strategy.name
        leave_files(directory, ranks, settings={"seen": self.facts.get(name, {})})
        self.now += self.trial_seconds
        for rank in range(ranks):
            line: dict[str, Any] = {"rank": rank, "step": 5, "measured": True}
            line |= {"step_seconds": 0.5 + 0.2 * rank}
            line |= {"started_at_seconds": 0.0, **{f"{span}_seconds": None for span in SPANS}}
            (directory / rank_steps_file(rank)).write_text(json.dumps(line) + "\n")


@pytest.fixture
def explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    def explain(engine: FakeEngine, ranks: int = 1) -> Any:
        monkeypatch.chdir(tmp_path)
        Path("train.py").write_text("")
        monkeypatch.setattr(session, "build_engine", lambda *_: engine)
        return why.explain(
            "train.py", ranks, tmp_path / "run", budget_seconds=BUDGET_SECONDS,
            listener=RecordingListener(),
        )  # fmt: skip

    return explain


@pytest.mark.parametrize(("returned", "unknown"), [(20, ()), (0, ("input",))])
def test_input_that_was_loaded_all_the_same_is_not_called_computing(
    returned: int, unknown: tuple[str, ...], explained: Callable[..., Any]
) -> None:
    """The function that makes batches may be in another file than the script."""
    explanation = explained(Scripts(returned=returned))
    assert explanation.unknown == unknown
    assert any("loaded again" in note for note in explanation.notes) == bool(unknown)


def test_no_trial_takes_much_longer_than_those_that_ended_well(
    explained: Callable[..., Any],
) -> None:
    engine = Scripts()
    engine.ends["same_batch"] = TIMED_OUT
    explanation = explained(engine)
    first, *others = engine.ran
    assert BUDGET_SECONDS - 10 < first.limits.trial_seconds <= BUDGET_SECONDS
    assert {trial.limits.trial_seconds for trial in others} == {why.HANGS * why.LEAST_SECONDS}
    assert explanation.unknown == ("input",)


@pytest.mark.parametrize(("name", "problem"), [(LOOK, "mend that"), (PLAIN, "its second run")])
def test_a_script_that_fails_is_told_with_its_reason(
    name: str, problem: str, explained: Callable[..., Any]
) -> None:
    engine = Scripts()
    engine.ends[name] = FAILED
    with pytest.raises(InputError, match=problem):
        explained(engine)


@pytest.mark.parametrize(("trial_seconds", "rounds"), [(3.5, why.LEAST_ROUNDS), (1.5, 6)])
def test_what_makes_a_rank_late_takes_no_time_of_the_first_rounds(
    trial_seconds: float,
    rounds: int,
    explained: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The parts get some rounds first, and as many as the causes of lateness in the end."""
    engine = Scripts(trial_seconds=trial_seconds)
    monkeypatch.setattr(why, "time", SimpleNamespace(monotonic=lambda: engine.now))
    monkeypatch.setattr(Samples, "precise", lambda *_: False)
    explained(engine, 2)
    counts = Counter(trial.strategy.name for trial in engine.ran if trial.strategy.name != LOOK)
    assert counts.keys() == {PLAIN, "same_batch", "no_peers", ALL, "places", "rows"}
    assert counts[PLAIN] == rounds
    assert max(counts.values()) - min(counts.values()) == 1
