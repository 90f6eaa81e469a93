"""Every strategy on one GPU, and on two where there are, held against the reference.

On one, no experiment runs those that need somebody to share with; their code is the same.
"""

from __future__ import annotations

import traceback
from itertools import product
from typing import Any

import pytest

from shardmark.core.recipe import Optimizer
from shardmark.equivalence.capture import Capture
from shardmark.measure.system.gpus import all_cuda_devices, visible_cuda_devices
from shardmark.strategies.base import RankContext
from tests.distributed.captures import (
    FUSED,
    SHIPPED,
    WORKLOAD,
    Case,
    capture_all,
    recipe,
    trial,
    verdict_of,
)
from tests.distributed.ranks import run_ranks

FOUND = all_cuda_devices()
DEVICES = len(visible_cuda_devices(FOUND))
if not DEVICES:
    REASON = FOUND.reason or "CUDA_VISIBLE_DEVICES shows none"
    pytest.skip(f"needs a CUDA device: {REASON}", allow_module_level=True)

pytestmark = pytest.mark.timeout(400)

CLIPPED: dict[str, Any] = {"gradient_clipping": 0.1}
OFFLOADED: dict[str, Any] = {**CLIPPED, "cpu_offload": True}
FP16: dict[str, Any] = {**CLIPPED, "precision": "fp16"}
BF16: dict[str, Any] = {"precision": "bf16"}
SCHEMES = ("native", "autocast")
"""Of bf16, for strategies that know both."""
RECIPES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "tf32": {"tf32": True},
    "bf16": BF16,
    "channels last, fused": {"channels_last": True, "optimizer": FUSED},
    "synchronised": {"sync_batch_norm": True},
    "fp16": FP16,
}


def case(name: str, ranks: int, changes: dict[str, Any], **options: Any) -> Case:
    # Both schemes of 16 bits cast the same tensors of a plain model; a loud one overflows fp16.
    model = "Plain" if options else "Loud" if changes.get("precision") == "fp16" else "small"
    workload = WORKLOAD.model_copy(update={"model": f"tests.distributed.models:{model}"})
    asked = recipe(**changes)
    made = trial(name, asked, ranks=ranks, workload=workload, device_type="cuda", **options)
    return Case(trial=made)


def adam_case(name: str, ranks: int) -> Case:
    adamw = Optimizer(name="adamw", lr=1e-3, weight_decay=0.1)
    asked = recipe(**OFFLOADED, optimizer=adamw)
    return Case(trial=trial(name, asked, ranks=ranks, device_type="cuda", cpu_adam=True))


def cases_of(ranks: int) -> dict[str, Case]:
    offloading = ("fsdp", "fsdp-grad-op", "zero-1", "zero-2", "zero-3")
    cases = {f"{name}, offloaded": case(name, ranks, OFFLOADED) for name in offloading}
    cases |= {f"{name}, DeepSpeed's Adam": adam_case(name, ranks) for name in offloading[2:]}
    for name, scheme in product(("fsdp", "zero-2"), SCHEMES):
        cases[f"{name}, {scheme}"] = case(name, ranks, BF16, mixed_precision=scheme)
    compiling = [name for name in SHIPPED if name != "zero-3"]
    cases |= {f"{name}, compiled": case(name, ranks, {"compile": "blocks"}) for name in compiling}
    # fp16 comes last: DeepSpeed keeps it for all later engines of a process.
    for label, changes in RECIPES.items():
        names = ("single", *SHIPPED) if ranks == 1 else SHIPPED
        cases |= {f"{name}, {label}": case(name, ranks, changes) for name in names}
    both = OFFLOADED | FP16
    cases |= {f"{name}, offloaded, fp16": case(name, ranks, both) for name in offloading}
    return cases


CASES = {ranks: cases_of(ranks) for ranks in (1, 2) if ranks <= DEVICES}


def work(process: RankContext) -> dict[str, Capture | str | None]:
    """Of one rank, errors too: nobody waits for it."""
    taken: dict[str, Capture | str | None] = {}
    for name, asked in CASES[process.world_size].items():
        try:
            taken |= capture_all(process, {name: asked})
        except Exception:
            if process.world_size > 1:
                raise
            taken[name] = traceback.format_exc()
    return taken


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[Any]]:
    return {
        ranks: run_ranks(
            work, world_size=ranks, directory=tmp_path_factory.mktemp("nccl"), device_type="cuda"
        )
        for ranks in CASES
    }


@pytest.mark.parametrize(
    ("ranks", "name"), [(ranks, name) for ranks, cases in CASES.items() for name in cases]
)
def test_it_trains_as_the_reference_does(
    captured: dict[int, list[Any]], ranks: int, name: str
) -> None:
    taken = captured[ranks]
    assert not isinstance(taken[0][name], str), taken[0][name]
    verdict = verdict_of(taken, name, CASES[ranks][name])
    failing = [check for check in verdict.checks if not check.holds]
    assert verdict.equivalent, (verdict.cause, failing)
    assert bool(taken[0][name].skipped[0]) is (verdict.precision == "fp16")
