"""Trials of parameter servers in which a rank dies or is slow; the guarantees hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import shardmark
from shardmark.base.results.schema import Outcome, TrialResult
from shardmark.bench.launch.session import run_experiment, verify_experiment
from shardmark.experiment.load import from_mapping
from tests.distributed.experiments import experiment
from tests.distributed.test_outcomes import descendants
from tests.kept_engine import KeptEngine

ASYNCHRONOUS = ["ps-async", {"name": "ps-bounded", "staleness": 1}]
Ended = dict[tuple[str, str], TrialResult]


@pytest.fixture(scope="module")
def ended(kept_engine: KeptEngine, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """Trials in which somebody dies, or is slow."""
    out = tmp_path_factory.mktemp("ends")
    before = descendants()
    everyone = {"strategy": ["ps-sync", *ASYNCHRONOUS]}
    alone = {"strategy": ["ps-async"]}
    slow: dict[str, Any] = {"measure": {"repeats": 1, "evaluate": "end"}, "slow_ranks": {1: 3.0}}
    mappings = {
        "killed": experiment("misbehaving:killed", matrix={"strategy": ["ps-sync", "ps-async"]}),
        "server_dies": experiment("misbehaving:server_dies", matrix=alone, recipe={"steps": 200}),
        "dies_at_start": experiment("misbehaving:dies_at_start", matrix=alone),
        "slow": experiment("models:wide", matrix=everyone, recipe={"steps": 24}, **slow),
    }
    for name, mapping in mappings.items():
        run_experiment(from_mapping(mapping), out / name, engine=kept_engine)
    assert not descendants() - before
    return {
        (name, result.strategy): result
        for name in mappings
        for result in shardmark.load(out / name).trials
    }


@pytest.mark.parametrize(
    ("name", "strategy", "rank"),
    [
        ("killed", "ps-sync", 1),
        ("killed", "ps-async", 1),
        ("server_dies", "ps-async", 2),
        ("dies_at_start", "ps-async", 1),
    ],
)
def test_death_of_a_worker_or_server_ends_the_trial(
    ended: Ended, name: str, strategy: str, rank: int
) -> None:
    result = ended[name, strategy]
    assert result.outcome is Outcome.FAILED
    assert result.failure is not None
    assert result.failure.reason == f"rank {rank} was ended by SIGKILL"


def test_faster_workers_take_more_shares(ended: Ended) -> None:
    taken = {}
    for strategy in ("ps-sync", "ps-async"):
        result = ended["slow", strategy]
        assert result.outcome is Outcome.OK, result.failure
        taken[strategy] = [r.samples_total for r in result.ranks if r.role == "worker"]
        assert sum(taken[strategy]) == 24 * 16
    assert taken["ps-sync"] == [192, 192]
    assert taken["ps-async"][0] > taken["ps-async"][1]


def value(result: TrialResult, name: str) -> float:
    metric = result.metrics[name]
    assert metric is not None
    return metric.value


def test_staleness_is_bounded_and_traffic_is_counted(ended: Ended) -> None:
    assert value(ended["slow", "ps-sync"], "staleness_max") == 0
    # Within one step of each other, at most three gradients come between a pull and its push.
    assert value(ended["slow", "ps-bounded"], "staleness_max") <= 3
    for strategy in ("ps-sync", "ps-async", "ps-bounded"):
        result = ended["slow", strategy]
        counted = {value(result, f"{what}_bytes") for what in ("parameter", "push", "pull")}
        assert len(counted) == 1
        workers = [rank for rank in result.ranks if rank.role == "worker"]
        assert all(r.probe is not None and r.probe.optimizer_state_bytes == 0 for r in workers)


def test_guarantees_are_verified(kept_engine: KeptEngine, tmp_path: Path) -> None:
    mapping = experiment(matrix={"strategy": ASYNCHRONOUS}, workload={"validation_samples": 64})
    made = verify_experiment(from_mapping(mapping), tmp_path / "verification", engine=kept_engine)
    for verdict in made.verdicts:
        assert verdict.equivalent is None, verdict.cause
        assert verdict.guarantee is not None
        assert all(check.holds for check in verdict.checks)
        names = {check.name for check in verdict.checks}
        assert {"gradients used once", "shares that were trained on once"} <= names
        assert ("staleness within the bound" in names) == (verdict.strategy == "ps-bounded")
