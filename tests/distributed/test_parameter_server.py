"""Parameter servers in real processes: behind a barrier they train the same."""

from __future__ import annotations

from typing import Any

import pytest

from shardmark.equivalence.capture import Capture
from shardmark.strategies.base import RankContext
from tests.distributed.captures import (
    GROUPED,
    RECIPES,
    Captures,
    Case,
    capture_all,
    check_verdict,
    recipe,
    trial,
    verdict_of,
)
from tests.distributed.ranks import run_ranks

pytestmark = pytest.mark.timeout(400)

PROCESSES = 4


def case(
    strategy: str, workers: int, changes: dict[str, Any] | None = None, **options: Any
) -> Case:
    wanted = recipe(**{"global_batch": 12 * workers, **(changes or {})})
    return Case(trial=trial(strategy, wanted, ranks=workers, **options))


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
    # Nobody else makes a gradient stale.
    "one asynchronous worker": case("ps-async", 1, servers=3),
    "bf16 wire": case("ps-sync", 3, wire="bf16"),
}


def work(process: RankContext) -> dict[str, Capture | None]:
    return capture_all(process, CASES)


@pytest.fixture(scope="module")
def captures(tmp_path_factory: pytest.TempPathFactory) -> Captures:
    return run_ranks(work, world_size=PROCESSES, directory=tmp_path_factory.mktemp("servers"))


@pytest.mark.parametrize("name", [name for name in CASES if name != "bf16 wire"])
def test_the_barrier_makes_it_equivalent(captures: Captures, name: str) -> None:
    check_verdict(captures, name, CASES[name])


def test_a_bf16_wire_is_not_equivalent(captures: Captures) -> None:
    verdict = verdict_of(captures, "bf16 wire", CASES["bf16 wire"])
    assert verdict.equivalent is False
    assert verdict.cause is not None
    assert "gradients" in verdict.cause.first_deviation
