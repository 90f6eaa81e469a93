"""Local SGD and DiLoCo on two ranks: verdicts, their papers' algorithms, and traffic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardmark.core.recipe import Recipe
from shardmark.core.shares import Shard
from shardmark.core.traffic import ModelSize
from shardmark.costs import cost_model
from shardmark.costs.base import Cell
from shardmark.equivalence.capture import Capture
from shardmark.measure.step.collectives import CollectiveCounter
from shardmark.measure.step.recorder import NoSpans
from shardmark.results.schema import ProbeRecord
from shardmark.strategies import build_strategy
from shardmark.strategies.base import RankContext
from shardmark.strategies.local_steps.worker import LocalWorker
from shardmark.train.probe import probe
from shardmark.workloads import build_workload
from shardmark.workloads.base import BatchPlan, Workload
from tests.distributed.captures import (
    GROUPED,
    RECIPES,
    WORKLOAD,
    Captures,
    Case,
    capture_all,
    check_verdict,
    recipe,
    trial,
)
from tests.distributed.faults import Started
from tests.distributed.models import wide
from tests.distributed.ranks import run_ranks
from tests.unit.training.toy import ToyWorkload, assert_same, plain
from tests.unit.training.toy import recipe as toy_recipe

pytestmark = pytest.mark.timeout(400)

STEPS = 5
WIDE = WORKLOAD.model_copy(update={"model": "tests.distributed.models:wide"})
LOUD = WORKLOAD.model_copy(update={"model": "tests.distributed.models:Loud"})


def case(
    name: str, workload: Any = WORKLOAD, own: dict[str, Any] | None = None, **changes: Any
) -> Case:
    """Two rounds of two steps, and the first step of a third."""
    asked = recipe(**{"steps": STEPS, **changes})
    return Case(trial=trial(name, asked, workload=workload, **{"period_steps": 2, **(own or {})}))


EQUIVALENT = {
    **{
        f"local-sgd, {label}": case("local-sgd", **RECIPES[label])
        for label in ("sgd", "clipped", "accumulated, checkpointed")
    },
    "local-sgd, fp16": case("local-sgd", LOUD, precision="fp16", steps=8),
    "local-sgd, groups": case("local-sgd", GROUPED, gradient_accumulation=2),
    "diloco, sgd": case("diloco"),
    "diloco, adamw, clipped": case("diloco", gradient_clipping=0.1, **RECIPES["adamw"]),
    "diloco, fragments": case("diloco", own={"fragments": 2}, **RECIPES["adamw"]),
    "diloco, heavy ball": case("diloco", own={"outer_nesterov": False}),
    "diloco, plain": case("diloco", own={"outer_momentum": 0.0}),
    "diloco, groups": case("diloco", GROUPED),
}


def first_round_discarded(workload: Workload, asked: Recipe, process: RankContext) -> Started:
    """torchft's `init_sync`: the first meeting takes rank 0's weights for everybody's."""
    options = {"period_steps": 2}
    worker: Any = build_strategy("diloco", options).start(workload, asked, process)
    synchronise: Callable[..., None] = worker._synchronise
    met: list[None] = []

    def after_broadcast(names: list[str]) -> None:
        for name in names if not met else ():
            dist.broadcast(worker._trained[name].detach(), src=0)
        met.append(None)
        synchronise(names)

    worker._synchronise = after_broadcast
    return Started(worker, Shard(index=process.rank, count=process.world_size))


FAULTY = {
    "first round discarded": Case(
        trial=case("diloco").trial,
        begin=first_round_discarded,
        cause="only rank 0's steps of the first round are used: the others are discarded",
    )
}
CASES = EQUIVALENT | FAULTY

DILOCO = {"period_steps": 2, "outer_learning_rate": 0.5, "outer_momentum": 0.8}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranked:
    """What one rank found."""

    captures: dict[str, Capture | None]
    trained: dict[str, dict[str, Tensor]]
    payload_bytes: dict[str, float]
    """Handed to all-reduces in two rounds, by strategy."""
    probes: dict[str, ProbeRecord]


def work(process: RankContext) -> Ranked:
    own = {"local-sgd": {"period_steps": 4}, "diloco": {"period_steps": 4, "fragments": 3}}
    counted = {name: counts(process, name, options) for name, options in own.items()}
    return Ranked(
        captures=capture_all(process, CASES),
        trained={
            "local-sgd": taken(process, "local-sgd", {"period_steps": 2}),
            "diloco": taken(process, "diloco", DILOCO),
        },
        payload_bytes={name: payload_bytes for name, (payload_bytes, _) in counted.items()},
        probes={name: probed for name, (_, probed) in counted.items()},
    )


