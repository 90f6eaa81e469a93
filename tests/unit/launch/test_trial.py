"""One trial: its folder before and after, and its result for every way to end."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from shardmark.launch.outcome import Ending, ProcessEnd
from shardmark.launch.trial import TrialRunner
from shardmark.results.schema import Outcome, RankError, TrialResult
from shardmark.results.store import RunFolder
from shardmark.trials.matrix import expand
from shardmark.trials.trial import Trial
from tests.unit.launch.fakes import (
    CPU,
    FINE,
    INTERRUPTED,
    FakeEngine,
    Remembers,
    experiment,
    leave_files,
)

Run = Callable[..., TrialResult]


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "run")


def trial_of(name: str, *overrides: str) -> Trial:
    (trial,) = expand(experiment(f"matrix.strategy=[{name}]", *overrides), "cpu").trials
    return trial


def run(folder: RunFolder, engine: FakeEngine, trial: Trial, told: Remembers | None = None) -> (
    TrialResult
):  # fmt: skip
    runner = TrialRunner(engine=engine, machine=CPU, folder=folder, listener=told or Remembers())
    return runner.run(trial, order=4)


def test_good_trial(folder: RunFolder) -> None:
    told, trial = Remembers(), trial_of("ddp")
    result = run(folder, FakeEngine(), trial, told)
    assert (result.outcome, result.failure) == (Outcome.OK, None)
    assert (result.order, result.repeat, result.world_size) == (4, 0, 2)
    assert Trial.model_validate(result.trial) == trial
    assert [rank.rank for rank in result.ranks] == [0, 1]
    assert result.metrics["samples_per_second"] is not None
    assert all(name in result.missing for name, value in result.metrics.items() if value is None)
    assert told.steps == [(3, 4)], "after the first tick, when nothing was known yet"
    assert folder.read_result(trial.id, verify=True) == result
    files = {path.name for path in folder.trial_folder(trial.id).iterdir()}
    assert files == {"result.json", "steps.jsonl", "samples.jsonl", "log.txt"}
    assert set(result.files) == files - {"result.json"}


def test_rest_of_an_earlier_attempt_is_gone(folder: RunFolder) -> None:
    trial = trial_of("ddp")
    directory = folder.create_trial(trial.id)
    leave_files(directory, 3)
    seen: list[set[str]] = []
    engine = FakeEngine()
    engine.on_run = lambda path: seen.append({found.name for found in path.iterdir()})
    run(folder, engine, trial)
    assert seen == [{"trial.json", "samples.jsonl"}]


def test_rank_that_left_nothing_is_a_failure(folder: RunFolder) -> None:
    died = Ending(
        how="exited",
        agent_exit_code=1,
        failures=(ProcessEnd(rank=1, exit_code=-9, at_seconds=1.0),),
        oom_kills=0,
    )
    engine = FakeEngine({"ddp": died})
    engine.on_run = lambda path: leave_files(path, 1)
    result = run(folder, engine, trial_of("ddp"))
    assert result.outcome is Outcome.FAILED
    assert result.failure is not None
    assert result.failure.reason == "rank 1 was ended by SIGKILL"
    assert len(result.ranks) == 1, "what the other one knew is kept"
    assert result.metrics == {}
    assert result.missing == {}


def test_error_of_a_rank_is_stored(folder: RunFolder) -> None:
    error = RankError(kind="out_of_memory", message="MemoryError: none", at_seconds=1.0)
    failed = Ending(how="exited", agent_exit_code=1, failures=(), oom_kills=0)
    engine = FakeEngine({"ddp": failed})
    engine.on_run = lambda path: leave_files(path, 2, error=error.model_dump())
    result = run(folder, engine, trial_of("ddp"))
    assert result.outcome is Outcome.OUT_OF_MEMORY
    assert result.failure is not None
    assert result.failure.rank == 0
    assert result.ranks[0].error == error


def test_timeout_tells_the_progress_of_each_rank(folder: RunFolder) -> None:
    late = Ending(how="timed_out", agent_exit_code=-9, failures=(), oom_kills=0)
    engine = FakeEngine({"ddp": late})
    engine.on_run = lambda path: leave_files(path, 1)
    result = run(folder, engine, trial_of("ddp", "limits.trial_seconds=9"))
    assert result.outcome is Outcome.TIMED_OUT
    assert result.failure is not None
    assert result.failure.reason == (
        "not done after limits.trial_seconds = 9 s: rank 0 had taken 3 steps, rank 1 had not begun"
    )


def test_interrupted_trial_is_stored(folder: RunFolder) -> None:
    trial = trial_of("single")
    result = run(folder, FakeEngine({"single": INTERRUPTED}), trial)
    assert result.outcome is Outcome.INTERRUPTED
    assert folder.read_result(trial.id) == result


def test_unavailable_strategy_starts_nothing(folder: RunFolder) -> None:
    engine, trial = FakeEngine(), trial_of("ddp", "recipe.precision=fp16")
    result = run(folder, engine, trial)
    assert engine.calls == []
    assert result.outcome is Outcome.UNAVAILABLE
    assert result.failure is not None
    assert result.failure.reason == "fp16 with loss scaling needs a CUDA device"
    assert result.failure.remedy == "set recipe.precision to bf16 or fp32"
    assert {path.name for path in folder.trial_folder(trial.id).iterdir()} == {"result.json"}


def test_processes_are_those_of_the_placement(folder: RunFolder) -> None:
    """`dp` on two devices is one process: one record is all there is."""
    machine = type(CPU)(device_type="cuda", device_count=2, cores=2)
    (trial,) = expand(experiment("matrix.strategy=[dp]"), "cuda").trials
    engine = FakeEngine({"dp": FINE})
    runner = TrialRunner(engine=engine, machine=machine, folder=folder, listener=Remembers())
    result = runner.run(trial, order=0)
    assert result.outcome is Outcome.OK
    assert len(result.ranks) == 1


def test_failure_of_a_rank_names_its_node(folder: RunFolder) -> None:
    error = RankError(kind="exception", message="no", at_seconds=1.0)
    failed = Ending(how="exited", agent_exit_code=1, failures=(), oom_kills=0)
    engine = FakeEngine({"ddp": failed})
    engine.nodes = 2
    engine.on_run = lambda path: leave_files(path, 2, error=error.model_dump())
    result = run(folder, engine, trial_of("ddp", "placement.nodes=2", "matrix.world_size=[4]"))
    assert result.failure is not None
    assert (result.failure.rank, result.failure.node) == (0, 0)
    host = result.ranks[0].host
    assert result.failure.reason == f"rank 0: no (rank 0 is on node 0, {host})"


def test_engine_that_samples_brings_its_nodes_samples(folder: RunFolder) -> None:
    engine = FakeEngine()
    engine.samples, engine.nodes = True, 2

    def sampled(path: Path) -> None:
        assert not (path / "samples.jsonl").exists()
        for node in (1, 0):
            line = json.dumps({"at_seconds": 5.0 - node, "ranks": [], "network": {}, "gpus": []})
            (path / f"samples.node-{node}.jsonl").write_text(line + "\n")

    engine.on_run = sampled
    trial = trial_of("ddp", "placement.nodes=2")
    assert run(folder, engine, trial).outcome is Outcome.OK
    lines = (folder.trial_folder(trial.id) / "samples.jsonl").read_text().splitlines()
    assert [json.loads(line)["node"] for line in lines] == [1, 0]
