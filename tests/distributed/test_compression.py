"""DDP's compressed reductions on real ranks: proven, counted and held."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from shardmark.core.recipe import Optimizer
from shardmark.core.shares import Shard
from shardmark.core.traffic import ModelSize
from shardmark.costs import cost_model
from shardmark.costs.base import Cell
from shardmark.equivalence.capture import Capture
from shardmark.measure.step.collectives import CollectiveCounter
from shardmark.measure.step.recorder import NoSpans
from shardmark.strategies import build_strategy
from shardmark.strategies.base import RankContext, Server, Worker
from shardmark.strategies.ddp import DDP
from shardmark.train.probe import HeldSpans, model_counts
from shardmark.workloads import build_workload
from shardmark.workloads.base import BatchPlan
from tests.distributed.captures import (
    WORKLOAD,
    Captures,
    Case,
    capture_all,
    check_verdict,
    recipe,
    trial,
)
from tests.distributed.faults import Started, ddp, start
from tests.distributed.models import Loud
from tests.distributed.ranks import run_ranks

WIDE = WORKLOAD.model_copy(update={"model": "tests.distributed.models:wide"})
LOUD = WORKLOAD.model_copy(update={"model": f"tests.distributed.models:{Loud.__name__}"})
SMALL_BUCKETS: dict[str, Any] = {"bucket_mb": 0.01}
"""Several, of which all but the first are filled anew after a process's first step."""
ADAMW: dict[str, Any] = {"optimizer": Optimizer(name="adamw", lr=1e-3, weight_decay=0.1)}
CLIPPED: dict[str, Any] = {"gradient_accumulation": 2, "gradient_clipping": 0.1}
POWERSGD: dict[str, Any] = {"compress": "powersgd"}

PROVEN = {
    "zro, bf16": Case(trial=trial("zro", recipe(**ADAMW), compress="bf16")),
    "zro, powersgd": Case(trial=trial("zro", recipe(), **POWERSGD)),
    "bf16": Case(trial=trial("ddp", recipe(**CLIPPED), compress="bf16")),
    "fp16": Case(trial=trial("ddp", recipe(**ADAMW), compress="fp16", static_graph=True)),
    "bf16 in a recipe of fp16": Case(
        trial=trial("ddp", recipe(precision="fp16"), workload=LOUD, compress="bf16")
    ),
    "powersgd": Case(trial=trial("ddp", recipe(**CLIPPED), **POWERSGD)),
    "powersgd of rank 3, small buckets": Case(
        trial=trial("ddp", recipe(**ADAMW), **POWERSGD, powersgd_rank=3, **SMALL_BUCKETS)
    ),
    "powersgd in a recipe of bf16": Case(
        trial=trial("ddp", recipe(precision="bf16"), **POWERSGD, static_graph=True)
    ),
}


def forgets_errors(workload: Any, asked: Any, process: RankContext) -> Started:
    started = start("ddp", workload, asked, process, **POWERSGD)
    started.worker.error_feedback.__self__.state.use_error_feedback = False
    return started


REFUSED = {
    "says bf16": Case(
        trial=trial("ddp", recipe(), compress="bf16"),
        begin=ddp,
        cause="gradients are not reduced in bf16",
    ),
    "says powersgd": Case(
        trial=trial("ddp", recipe(), **POWERSGD),
        begin=ddp,
        cause="it computes as one device does, and not as it says: "
        "gradients are reduced by PowerSGD of rank 1",
    ),
    "forgets errors": Case(
        trial=trial("ddp", recipe(), **POWERSGD),
        begin=forgets_errors,
        cause="no known explanation reproduces the numbers",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    payload_bytes: int
    held_bytes: int
    """Of gradients, and of what PowerSGD keeps."""


def begin(process: RankContext, options: dict[str, Any]) -> tuple[Worker, Any]:
    workload = build_workload(WIDE, seed=3)
    worker = build_strategy("ddp", options).start(workload, recipe(), process)
    assert not isinstance(worker, Server)
    shard = Shard(index=process.rank, count=process.world_size)
    return worker, workload.batches(BatchPlan(global_batch=32, seed=3), shard)


def counted(process: RankContext, options: dict[str, Any]) -> Counted:
    """In the fourth step."""
    worker, batches = begin(process, options)
    for _ in range(3):
        worker.step(next(batches), NoSpans())
    held = HeldSpans(worker, process.device)
    with CollectiveCounter() as counter:
        worker.step(next(batches), held)
    return Counted(
        payload_bytes=counter.counts["all_reduce"].payload_bytes,
        held_bytes=held.largest["gradient_bytes"],
    )


COUNTED: dict[str, dict[str, Any]] = {
    "none": {},
    "bf16": {"compress": "bf16"},
    "fp16": {"compress": "fp16"},
    "powersgd": {**POWERSGD, "powersgd_rank": 2, "bucket_mb": 0.5},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    captures: dict[str, Capture | None]
    counted: dict[str, Counted]


def work(process: RankContext) -> Rank:
    return Rank(
        captures=capture_all(process, PROVEN | REFUSED),
        counted={name: counted(process, options) for name, options in COUNTED.items()},
    )


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Rank]:
    return run_ranks(work, world_size=2, directory=tmp_path_factory.mktemp("compression"))


@pytest.fixture(scope="module")
def captures(ranks: list[Rank]) -> Captures:
    return [rank.captures for rank in ranks]


@pytest.mark.parametrize("name", [*PROVEN, *REFUSED])
def test_it_trains_what_it_says_or_is_found_out(captures: Captures, name: str) -> None:
    verdict = check_verdict(captures, name, (PROVEN | REFUSED)[name])
    assert verdict.mathematics, "the table names it"


@pytest.mark.parametrize("name", COUNTED)
def test_the_formula_is_what_is_sent(ranks: list[Rank], name: str) -> None:
    workload = build_workload(WIDE, seed=3)
    counts = model_counts(workload, workload.build_model(), recipe())
    known = {name: counts[name] for name in ModelSize.__dataclass_fields__ if name in counts}
    needed = cost_model(DDP(**COUNTED[name])).required_traffic(
        Cell(size=ModelSize(**known), recipe=recipe(), world_size=2)
    )
    (traffic,) = needed.traffic
    payload_bytes = ranks[0].counted[name].payload_bytes
    assert payload_bytes == pytest.approx(traffic.payload_bytes, rel=0.001)
    part = {"none": 1.0, "powersgd": 0.05}.get(name, 0.5)
    assert payload_bytes <= 1.001 * part * ranks[0].counted["none"].payload_bytes


def test_what_powersgd_keeps_is_counted(ranks: list[Rank]) -> None:
    """An error for each element of a gradient, and thin factors."""
    held = {name: each.held_bytes for name, each in ranks[0].counted.items()}
    assert held["bf16"] == held["none"]
    assert held["powersgd"] == pytest.approx(2 * held["none"], rel=0.05)
