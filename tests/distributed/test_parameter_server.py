"""Parameter servers in real processes: the same mathematics, or what is promised instead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import shardmark
from shardmark.config.load import from_mapping
from shardmark.core.recipe import Recipe
from shardmark.equivalence.capture import Capture, capture_steps
from shardmark.equivalence.verdict import ReferenceCache, verdict_on
from shardmark.launch.controller import run_experiment, verify_experiment
from shardmark.results.schema import Outcome, TrialResult
from shardmark.results.verification import Verdict
from shardmark.strategies import build_strategy
from shardmark.strategies.base import RankContext, Server
from shardmark.trials.trial import StrategySpec, Trial
from shardmark.workloads import build_workload
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


def captured(process: RankContext, of: Trial) -> Capture | None:
    """None from a server."""
    strategy = build_strategy(of.strategy.name, of.strategy.options)
    workload = build_workload(of.workload, of.recipe.seed)
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


def work(process: RankContext) -> dict[Any, Capture | None]:
    found: dict[Any, Capture | None] = {}
    for name, (workers, options) in OPTIONS.items():
        for label, changes in RECIPES.items():
            found[name, label] = captured(
                process, tried(workers, wanted(workers, **changes), options)
            )
    found["alone"] = captured(process, alone())
    found["bf16 wire"] = captured(process, tried(3, wanted(3), {"wire": "bf16"}))
    return found


@pytest.fixture(scope="module")
def gathered(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Capture | None]]:
    return run_ranks(work, world_size=PROCESSES, directory=tmp_path_factory.mktemp("servers"))


def verdict(gathered: list[dict[Any, Capture | None]], key: Any, of: Trial) -> Verdict:
    ranks = [rank for captures in gathered if (rank := captures[key]) is not None]
    assert len(ranks) == of.world_size
    return verdict_on(Capture.of_shares(ranks), of, STEPS, REFERENCES)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("label", RECIPES)
@pytest.mark.parametrize("name", OPTIONS)
def test_the_barrier_makes_it_equivalent(
    gathered: list[dict[Any, Capture | None]], name: str, label: str
) -> None:
    workers, options = OPTIONS[name]
    of = tried(workers, wanted(workers, **RECIPES[label]), options)
    judged = verdict(gathered, (name, label), of)
    assert judged.equivalent, [check for check in judged.checks if not check.holds]


def test_one_asynchronous_worker_is_equivalent_and_a_bf16_wire_is_not(
    gathered: list[dict[Any, Capture | None]],
) -> None:
    assert verdict(gathered, "alone", alone()).equivalent
    judged = verdict(gathered, "bf16 wire", tried(3, wanted(3), {"wire": "bf16"}))
    assert judged.equivalent is False
    assert judged.cause is not None
    assert "gradients" in judged.cause.first_deviation


ASYNCHRONOUS = ["ps-async", {"name": "ps-bounded", "staleness": 1}]


@pytest.fixture(scope="module")
def ended(
    kept_engine: KeptEngine, tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, str], TrialResult]:
    """Trials in which somebody dies, or is slow."""
    out = tmp_path_factory.mktemp("ends")
    before = set(psutil.Process().children(recursive=True))
    told = {
        "killed": experiment("killed"),
        "server_dies": experiment("server_dies", recipe={"global_batch": 16, "steps": 200}),
        "dies_at_start": experiment("dies_at_start"),
        "slow": experiment(
            "is_slow", slow_ranks={1: 3.0}, recipe={"global_batch": 16, "steps": 24}
        ),
    }
    for name, mapping in told.items():
        everyone = ["ps-sync"] if name in {"killed", "slow"} else []
        asynchronous = ASYNCHRONOUS if everyone else ["ps-async"]
        mapping["matrix"]["strategy"] = [*everyone, *asynchronous]
    slow = told["slow"]
    del slow["matrix"]["workload.model"]
    slow["workload"] |= {"model": "tests.distributed.models:wide"}
    slow["measure"] = slow["measure"] | {"evaluate": "end"}
    slow["limits"] = {"trial_seconds": 120}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(REPOSITORY)
        for name, mapping in told.items():
            run_experiment(from_mapping(mapping), out / name, engine=kept_engine)
    assert not set(psutil.Process().children(recursive=True)) - before
    return {
        (name, result.strategy): result
        for name in told
        for result in shardmark.load(out / name).trials
    }


Ended = dict[tuple[str, str], TrialResult]


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("name", "strategy", "rank"),
    [("killed", "ps-sync", 1), ("server_dies", "ps-async", 2), ("dies_at_start", "ps-async", 1)],
)
def test_who_cannot_be_missed_ends_the_trial(
    ended: Ended, name: str, strategy: str, rank: int
) -> None:
    """A worker where all are needed, a server, and a worker that never arrives."""
    result = ended[name, strategy]
    assert result.outcome is Outcome.FAILED
    assert result.failure is not None
    assert result.failure.reason == f"rank {rank} was ended by SIGKILL"
    assert result.total_seconds < 20


@pytest.mark.parametrize("strategy", ["ps-async", "ps-bounded"])
def test_others_train_on_without_a_dead_worker(ended: Ended, strategy: str) -> None:
    result = ended["killed", strategy]
    assert result.outcome is Outcome.OK, result.failure
    by_rank = {rank.rank: rank for rank in result.ranks}
    assert by_rank[1].lost == "was ended by SIGKILL"
    assert value(result, "lost_samples") == 8  # the share of 16 samples that it died in
    # 6 steps of 16 samples; what the dead worker had pushed before is trained on, too.
    exchange = by_rank[2].exchange
    assert exchange is not None
    assert exchange.pushes == 11
    assert by_rank[0].samples_total == 8 * 9


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
    assert metric.value is not None
    return metric.value


def test_staleness_is_bounded_and_every_gradient_and_parameter_is_counted(ended: Ended) -> None:
    assert value(ended["slow", "ps-sync"], "staleness_max") == 0
    # Within one step of each other, at most three gradients come between a pull and its push.
    assert value(ended["slow", "ps-bounded"], "staleness_max") <= 3
    for strategy in ("ps-sync", "ps-async", "ps-bounded"):
        result = ended["slow", strategy]
        counted = {value(result, f"{what}_bytes") for what in ("parameter", "push", "pull")}
        assert len(counted) == 1
        workers = [rank for rank in result.ranks if rank.role == "worker"]
        assert all(r.probe is not None and r.probe.optimizer_state_bytes == 0 for r in workers)


def test_promises_are_verified(kept_engine: KeptEngine, tmp_path: Path) -> None:
    told = experiment("killed")
    told["matrix"] = {"strategy": ASYNCHRONOUS, "world_size": [2]}
    told["workload"] |= {"model": "tests.distributed.models:small", "validation_samples": 64}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(REPOSITORY)
        made = verify_experiment(from_mapping(told), tmp_path / "verification", engine=kept_engine)
    for judged in made.verdicts:
        assert judged.equivalent is None, judged.cause
        assert judged.guarantee is not None
        assert all(check.holds for check in judged.checks)
        names = {check.name for check in judged.checks}
        assert {"gradients used once", "shares that were trained on once"} <= names
        assert ("staleness within the bound" in names) == (judged.strategy == "ps-bounded")