def started(process: RankContext, name: str, options: dict[str, Any]) -> tuple[Any, Any]:
    workload = ToyWorkload(plain)
    worker = build_strategy(name, options).start(workload, toy_recipe(), process)
    shard = Shard(index=process.rank, count=process.world_size)
    return worker, workload.batches(BatchPlan(global_batch=8, seed=5), shard)


def taken(process: RankContext, name: str, options: dict[str, Any]) -> dict[str, Tensor]:
    """Outer parameters, or the mean, after five steps."""
    worker, batches = started(process, name, options)
    for _ in range(STEPS):
        worker.step(next(batches), NoSpans())
    parameters: dict[str, Tensor] = worker.full_parameters()
    return parameters


def counts(process: RankContext, name: str, options: dict[str, Any]) -> tuple[float, ProbeRecord]:
    workload = build_workload(WIDE, seed=3)
    worker = build_strategy(name, options).start(workload, recipe(), process)
    assert isinstance(worker, LocalWorker)
    shard = Shard(index=process.rank, count=process.world_size)
    batches = workload.batches(BatchPlan(global_batch=8, seed=3), shard)
    with CollectiveCounter() as counter:
        for _ in range(2 * worker.round_steps()):
            worker.step(next(batches), NoSpans())
    probed = probe(worker, lambda spans: worker.step(next(batches), spans), process.device)
    return counter.counts["all_reduce"].payload_bytes, probed


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Ranked]:
    return run_ranks(work, world_size=2, directory=tmp_path_factory.mktemp("local"))


@pytest.mark.parametrize("name", CASES)
def test_ranks_train_as_defined_or_the_fault_is_named(ranks: list[Ranked], name: str) -> None:
    captures: Captures = [rank.captures for rank in ranks]
    check_verdict(captures, name, CASES[name])


def by_the_paper(name: str) -> dict[str, Tensor]:
    """Algorithm 1 of Douillard et al. in plain torch; with the mean for an update, local SGD."""
    workload = ToyWorkload(plain)
    outer = workload.build_model()
    slow = torch.optim.SGD(outer.parameters(), lr=0.5, momentum=0.8, nesterov=True)
    models = [workload.build_model() for _ in range(2)]
    inner = [
        torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01) for m in models
    ]
    for step in range(STEPS):
        for rank, (model, optimizer) in enumerate(zip(models, inner, strict=True)):
            first = (8 * step + 4 * rank) % 24
            optimizer.zero_grad()
            workload.mean_loss(model, workload.batch(range(first, first + 4))).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        if step % 2 == 0 and (name == "diloco" or step < STEPS - 1):
            continue
        with torch.no_grad():
            for own, *others in zip(
                outer.parameters(), *(m.parameters() for m in models), strict=True
            ):
                mean = sum(others) / 2
                own.grad = own - mean
                if name == "local-sgd":
                    own.copy_(mean)
        if name == "diloco":
            slow.step()
        for model in models:
            model.load_state_dict(outer.state_dict())
    return {key: parameter.detach() for key, parameter in outer.named_parameters()}


@pytest.mark.parametrize("name", ["local-sgd", "diloco"])
def test_parameters_equal_those_of_the_papers_algorithm(ranks: list[Ranked], name: str) -> None:
    """After five steps: the mean of the ranks, or the outer parameters of the second meeting."""
    for rank in ranks:
        assert_same(rank.trained[name], by_the_paper(name))


@pytest.mark.parametrize("name", ["local-sgd", "diloco"])
def test_a_round_sends_the_bytes_of_one_step_of_ddp(ranks: list[Ranked], name: str) -> None:
    """Counted over two rounds, and by the probe, which sees a round's end in each step."""
    elements = sum(p.numel() for p in wide(num_classes=10).parameters())
    size = ModelSize(parameters=elements, trained_parameters=elements)
    ddp, own = (
        cost_model(build_strategy(each, options)).required_traffic(
            Cell(size=size, recipe=toy_recipe(), world_size=2)
        )
        for each, options in (("ddp", {}), (name, {"period_steps": 4}))
    )
    assert own.required_bytes == ddp.required_bytes / 4
    (defined,) = own.traffic
    for rank in ranks:
        assert rank.payload_bytes[name] / 8 == defined.payload_bytes
        collectives = rank.probes[name].collectives
        assert collectives is not None
        assert collectives["all_reduce"].payload_bytes == defined.payload_bytes
        assert collectives["all_reduce"].calls == {"local-sgd": 1, "diloco": 3}[name] / 4
        assert rank.probes[name].exposed_communication_seconds is not None
