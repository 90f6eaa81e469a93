"""Every strategy on one GPU, and on two where there are, held against the reference.

On one, no experiment runs those that need somebody to share with; their code is the same.  Meshes
of two axes need four, those of three eight.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from shardmark.base.evidence.captures import Capture
from shardmark.base.recipe import Optimizer
from shardmark.ranks.measure.system.environment import machine
from shardmark.ranks.measure.system.gpus import all_cuda_devices, visible_cuda_devices
from shardmark.ranks.strategies.base import RankContext
from shardmark.ranks.workloads import check_data
from tests.distributed import strategy_table
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

JOIN_SECONDS = 900
"""DeepSpeed and torch compile operators of theirs at first."""
pytestmark = [
    pytest.mark.timeout(JOIN_SECONDS + 60),
    pytest.mark.filterwarnings("default"),  # a card or a driver that nobody has tried may warn
]

CLIPPED: dict[str, Any] = {"gradient_clipping": 0.1}
OFFLOADED: dict[str, Any] = {**CLIPPED, "cpu_offload": True}
FP16: dict[str, Any] = {**CLIPPED, "precision": "fp16"}
BF16: dict[str, Any] = {"precision": "bf16"}
SCHEMES = ("native", "autocast")
"""Schemes of bf16, for strategies that know both."""
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


Cases = dict[str, Case]


def of_all(label: str, names: Iterable[str], changes: dict[str, Any], ranks: int) -> Cases:
    return {f"{name}, {label}": case(name, ranks, changes) for name in names}


def divided_cases(ranks: int, texts: Path) -> Cases:
    """Layers, stages and sequences shared out; the GPT's first and last stage have tied weights."""
    meshes: dict[str, list[dict[str, Any]]] = {
        "tp": [{}, {"sequence_parallel": True}, {"loss_parallel": True}],
        "pp": [{"schedule": name} for name in ("gpipe", "1f1b", "interleaved", "zero-bubble")],
        "ulysses": [{}],
        "fsdp-ulysses": [{}],
        **({name: [{}] for name in ("fsdp-tp", "ddp-pp", "fsdp-pp")} if ranks == 4 else {}),
        **({"fsdp-tp-pp": [{}]} if ranks == 8 else {}),
    }
    gpt = strategy_table.language(texts, width=64, heads=8, layers=16)
    cases = {}
    for (name, several), changes in product(meshes.items(), ({}, BF16)):
        for options in several:
            asked = recipe(**CLIPPED, **changes, global_batch=64)
            made = trial(name, asked, ranks=ranks, workload=gpt, device_type="cuda", **options)
            cases[" ".join(map(str, (name, options, asked.precision)))] = Case(trial=made)
    return cases


def families_of(ranks: int, texts: Path) -> dict[str, Cases]:
    """Cases of one group of processes each: what one of them cannot do costs no other family."""
    if ranks > 2:
        hybrid = {"fsdp-hybrid": case("fsdp-hybrid", ranks, CLIPPED)}
        return {"divided": divided_cases(ranks, texts), "hybrid": hybrid}
    offloading = ("fsdp", "fsdp-grad-op", "zero-1", "zero-2", "zero-3")
    names = ("single", *SHIPPED) if ranks == 1 else SHIPPED
    compiling = [name for name in SHIPPED if name not in {"zero-3", "fsdp1"}]
    schemes = product(("fsdp", "zero-2"), SCHEMES)
    ours = ("local-sgd", "diloco") if ranks > 1 else ("dp",)
    compress = {
        f"ddp, {kind}": case("ddp", ranks, {}, compress=kind) for kind in ("bf16", "powersgd")
    }
    return {
        **{label: of_all(label, names, changes, ranks) for label, changes in RECIPES.items()},
        "offloaded": of_all("offloaded", offloading, OFFLOADED, ranks)
        | of_all("offloaded, fp16", offloading, OFFLOADED | FP16, ranks),
        "DeepSpeed's Adam": {name: adam_case(name, ranks) for name in offloading[2:]},
        "schemes": {f"{n}, {s}": case(n, ranks, BF16, mixed_precision=s) for n, s in schemes},
        "accumulated": of_all("accumulated", names, {"gradient_accumulation": 2}, ranks),
        "compiled": of_all("compiled", compiling, {"compile": "blocks"}, ranks),
        "ours": of_all("fp32", ours, {}, ranks) | (compress if ranks > 1 else {}),
        **({"divided": divided_cases(ranks, texts)} if ranks > 1 else {}),
    }


NAMES = [
    (ranks, family, name)
    for ranks in (1, 2, 4, 8)
    if ranks <= DEVICES
    for family, cases in families_of(ranks, Path("texts")).items()
    for name, asked in cases.items()
    if machine().has_bf16 or asked.trial.recipe.precision != "bf16"
]


def work(process: RankContext, family: str, texts: Path) -> dict[str, Capture | str | None]:
    """Return what one rank found, or its error: nobody waits for the rank."""
    taken: dict[str, Capture | str | None] = {}
    for name, asked in families_of(process.world_size, texts)[family].items():
        if (process.world_size, family, name) not in NAMES:
            continue
        try:
            taken |= capture_all(process, {name: asked})
        except Exception:
            if process.world_size > 1:
                raise
            taken[name] = traceback.format_exc()
    return taken


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    made = strategy_table.written_texts(tmp_path_factory.mktemp("texts"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHARDMARK_CACHE", str(tmp_path_factory.mktemp("cache")))
        check_data(strategy_table.language(made))
        yield made


@pytest.fixture(scope="module")
def captured(
    request: pytest.FixtureRequest, texts: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[Any], Cases]:
    ranks, family = request.param
    taken = run_ranks(
        work,
        *(family, texts),
        world_size=ranks,
        directory=tmp_path_factory.mktemp("nccl"),
        device_type="cuda",
        join_seconds=JOIN_SECONDS,
    )
    return taken, families_of(ranks, texts)[family]


@pytest.mark.parametrize(
    ("captured", "name"),
    [
        pytest.param((ranks, family), name, id=f"{ranks}-{family}-{name}")
        for ranks, family, name in NAMES
    ],
    indirect=["captured"],
)
def test_strategy_trains_as_the_reference(captured: tuple[list[Any], Cases], name: str) -> None:
    taken, cases = captured
    first = next(ranks[name] for ranks in taken if ranks[name] is not None)
    assert not isinstance(first, str), first
    verdict = verdict_of(taken, name, cases[name])
    failing = [check for check in verdict.checks if not check.holds]
    assert verdict.equivalent, (verdict.cause, failing)
    assert bool(first.skipped[0]) is (verdict.precision == "fp16")
