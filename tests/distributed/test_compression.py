"""DDP's compressed reductions on real ranks: proven, counted and held."""

from __future__ import annotations

from typing import Any

import pytest

from shardmark.core.recipe import Optimizer
from shardmark.equivalence.capture import Capture
from shardmark.strategies.base import RankContext
from tests.distributed.captures import (
    WORKLOAD,
    Case,
    capture_all,
    check_verdict,
    recipe,
    trial,
)
from tests.distributed.faults import Started, ddp, start
from tests.distributed.layered import Probed, check_traffic, probed
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
        cause="it computes as one device does, although its definition is: "
        "gradients are reduced by PowerSGD of rank 1",
    ),
    "forgets errors": Case(
        trial=trial("ddp", recipe(), **POWERSGD),
        begin=forgets_errors,
        cause="no known explanation reproduces the numbers",
    ),
}


COUNTED: dict[str, dict[str, Any]] = {
    "none": {},
    "bf16": {"compress": "bf16"},
    "fp16": {"compress": "fp16"},
    "powersgd": {**POWERSGD, "powersgd_rank": 2, "bucket_mb": 0.5},
}


Ranks = list[tuple[dict[str, Capture | None], dict[str, Probed]]]


def work(process: RankContext) -> tuple[dict[str, Capture | None], dict[str, Probed]]:
    probes = {
        name: probed(process, trial("ddp", recipe(), workload=WIDE, **options), warmup_steps=3)
        for name, options in COUNTED.items()
    }
    return capture_all(process, PROVEN | REFUSED), probes


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return run_ranks(work, world_size=2, directory=tmp_path_factory.mktemp("compression"))


@pytest.mark.parametrize("name", [*PROVEN, *REFUSED])
def test_it_trains_what_it_says_or_the_fault_is_named(ranks: Ranks, name: str) -> None:
    verdict = check_verdict([captures for captures, _ in ranks], name, (PROVEN | REFUSED)[name])
    assert verdict.mathematics, "the table names it"


@pytest.mark.parametrize("name", COUNTED)
def test_the_all_reduce_carries_the_bytes_of_the_cost_model(ranks: Ranks, name: str) -> None:
    check_traffic(name, [probes for _, probes in ranks], rel=0.001)
    sent = {key: of.collectives["all_reduce"].payload_bytes for key, of in ranks[0][1].items()}
    fraction = {"none": 1.0, "powersgd": 0.05}.get(name, 0.5)
    assert sent[name] <= 1.001 * fraction * sent["none"]


def test_the_state_of_powersgd_is_counted(ranks: Ranks) -> None:
    """An error for each element of a gradient, and thin factors."""
    held = {name: of.held["gradient_bytes"] for name, of in ranks[0][1].items()}
    assert held["bf16"] == held["none"]
    assert held["powersgd"] == pytest.approx(2 * held["none"], rel=0.05)
