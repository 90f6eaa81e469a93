"""Parameter servers in real processes: behind a barrier they train the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shardmark.core.shares import Shard
from shardmark.equivalence.capture import Capture
from shardmark.strategies.base import RankContext
from tests.distributed.captures import (
    GROUPED,
    PADDED,
    RECIPES,
    Captures,
    Case,
    capture_all,
    check_verdict,
    recipe,
    trial,
)
from tests.distributed.faults import Started, start
from tests.distributed.ranks import run_ranks

pytestmark = pytest.mark.timeout(400)

PROCESSES = 4


def case(
    strategy: str, workers: int, changes: dict[str, Any] | None = None, **options: Any
) -> Case:
    wanted = recipe(**{"global_batch": 12 * workers, **(changes or {})})
    return Case(trial=trial(strategy, wanted, ranks=workers, **options))


def in_fp32(workload: Any, wanted: Any, process: RankContext) -> Started:
    started = start("ps-sync", workload, wanted, process)
    return replace(started, shard=Shard(index=process.rank, count=process.world_size - 1))


CASES = {
    **{f"one server, {label}": case("ps-sync", 3, RECIPES[label]) for label in RECIPES},
    **{
        f"two servers, small buckets, {label}": case(
            "ps-sync", 2, RECIPES[label], servers=2, bucket_mb=0.01
        )
        for label in RECIPES
    },
    "own task of uneven weights and groups": case(
        "ps-sync", 2, {"gradient_accumulation": 2}, workload=GROUPED, servers=2
    ),
    "weights of the loss, in bf16": case(
        "ps-sync", 2, {"gradient_accumulation": 2}, workload=PADDED, servers=2, wire="bf16"
    ),
    # Nobody else makes a gradient stale.
    "one asynchronous worker": case("ps-async", 1, servers=3),
    "messages in bf16": case("ps-sync", 3, {"gradient_clipping": 0.1}, wire="bf16"),
}
FAULTY = {
    "says messages in bf16": replace(
        case("ps-sync", 3, wire="bf16"),
        begin=in_fp32,
        cause="it computes as one device does, although its definition is: gradients and parameters"
        " travel in bf16",
    )
}


def work(process: RankContext) -> dict[str, Capture | None]:
    return capture_all(process, CASES | FAULTY)


@pytest.fixture(scope="module")
def captures(tmp_path_factory: pytest.TempPathFactory) -> Captures:
    return run_ranks(work, world_size=PROCESSES, directory=tmp_path_factory.mktemp("servers"))


@pytest.mark.parametrize("name", CASES)
def test_the_barrier_makes_it_equivalent(captures: Captures, name: str) -> None:
    check_verdict(captures, name, CASES[name])


@pytest.mark.parametrize("name", FAULTY)
def test_other_messages_than_it_says_are_named(captures: Captures, name: str) -> None:
    check_verdict(captures, name, FAULTY[name])
