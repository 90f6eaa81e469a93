"""Trials that every engine runs on two nodes, and this machine alone for comparison."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardmark.base.results.schema import Outcome, TrialResult
from shardmark.base.results.store import StoredRun, load_run
from shardmark.bench.launch.session import run_experiment
from shardmark.experiment.load import from_mapping
from shardmark.ranks.measure.step.progress import read_progress
from tests import ROOT, present
from tests.distributed.experiments import experiment
from tests.kept_engine import KeptEngine
from tests.waiting import wait_for

EXPERIMENT = experiment(
    name="nodes",
    matrix={"strategy": ["single", "ddp", {"name": "ps-sync", "servers": 2}]},
    recipe={"steps": 60},  # ranks of fewer steps may end before their node has looked for them once
    measure={"sample_seconds": 0.2, "evaluate": "end", "link_seconds": 1},
)
ENDLESS: dict[str, Any] = {
    "recipe": EXPERIMENT["recipe"] | {"steps": 10**6},
    "matrix": {"strategy": ["ddp", "fsdp"]},
    "measure": EXPERIMENT["measure"] | {"evaluate": "never", "link_seconds": 0},
    "limits": {"trial_seconds": 600},
}


@pytest.fixture(scope="session")
def one(tmp_path_factory: pytest.TempPathFactory, kept_engine: KeptEngine) -> StoredRun:
    """The experiment on this machine."""
    folder = tmp_path_factory.mktemp("one")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)  # where the user's model is
        run_experiment(from_mapping(EXPERIMENT), folder / "run", engine=kept_engine)
    return load_run(folder / "run", verify=True)


def in_order(run: Path) -> list[TrialResult]:
    return sorted(load_run(run, verify=True).trials, key=lambda trial: trial.order)


def under_way(run: Path, results: int) -> Path | None:
    """The folder of the trial that runs after so many have ended."""
    trials = [*(run / "trials").glob("*")]
    running = [trial for trial in trials if not (trial / "result.json").exists()]
    return running[0] if running and len(trials) - len(running) == results else None


def stepping(run: Path, results: int, *, ranks: int = 2, steps: int = 4) -> bool:
    """Tell if each rank of the trial after `number` others has taken that many steps."""
    trial = under_way(run, results)
    told = [None if trial is None else read_progress(trial, rank) for rank in range(ranks)]
    return all(rank is not None and rank.steps >= steps for rank in told)


def pid_of(folder: Path, rank: int) -> int:
    """Return the process of a rank of the trial, as soon as its record has arrived."""
    record = folder / f"rank-{rank}.json"
    wait_for(record.exists)
    return int(json.loads(record.read_text())["pid"])


def given(*settings: str) -> list[str]:
    return [word for setting in settings for word in ("--set", setting)]


def by_strategy(run: StoredRun) -> dict[str, TrialResult]:
    return {trial.strategy: trial for trial in run.trials}


def losses(run: StoredRun, trial: TrialResult) -> list[tuple[int, int, float]]:
    """Rank, step and loss."""
    text = (run.path / "trials" / trial.id / "steps.jsonl").read_text()
    lines = map(json.loads, text.splitlines())
    return [(line["rank"], line["step"], line["loss"]) for line in lines]


def check_lost(trial: TrialResult, node: int, said: str = "") -> None:
    """The trial failed because of that node."""
    assert trial.outcome is Outcome.FAILED
    assert trial.failure is not None
    assert trial.failure.node == node
    assert f"node {node} (" in trial.failure.reason
    assert f"was lost: {said}" in trial.failure.reason


def check_verdicts(run: StoredRun) -> None:
    assert [verdict.equivalent for verdict in present(run.verification).verdicts] == [True] * 3


def check_same(one: StoredRun, two: StoredRun) -> None:
    """Losses equal to the last bit, the same files, the same metrics, the same ones missing."""
    assert {trial.outcome for trial in (*one.trials, *two.trials)} == {Outcome.OK}
    assert by_strategy(two).keys() <= by_strategy(one).keys()
    for strategy, trial in by_strategy(two).items():
        other = by_strategy(one)[strategy]
        assert losses(two, trial) == losses(one, other)
        names = [
            {file.name for file in (run.path / "trials" / there.id).iterdir()}
            for run, there in ((one, other), (two, trial))
        ]
        assert names[0] == names[1]
        assert trial.metrics.keys() == other.metrics.keys()
        assert _lacking(trial) == _lacking(other)


def check_places(run: StoredRun) -> None:
    """Each node has a worker and a server."""
    places = {
        name: [(r.rank, r.node, r.local_rank, r.role, r.device) for r in trial.ranks]
        for name, trial in by_strategy(run).items()
    }
    workers = [(0, 0, 0, "worker", "cpu"), (1, 1, 0, "worker", "cpu")]
    servers = [(2, 0, 1, "server", "cpu"), (3, 1, 1, "server", "cpu")]
    assert places == {"single": workers[:1], "ddp": workers, "ps-sync": [*workers, *servers]}
    environment = json.loads((run.path / "environment.json").read_text())
    assert [node["node"] for node in environment["nodes"]] == [0, 1]


def check_samples(run: StoredRun) -> dict[int, list[dict[str, Any]]]:
    """Each node has sampled its own ranks; the samples by node."""
    file = run.path / "trials" / by_strategy(run)["ddp"].id / "samples.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["at_seconds"] for line in lines] == sorted(line["at_seconds"] for line in lines)
    by_node = {node: [line for line in lines if line["node"] == node] for node in (0, 1)}
    for node, own in by_node.items():
        assert {rank["rank"] for line in own for rank in line["ranks"]} == {node}
    return by_node


def _lacking(trial: TrialResult) -> dict[str, str]:
    """So short a trial may be over before the sampler has seen its ranks, wherever it runs."""
    reasons = trial.missing.items()
    return {name: why for name, why in reasons if "no sample was taken" not in why}
