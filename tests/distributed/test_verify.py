"""The prover is proven: it accepts what is shipped, and names each planted fault."""

from __future__ import annotations

from typing import Any

import pytest

from shardmark.core.recipe import Optimizer, Schedule
from shardmark.equivalence.capture import Capture
from shardmark.strategies import option_names
from shardmark.strategies.base import RankContext
from shardmark.trials.trial import Trial
from tests.distributed.captures import (
    GROUPED,
    PADDED,
    RECIPES,
    REFERENCES,
    SHIPPED,
    STEPS,
    SYNCHRONISED,
    WORKLOAD,
    Captures,
    Case,
    capture_all,
    check_verdict,
    own,
    recipe,
    trial,
)
from tests.distributed.faults import FAULTS, adds_no_weights, keeps_norms_apart, mean_of_means
from tests.distributed.ranks import run_ranks

pytestmark = pytest.mark.timeout(400)


def common(name: str, **changes: Any) -> Trial:
    """Of the mathematics that all have in common: in bf16 some libraries would cast parameters."""
    casts = "mixed_precision" in option_names(name) and "precision" in changes
    options: dict[str, Any] = {"mixed_precision": "autocast"} if casts else {}
    return trial(name, recipe(**changes), **options)


EQUIVALENT = {
    f"{name}, {label}": Case(trial=common(name, **changes))
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
EQUIVALENT |= {
    f"{name}, synchronised, {label}": Case(
        trial=trial(name, recipe(**SYNCHRONISED | RECIPES[label]))
    )
    for label, names in (
        ("sgd", SHIPPED),
        ("bf16", ("ddp", "zero-3")),
        ("accumulated, checkpointed", ("ddp", "fsdp", "zero-3")),
    )
    for name in names
}
PADDED_BY: dict[str, dict[str, Any]] = {
    "ddp": {"compress": "bf16"},
    **{name: {} for name in ("fsdp", "zero-2", "zero-3")},
}
EQUIVALENT |= {
    f"{name}, weights of the loss, {parts} micro-batches": Case(
        trial=trial(name, recipe(gradient_accumulation=parts), workload=PADDED, **options)
    )
    for name, options in PADDED_BY.items()
    for parts in (1, 2)
}
CASTING = ("fsdp", "fsdp-grad-op", "zero-1", "zero-2", "zero-3")
"""In bf16 they cast parameters unless told otherwise."""
TWO_PARTS = {"precision": "bf16", "gradient_accumulation": 2}
CAST_RECIPES = {
    "clipped": TWO_PARTS | {"gradient_clipping": 0.1},
    "checkpointed": TWO_PARTS | {"activation_checkpointing": True, **RECIPES["adamw"]},
}
CAST = {
    f"{name}, bf16 parameters, {label}": Case(trial=trial(name, recipe(**changes)))
    for label, changes in CAST_RECIPES.items()
    for name in (CASTING if label == "clipped" else ("fsdp", "zero-3"))
} | {
    f"{name}, bf16 parameters, own task": Case(
        trial=trial(name, recipe(**TWO_PARTS), workload=options)
    )
    for name, options in (
        ("fsdp", own("regression")),
        ("zero-3", own("regression")),
        ("zero-1", GROUPED),
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
    ),
    "mean of means, weights of the loss": Case(
        trial=trial("ddp", recipe(gradient_accumulation=2), workload=PADDED),
        begin=adds_no_weights,
        cause="each rank divides its loss by its own weight (a mean of means), "
        "not by the whole step's",
    ),
    "norms kept apart": Case(
        trial=trial("ddp", recipe(**SYNCHRONISED)),
        begin=keeps_norms_apart,
        cause="batch norm takes its statistics over each rank's share",
    ),
}
LOUD = WORKLOAD.model_copy(update={"model": "tests.distributed.models:Loud"})
FP16 = recipe(precision="fp16", gradient_clipping=0.1)
LAST = {f"{name}, fp16": Case(trial=trial(name, FP16, workload=LOUD)) for name in SHIPPED}
"""DeepSpeed keeps what autocast computes in for all later engines of a process, so these end it,
and those without autocast begin."""
CASES = CAST | EQUIVALENT | FAULTY | LAST


def work(process: RankContext) -> dict[str, Capture | None]:
    return capture_all(process, CASES)


@pytest.fixture(scope="module")
def captures(tmp_path_factory: pytest.TempPathFactory) -> Captures:
    return run_ranks(work, world_size=2, directory=tmp_path_factory.mktemp("verify"))


@pytest.mark.parametrize("name", [*CAST, *EQUIVALENT, *LAST])
def test_shipped_strategies_are_equivalent(captures: Captures, name: str) -> None:
    check_verdict(captures, name, CASES[name])


@pytest.mark.parametrize("name", CAST)
def test_bf16_parameters_are_played_exactly(captures: Captures, name: str) -> None:
    """The first forward pass to the last bit."""
    reference = REFERENCES.get(CASES[name].trial, STEPS).tolerances.reference
    first = [rank.losses[0][0] for each in captures if (rank := each[name]) is not None]
    assert first == [losses[0] for losses in reference.losses]


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
