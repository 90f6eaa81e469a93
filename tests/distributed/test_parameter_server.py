"""Parameter servers in real processes: the same mathematics, or what is promised instead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

import shardmark
from shardmark.config.load import from_mapping
from shardmark.core.recipe import Recipe
from shardmark.equivalence.capture import Capture, RankCapture, capture_steps
from shardmark.equivalence.verdict import ReferenceCache, verdict_on
from shardmark.launch.controller import run_experiment, verify_experiment
from shardmark.results.schema import Outcome, TrialResult
from shardmark.results.verification import Verdict
from shardmark.strategies import build_strategy
from shardmark.strategies.base import RankContext, Server
from shardmark.trials.trial import StrategySpec, Trial
from shardmark.workloads.base import BatchPlan
from tests.distributed.ranks import run_ranks
from tests.distributed.test_outcomes import REPOSITORY, experiment
from tests.distributed.test_verify import RECIPES, STEPS, recipe, trial
from tests.kept_engine import KeptEngine

PROCESSES = 4
REFERENCES = ReferenceCache()
OPTIONS: dict[str, tuple[int, dict[str, Any]]] = {
    "one server": (3, {}),
    "two servers, small buckets": (2, {"servers": 2, "bucket_mb": 0.01}),
}
"""Name -> workers, options."""


def tried(workers: int, wanted: Recipe, options: dict[str, Any]) -> Trial:
    made = trial("ps-sync", wanted, world_size=workers)
    return made.model_copy(update={"strategy": StrategySpec(name="ps-sync", options=options)})


def wanted(workers: int, **changes: Any) -> Recipe:
    return recipe(**{"global_batch": 12 * workers, **changes})


def captured(process: RankContext, of: Trial) -> RankCapture | None:
    """None from a server."""
    strategy = build_strategy(of.strategy.name, of.strategy.options)
    workload = of.workload.build(of.recipe.seed)
    role = strategy.start(workload, of.recipe, process)
    if isinstance(role, Server):
        role.serve()
        return None
    shard = strategy.layout(of.world_size).ranks[process.rank].share
    assert shard is not None
    found = capture_steps(
        role,
        workload,
        of.recipe,
        plan=BatchPlan(global_batch=of.batch_per_step, seed=of.recipe.seed),
        shard=shard,
        steps=STEPS,
        device=torch.device("cpu"),
    )
    role.close()
    return found


def alone() -> Trial:
    """One worker and three servers: nobody else makes a gradient stale."""
    options = {"servers": 3}
    made = trial("ps-async", wanted(1), world_size=1)
    return made.model_copy(update={"strategy": StrategySpec(name="ps-async", options=options)})


def work(process: RankContext) -> dict[Any, RankCapture | None]:
    found: dict[Any, RankCapture | None] = {}
    for name, (workers, options) in OPTIONS.items():
        for label, changes in RECIPES.items():
            found[name, label] = captured(
                process, tried(workers, wanted(workers, **changes), options)
            )
    found["alone"] = captured(process, alone())
    found["bf16 wire"] = captured(process, tried(3, wanted(3), {"wire": "bf16"}))
    return found


@pytest.fixture(scope="module")
def gathered(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, RankCapture | None]]:
    return run_ranks(work, world_size=PROCESSES, directory=tmp_path_factory.mktemp("servers"))


def verdict(gathered: list[dict[Any, RankCapture | None]], key: Any, of: Trial) -> Verdict:
    ranks = [rank for found in gathered if (rank := found[key]) is not None]
    assert len(ranks) == of.world_size
    return verdict_on(Capture.of_ranks(ranks), of, STEPS, REFERENCES)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("label", RECIPES)
@pytest.mark.parametrize("name", OPTIONS)
def test_the_barrier_makes_it_equivalent(
    gathered: list[dict[Any, RankCapture | None]], name: str, label: str
) -> None:
    workers, options = OPTIONS[name]
    of = tried(workers, wanted(workers, **RECIPES[label]), options)
    found = verdict(gathered, (name, label), of)
    assert found.equivalent, [check for check in found.checks if not check.holds]


def test_one_asynchronous_worker_is_a_single_device(
    gathered: list[dict[Any, RankCapture | None]],
) -> None:
    of = alone()
    ranks = [rank for found in gathered if (rank := found["alone"]) is not None]
    found = Capture.of_ranks(ranks)
    expected = REFERENCES.of(of, STEPS)[1].reference
    for name, parameter in expected.tensors["parameters"].items():
        np.testing.assert_allclose(
            found.tensors["parameters"][name], parameter, rtol=1e-6, atol=1e-6
        )
    assert verdict_on(found, of, STEPS, REFERENCES).equivalent


def test_gradients_that_travel_in_bf16_are_noticed(
    gathered: list[dict[Any, RankCapture | None]],
) -> None:
    found = verdict(gathered, "bf16 wire", tried(3, wanted(3), {"wire": "bf16"}))
    assert found.equivalent is False
    assert found.cause is not None
    assert "gradients" in found.cause.first_deviation


ASYNCHRONOUS = ["ps-async", {"name": "ps-bounded", "staleness": 1}]


@pytest.fixture(scope="module")
def ended(
    kept_engine: KeptEngine, tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, str], TrialResult]:
    """Trials in which somebody dies, or is slow."""
    out = tmp_path_factory.mktemp("ends")
    before = set(psutil.Process().children(recursive=True))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(REPOSITORY)
        killed = experiment("killed")
        killed["matrix"]["strategy"] = ["ps-sync", *ASYNCHRONOUS]
        run_experiment(from_mapping(killed), out / "killed", engine=kept_engine)
        dying = experiment("server_dies", recipe={"global_batch": 16, "steps": 200})
        dying["matrix"]["strategy"] = ["ps-async"]
        run_experiment(from_mapping(dying), out / "server", engine=kept_engine)
        early = experiment("dies_at_start")
        early["matrix"]["strategy"] = ["ps-async"]
        run_experiment(from_mapping(early), out / "early", engine=kept_engine)
        slow = experiment("is_slow", slow_ranks={1: 3.0})
        slow["recipe"] = {"global_batch": 16, "steps": 24}
        slow["matrix"] = {"strategy": ["ps-sync", *ASYNCHRONOUS], "world_size": [2]}
        slow["workload"] = {
            "name": "classification",
            "model": "tests.distributed.models:wide",
            "dataset": "digits",
        }
        slow["measure"] = slow["measure"] | {"evaluate": "end"}
        slow["limits"] = {"trial_seconds": 120}
        run_experiment(from_mapping(slow), out / "slow", engine=kept_engine)
    assert not set(psutil.Process().children(recursive=True)) - before
    return {
        (folder, result.strategy): result
        for folder in ("killed", "server", "early", "slow")
        for result in shardmark.load(out / folder).trials
    }


Ended = dict[tuple[str, str], TrialResult]


@pytest.mark.timeout(400)
def test_a_dead_worker_ends_a_synchronous_trial(ended: Ended) -> None:
    result = ended["killed", "ps-sync"]
    assert result.outcome is Outcome.FAILED
    assert result.failure is not None
    assert result.failure.reason == "rank 1 was ended by SIGKILL"
    assert result.total_seconds < 20


@pytest.mark.parametrize("strategy", ["ps-async", "ps-bounded"])
def test_others_train_on_without_a_dead_worker(ended: Ended, strategy: str) -> None:
    result = ended["killed", strategy]
    assert result.outcome is Outcome.OK, result.failure
    by_rank = {rank.rank: rank for rank in result.ranks}
    assert by_rank[1].lost == "was ended by SIGKILL"
    lost = result.metrics["lost_samples"]
    assert lost is not None
    assert lost.value == 8  # the share of 16 samples that it died in
    # 6 steps of 16 samples; what the dead worker had pushed before is trained on, too.
    exchange = by_rank[2].exchange
    assert exchange is not None
    assert exchange.pushes == 11
    assert by_rank[0].samples_total == 8 * 9


def test_a_dead_server_ends_the_trial(ended: Ended) -> None:
    result = ended["server", "ps-async"]
    assert result.outcome is Outcome.FAILED
    assert result.failure is not None
    assert result.failure.reason == "rank 2 was ended by SIGKILL"
    assert result.total_seconds < 20


def test_a_worker_that_never_arrives_ends_the_trial(ended: Ended) -> None:
    result = ended["early", "ps-async"]
    assert result.outcome is Outcome.FAILED
    assert result.failure is not None
    assert result.failure.reason == "rank 1 was ended by SIGKILL"
    assert result.total_seconds < 20


def test_faster_workers_take_more_shares(ended: Ended) -> None:
    taken = {}
    for strategy in ("ps-sync", "ps-async"):
        result = ended["slow", strategy]
        assert result.outcome is Outcome.OK, result.failure
        taken[strategy] = [r.samples_total for r in result.ranks if r.role == "worker"]
        assert sum(taken[strategy]) == 24 * 16
    assert taken["ps-sync"] == [192, 192]
    assert taken["ps-async"][0] > taken["ps-async"][1]


def test_staleness_is_bounded(ended: Ended) -> None:
    sync, bounded = (
        ended["slow", name].metrics["staleness_max"] for name in ("ps-sync", "ps-bounded")
    )
    assert sync is not None
    assert sync.value == 0
    assert bounded is not None
    # Within one step of each other, at most three gradients come between a pull and its push.
    assert bounded.value <= 3


def test_every_gradient_and_parameter_is_counted(ended: Ended) -> None:
    for strategy in ("ps-sync", "ps-async", "ps-bounded"):
        result = ended["slow", strategy]
        parameters = result.metrics["parameter_bytes"]
        pushed, pulled = result.metrics["push_bytes"], result.metrics["pull_bytes"]
        assert parameters is not None
        assert pushed is not None
        assert pulled is not None
        assert pushed.value == pulled.value == parameters.value
        workers = [rank for rank in result.ranks if rank.role == "worker"]
        assert all(r.probe is not None and r.probe.optimizer_state_bytes == 0 for r in workers)


def test_promises_are_verified(kept_engine: KeptEngine, tmp_path: Path) -> None:
    told = experiment("killed")
    told["matrix"] = {"strategy": ASYNCHRONOUS, "world_size": [2]}
    told["workload"] = {
        "name": "classification",
        "model": "tests.distributed.models:small",
        "dataset": "digits",
        "validation_samples": 64,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(REPOSITORY)
        found = verify_experiment(from_mapping(told), tmp_path / "verification", engine=kept_engine)
    for one in found.verdicts:
        assert one.equivalent is None, one.cause
        assert one.guarantee is not None
        assert all(check.holds for check in one.checks)
        names = {check.name for check in one.checks}
        assert {"gradients used once", "shares that were trained on once"} <= names
        assert ("staleness within the bound" in names) == (one.strategy == "ps-bounded")
