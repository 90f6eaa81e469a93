"""A trial's folder before and after, and its result for every way to end."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from shardmark.base.machine import Machine
from shardmark.base.results.schema import Outcome, RankError, TrialResult
from shardmark.base.results.store import RunFolder
from shardmark.bench.launch.listener import TrialProgress
from shardmark.bench.launch.outcome import Ending
from shardmark.bench.launch.trial import TrialRunner
from shardmark.ranks.measure.step.progress import ProgressWriter, RankProgress
from shardmark.ranks.trial import Trial
from tests.unit.bench.launch.fakes import (
    CPU,
    FAILED,
    INTERRUPTED,
    TIMED_OUT,
    FakeEngine,
    RecordingListener,
    ending,
    leave_files,
    trial_of,
)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "run")


def run(
    folder: RunFolder,
    engine: FakeEngine,
    trial: Trial,
    *,
    listener: RecordingListener | None = None,
    machine: Machine = CPU,
) -> TrialResult:
    listener = listener or RecordingListener()
    runner = TrialRunner(engine=engine, machine=machine, folder=folder, listener=listener)
    return runner.run(trial, order=4)


def test_successful_trial(folder: RunFolder) -> None:
    listener, trial, seen = RecordingListener(), trial_of("ddp"), list[set[str]]()
    leave_files(folder.create_trial(trial.id), 3)
    engine = FakeEngine()
    engine.on_run = lambda path: seen.append({found.name for found in path.iterdir()})
    result = run(folder, engine, trial, listener=listener)
    assert seen == [{"trial.json", "samples.jsonl"}], "what an earlier attempt left is gone"
    assert (result.outcome, result.failure) == (Outcome.OK, None)
    assert (result.order, result.repeat, result.world_size) == (4, 0, 2)
    assert Trial.model_validate(result.trial) == trial
    assert [rank.rank for rank in result.ranks] == [0, 1]
    assert result.metrics["samples_per_second"] is not None
    assert all(name in result.missing for name, value in result.metrics.items() if value is None)
    assert listener.steps == [(3, 4)], "after the first tick, when nothing was known yet"
    assert folder.read_result(trial.id, verify=True) == result
    files = {path.name for path in folder.trial_folder(trial.id).iterdir()}
    assert files == {"result.json", "steps.jsonl", "samples.jsonl", "log.txt"}
    assert set(result.files) == files - {"result.json"}


NO_MEMORY = RankError(kind="out_of_memory", message="MemoryError: none", at_seconds=1.0)


@pytest.mark.parametrize(
    ("end", "ranks", "error", "outcome", "reason"),
    [
        (ending(code=1, failures=[(1, -9, 1.0)]), 1, None, Outcome.FAILED, "rank 1 was ended"),
        (FAILED, 2, NO_MEMORY, Outcome.OUT_OF_MEMORY, "rank 0: MemoryError: none"),
        (TIMED_OUT, 1, None, Outcome.TIMED_OUT, "3 steps, rank 1 had not begun"),
        (INTERRUPTED, 0, None, Outcome.INTERRUPTED, "interrupted by the user"),
    ],
)
def test_failed_trials_are_stored_with_the_ranks_records(
    *,
    folder: RunFolder,
    end: Ending,
    ranks: int,
    error: RankError | None,
    outcome: Outcome,
    reason: str,
) -> None:
    engine, trial = FakeEngine({"ddp": end}), trial_of("ddp")
    changes: dict[str, Any] = {} if error is None else {"error": error.model_dump()}
    engine.on_run = lambda path: leave_files(path, ranks, **changes)
    result = run(folder, engine, trial)
    assert result.outcome is outcome
    assert result.failure is not None
    assert reason in result.failure.reason
    assert [rank.error for rank in result.ranks] == [error] * ranks
    assert (result.metrics, result.missing) == ({}, {})
    assert folder.read_result(trial.id) == result


def test_number_of_processes_follows_the_placement(folder: RunFolder) -> None:
    """`dp` on two devices is one process: one record is all there is."""
    machine = Machine(device_type="cuda", device_count=2, cores=2)
    result = run(folder, FakeEngine(), trial_of("dp", device="cuda"), machine=machine)
    assert (result.outcome, len(result.ranks)) == (Outcome.OK, 1)


def test_failure_of_a_rank_names_its_node(folder: RunFolder) -> None:
    error = RankError(kind="exception", message="no", at_seconds=1.0)
    engine = FakeEngine({"ddp": FAILED}, nodes=2)
    engine.on_run = lambda path: leave_files(path, 2, error=error.model_dump())
    result = run(folder, engine, trial_of("ddp", "placement.nodes=2", "matrix.world_size=[4]"))
    assert result.failure is not None
    assert (result.failure.rank, result.failure.node) == (0, 0)
    host = result.ranks[0].host
    assert result.failure.reason == f"rank 0: no (rank 0 is on node 0, {host})"


def test_samples_of_nodes_are_merged(folder: RunFolder) -> None:
    engine = FakeEngine(nodes=2)
    engine.samples = True

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


def test_preparation_is_outside_the_trials_time(folder: RunFolder) -> None:
    """Start-up means the same with every engine; what cannot run has nothing prepared."""
    engine, prepared = FakeEngine(), list[float]()
    engine.prepare = lambda _: prepared.append(time.time())
    result = run(folder, engine, trial_of("ddp", "placement.nodes=2"))
    assert (result.outcome, prepared) == (Outcome.UNAVAILABLE, [])
    result = run(folder, engine, trial_of("ddp"))
    assert result.outcome is Outcome.OK
    assert prepared[0] <= result.started_at_seconds


def test_progress_is_that_of_the_fastest_rank(folder: RunFolder) -> None:
    def unequal(directory: Path) -> None:
        for rank, steps in enumerate((1, 3)):
            with ProgressWriter.opened(directory, rank, total_steps=4) as progress:
                progress.stepped(steps)

    listener, engine = RecordingListener(), FakeEngine({"ps-async": TIMED_OUT})
    engine.on_run = unequal
    result = run(folder, engine, trial_of("ps-async"), listener=listener)
    assert listener.steps == [(3, 4)]
    assert result.failure is not None
    assert result.failure.reason.endswith("rank 0 had taken 1 steps, rank 1 had taken 3 steps")
    assert result.failure.rank == 0, "the server, which takes no steps, is not waited for"


def test_reading_has_the_mean_of_reported_losses() -> None:
    def rank(steps: int, loss: float | None = None, loss_steps: int | None = None) -> RankProgress:
        return RankProgress(steps=steps, total_steps=9, loss=loss, loss_steps=loss_steps)

    progress = TrialProgress.combine([rank(3, 1.0, 3), rank(5, 2.0, 4), rank(2)])
    assert progress == TrialProgress(steps=5, total_steps=9, loss=1.5, loss_steps=4)
    assert TrialProgress.combine([rank(0)]).loss is None
