"""Sharding the work must not change what is learned."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shardmark.core.recipe import Optimizer, Recipe
from shardmark.core.shares import Shard, StepShard
from shardmark.equivalence.reference import Reference
from shardmark.measure.step.collectives import CollectiveCounter
from shardmark.measure.step.recorder import NoSpans
from shardmark.results.schema import CollectiveRecord
from shardmark.strategies import build_strategy
from shardmark.strategies.base import RankContext, Server
from shardmark.train.probe import HeldSpans
from shardmark.train.record import weights_sha256
from shardmark.train.schedule import seed_generators, step_seed
from shardmark.workloads import build_workload
from shardmark.workloads.base import BatchPlan
from tests.distributed.ranks import run_ranks

STEPS = 3
PLAN = BatchPlan(global_batch=32, seed=3)
SGD = Optimizer(name="sgd", lr=0.01, momentum=0.9, weight_decay=5e-4)
RELATIVE = 1e-5
"""Largest allowed difference of a parameter tensor, in units of its own norm."""
TWO_RANKS = ("ddp", "fsdp", "fsdp-grad-op", "zero-0", "zero-1", "zero-2", "zero-3")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A recipe and a model that every strategy must train as the reference does."""

    recipe: Recipe
    model: str


def case(model: str, **recipe: Any) -> Case:
    common = {"global_batch": 32, "steps": STEPS, "optimizer": SGD, "seed": 3}
    return Case(recipe=Recipe.model_validate(common | recipe), model=model)


CASES = {
    "wide sgd": case("tests.distributed.models:wide"),
    "small clipped": case("tests.distributed.models:small", gradient_clipping=0.1),
}
"""`test_verify` has every strategy on other recipes, with tolerances from rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    initial_sha256: str
    losses: list[float]
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]
    held: dict[str, int]
    collectives: dict[str, CollectiveRecord]


def workload_of(tried: Case) -> Any:
    options = {"name": "classification", "model": tried.model, "dataset": "digits"}
    return build_workload(options, seed=tried.recipe.seed)


def train(process: RankContext, name: str, tried: Case, options: dict[str, Any]) -> Trained:
    workload = workload_of(tried)
    worker = build_strategy(name, options).start(workload, tried.recipe, process)
    assert not isinstance(worker, Server)
    initial = weights_sha256(worker.full_parameters())
    shard = Shard(index=process.rank, count=process.world_size)
    batches = workload.batches(PLAN, shard)
    losses = []
    for step in range(STEPS):
        seed = step_seed(tried.recipe.seed, StepShard(step=step, shard=shard))
        seed_generators(seed, process.device)
        losses.append(float(worker.step(next(batches), NoSpans())))
    parameters, buffers = worker.full_parameters(), worker.buffers()
    held = HeldSpans(worker)
    worker.step(next(batches), held)
    with CollectiveCounter() as counter:
        worker.step(next(batches), NoSpans())
    return Trained(
        initial_sha256=initial,
        losses=losses,
        parameters=parameters,
        buffers=buffers,
        held=held.largest,
        collectives=counter.counts,
    )


def train_all(
    process: RankContext, work: list[tuple[str, str, dict[str, Any]]]
) -> dict[Any, Trained]:
    return {(n, c): train(process, n, CASES[c], options) for n, c, options in work}


def reference(name: str, ranks: int) -> tuple[Reference, str, list[list[float]]]:
    """After the steps; its initial weights' hash and each step's losses by rank."""
    tried = CASES[name]
    torch.set_num_threads(1)
    alone = Reference(workload_of(tried), tried.recipe, shares=ranks, plan=PLAN, total_steps=STEPS)
    initial = weights_sha256(alone.full_parameters())
    return alone, initial, [[float(loss) for loss in alone.step()] for _ in range(STEPS)]


def check(trained: Trained, expected: tuple[Reference, str, list[list[float]]], rank: int) -> None:
    alone, initial_sha256, losses = expected
    assert trained.initial_sha256 == initial_sha256
    assert trained.losses == pytest.approx([step[rank] for step in losses], rel=RELATIVE)
    for mine, wanted in (
        (trained.parameters, alone.full_parameters()),
        (trained.buffers, dict(alone.buffers(rank))),
    ):
        assert mine.keys() == wanted.keys()
        for name, tensor in wanted.items():
            difference = (mine[name].float() - tensor.float()).norm()
            assert difference <= RELATIVE * tensor.float().norm() + 1e-9, name


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Trained]]:
    """Every strategy, in one group of two ranks, since a spawn costs seconds."""
    work: list[tuple[str, str, dict[str, Any]]] = [(name, "wide sgd", {}) for name in TWO_RANKS]
    return run_ranks(train_all, work, world_size=2, directory=tmp_path_factory.mktemp("two"))


@pytest.mark.timeout(400)
def test_two_ranks_end_where_one_process_playing_both_does(
    two_ranks: list[dict[Any, Trained]],
) -> None:
    expected = reference("wide sgd", ranks=2)
    for rank, trained in enumerate(two_ranks):
        for name in TWO_RANKS:
            check(trained[name, "wide sgd"], expected, rank)


def test_hybrid_on_four_ranks(tmp_path: Path) -> None:
    tried = "small clipped"
    work: list[tuple[str, str, dict[str, Any]]] = [("fsdp-hybrid", tried, {"shard_group": 2})]
    expected = reference(tried, ranks=4)
    for rank, found in enumerate(run_ranks(train_all, work, world_size=4, directory=tmp_path)):
        trained = found["fsdp-hybrid", tried]
        check(trained, expected, rank)
        assert {"all_gather", "reduce_scatter", "all_reduce"} <= trained.collectives.keys()


def test_what_is_held_is_what_the_strategy_shards(two_ranks: list[dict[Any, Trained]]) -> None:
    """SGD with momentum: parameters, gradients and momentum are P bytes each when whole."""
    held = {name: two_ranks[0][name, "wide sgd"].held for name in TWO_RANKS}
    whole = held["ddp"]["parameter_bytes"]
    assert set(held["ddp"].values()) == {whole}
    assert held["fsdp"] == dict.fromkeys(held["fsdp"], pytest.approx(whole / 2, rel=0.01))
    assert held["zero-0"]["optimizer_state_bytes"] == whole
    # DeepSpeed's stages 1 to 3 hold half of the momentum and half of an fp32 copy.
    for stage in ("zero-1", "zero-2", "zero-3"):
        assert held[stage]["optimizer_state_bytes"] == pytest.approx(whole, rel=0.01)
    # Half, and the layer whose gradient is under way.
    assert held["zero-2"]["gradient_bytes"] < 0.8 * whole


def test_collectives_carry_what_the_strategy_says(two_ranks: list[dict[Any, Trained]]) -> None:
    trained = {name: two_ranks[0][name, "wide sgd"] for name in TWO_RANKS}
    whole = trained["ddp"].held["parameter_bytes"]
    assert trained["ddp"].collectives["all_reduce"].payload_bytes == whole
    # A rank's own part of every gather: half of the parameters, before forward and backward.
    assert trained["fsdp"].collectives["all_gather"].payload_bytes == pytest.approx(whole, rel=0.01)
    assert trained["fsdp-grad-op"].collectives["all_gather"].payload_bytes == pytest.approx(
        whole / 2, rel=0.01
    )
    assert trained["fsdp"].collectives["reduce_scatter"].payload_bytes == pytest.approx(
        whole, rel=0.01
    )
