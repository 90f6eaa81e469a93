"""The prover is proven: it accepts what is shipped, and names each planted fault."""

from __future__ import annotations

import pytest

from shardmark.core.recipe import Optimizer, Schedule
from shardmark.equivalence.capture import Capture
from shardmark.strategies.base import RankContext
from tests.distributed.captures import (
    GROUPED,
    RECIPES,
    SHIPPED,
    WORKLOAD,
    Captures,
    Case,
    capture_all,
    check_verdict,
    own,
    recipe,
    trial,
)
from tests.distributed.faults import FAULTS, mean_of_means
from tests.distributed.ranks import run_ranks

pytestmark = pytest.mark.timeout(400)

EQUIVALENT = {
    f"{name}, {label}": Case(trial=trial(name, recipe(**changes)))
    for name in SHIPPED
    for label, changes in RECIPES.items()
}
OWN_OPTIMIZER = Optimizer(name="own", path="torch.optim:Adagrad", lr=0.01)
OWN_SCHEDULE = Schedule(
    name="own", path="torch.optim.lr_scheduler:ExponentialLR", options={"gamma": 0.5}
)
UNEVEN = recipe(gradient_accumulation=2)
EQUIVALENT |= {
    f"{name}, own task {task}": Case(trial=trial(name, UNEVEN, workload=options))
    for task, options, names in (
        ("tokens, with groups", GROUPED, ("ddp", "zro", "fsdp", "fsdp1", "zero-1", "zero-3")),
        ("regression", own("regression"), ("ddp",)),
        ("segmentation", own("segmentation"), ("fsdp",)),
    )
    for name in names
}
EQUIVALENT |= {
    f"{name}, own optimizer and schedule": Case(
        trial=trial(name, recipe(optimizer=OWN_OPTIMIZER, schedule=OWN_SCHEDULE))
    )
    for name in ("zro", "fsdp", "fsdp1", "zero-1")
}
PLAIN = WORKLOAD.model_copy(update={"model": "tests.distributed.models:Plain"})
NATIVE = {
    "zero-1, bf16 of its own": Case(
        trial=trial("zero-1", recipe(precision="bf16"), workload=PLAIN, mixed_precision="native")
    )
}
FAULTY = {
    fault: Case(
        trial=trial("ddp", recipe(gradient_accumulation=4 if "accumulation" in fault else 1)),
        begin=begin,
        cause=cause,
    )
    for fault, (begin, cause) in FAULTS.items()
} | {
    "mean of means": Case(
        trial=trial("ddp", recipe(), workload=own("tokens")),
        begin=mean_of_means,
        cause="each rank divides its loss by its own weight (a mean of means), "
        "not by the whole step's",
    )
}
LOUD = WORKLOAD.model_copy(update={"model": "tests.distributed.models:Loud"})
FP16 = recipe(precision="fp16", gradient_clipping=0.1)
LAST = {f"{name}, fp16": Case(trial=trial(name, FP16, workload=LOUD)) for name in SHIPPED}
"""DeepSpeed keeps what autocast computes in for all later engines of a process."""
CASES = EQUIVALENT | NATIVE | FAULTY | LAST


def work(process: RankContext) -> dict[str, Capture | None]:
    return capture_all(process, CASES)


@pytest.fixture(scope="module")
def captures(tmp_path_factory: pytest.TempPathFactory) -> Captures:
    return run_ranks(work, world_size=2, directory=tmp_path_factory.mktemp("verify"))


@pytest.mark.parametrize("name", [*EQUIVALENT, *LAST])
def test_shipped_strategies_are_equivalent(captures: Captures, name: str) -> None:
    check_verdict(captures, name, CASES[name])


@pytest.mark.parametrize("name", NATIVE)
def test_sixteen_bit_parameters_take_fp32_pictures(captures: Captures, name: str) -> None:
    for of_rank in captures:
        rank = of_rank[name]
        assert rank is not None
        assert all(0 < loss < 4 for losses in rank.losses for loss in losses)


def test_all_ranks_skip_what_overflows_fp16(captures: Captures) -> None:
    skipped = {
        rank.skipped
        for of_rank in captures
        for name, rank in of_rank.items()
        if name.endswith("fp16") and rank is not None
    }
    assert skipped == {((0,),)}, "and no step after it"


@pytest.mark.parametrize("fault", FAULTY)
def test_a_planted_fault_is_refused_and_named(captures: Captures, fault: str) -> None:
    """Shares may be taken from rank 0's place on every rank: the tensors are rank 0's."""
    check_verdict(captures, fault, CASES[fault])
