"""The prover is proven: it accepts what is shipped, and names each planted fault."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardmark.core.recipe import Limits, Measure, Optimizer, Recipe
from shardmark.core.shares import Shard
from shardmark.equivalence.capture import Capture, capture_steps
from shardmark.equivalence.verdict import ReferenceCache, verdict_on
from shardmark.results.verification import Verdict
from shardmark.strategies import build_strategy
from shardmark.strategies.base import RankContext, Server
from shardmark.trials.trial import StrategySpec, Trial
from shardmark.workloads import build_workload
from shardmark.workloads.base import BatchPlan
from shardmark.workloads.vision.options import ClassificationOptions
from tests.distributed.faults import FAULTS
from tests.distributed.ranks import run_ranks

STEPS = 3
SMALL = "tests.distributed.models:small"
WORKLOAD = {
    "name": "classification",
    "model": SMALL,
    "dataset": "digits",
    "validation_samples": 100,
}
SGD = Optimizer(name="sgd", lr=0.05, momentum=0.9, weight_decay=0.1)
ADAMW = Optimizer(name="adamw", lr=1e-3, weight_decay=0.1)
SHIPPED = ("ddp", "fsdp", "fsdp-grad-op", "zero-0", "zero-1", "zero-2", "zero-3")
SEEDS = range(20)
REFERENCES = ReferenceCache()

RECIPES: dict[str, dict[str, Any]] = {
    "sgd": {},
    "adamw": {"optimizer": ADAMW},
    "bf16": {"precision": "bf16"},
    "accumulated, checkpointed": {"gradient_accumulation": 2, "activation_checkpointing": True},
    "clipped": {"gradient_clipping": 0.1},
}


def recipe(seed: int = 3, **changes: Any) -> Recipe:
    common = {"global_batch": 32, "steps": STEPS, "optimizer": SGD, "seed": seed}
    return Recipe.model_validate(common | changes)


def trial(strategy: str, wanted: Recipe, world_size: int = 2, **workload: Any) -> Trial:
    return Trial(
        id=f"{strategy}-{world_size}",
        experiment="verify",
        workload=ClassificationOptions.model_validate(WORKLOAD | workload),
        recipe=wanted,
        strategy=StrategySpec(name=strategy),
        world_size=world_size,
        measure=Measure(),
        limits=Limits(),
        device_type="cpu",
    )


def captured(process: RankContext, tried: Trial, begin: Any = None) -> Capture:
    workload = build_workload(tried.workload, tried.recipe.seed)
    if begin is None:
        worker = build_strategy(tried.strategy.name, {}).start(workload, tried.recipe, process)
        assert not isinstance(worker, Server)
        shard = Shard(index=process.rank, count=process.world_size)
    else:
        started = begin(workload, tried.recipe, process)
        worker, shard = started.worker, started.shard
    return capture_steps(
        worker,
        workload,
        tried.recipe,
        plan=BatchPlan(global_batch=tried.batch_per_step, seed=tried.recipe.seed),
        shard=shard,
        steps=STEPS,
        device=torch.device("cpu"),
    )


def fault_recipe(fault: str) -> Recipe:
    return recipe(gradient_accumulation=4 if fault == "accumulation undivided" else 1)


def work(process: RankContext) -> dict[Any, Capture]:
    """Everything that needs two ranks, in one group."""
    found: dict[Any, Capture] = {}
    for name in SHIPPED:
        for label, changes in RECIPES.items():
            found["shipped", name, label] = captured(process, trial(name, recipe(**changes)))
    for seed in SEEDS:
        for name in ("ddp", "fsdp"):
            found["seed", name, seed] = captured(process, trial(name, recipe(seed)))
    for fault, (begin, _) in FAULTS.items():
        found["fault", fault] = captured(process, trial("ddp", fault_recipe(fault)), begin)
    return found


@pytest.fixture(scope="module")
def gathered(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Capture]]:
    return run_ranks(work, world_size=2, directory=tmp_path_factory.mktemp("verify"))


def verdict(gathered: list[dict[Any, Capture]], key: Any, tried: Trial) -> Verdict:
    # Shares were taken from rank 0's place on every rank: the tensors are rank 0's.
    ranks = [found[key] for found in gathered]
    return verdict_on(Capture.of_shares(ranks), tried, STEPS, REFERENCES)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("label", RECIPES)
@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_strategies_are_equivalent(
    gathered: list[dict[Any, Capture]], name: str, label: str
) -> None:
    found = verdict(gathered, ("shipped", name, label), trial(name, recipe(**RECIPES[label])))
    assert found.equivalent, [check for check in found.checks if not check.holds]
    assert found.cause is None


@pytest.mark.parametrize("seed", SEEDS)
def test_no_false_alarm(gathered: list[dict[Any, Capture]], seed: int) -> None:
    for name in ("ddp", "fsdp"):
        found = verdict(gathered, ("seed", name, seed), trial(name, recipe(seed)))
        assert found.equivalent, [check for check in found.checks if not check.holds]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_refused_and_named(
    gathered: list[dict[Any, Capture]], fault: str
) -> None:
    found = verdict(gathered, ("fault", fault), trial("ddp", fault_recipe(fault)))
    assert found.equivalent is False
    assert found.cause is not None
    assert found.cause.text == FAULTS[fault][1], found.cause
    assert found.cause.evidence
