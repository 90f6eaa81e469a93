"""What each strategy's ranks hold and send in real groups, and the hybrid's mathematics on four."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardmark.core.errors import InputError, StrategyUnavailable
from shardmark.core.shares import Shard
from shardmark.equivalence.capture import Capture
from shardmark.measure.memory.tensors import live_tensor_bytes, storage_bytes
from shardmark.strategies import build_strategy
from shardmark.strategies.base import RankContext, Server
from shardmark.strategies.batch_norm import synchronise_batch_norms
from shardmark.train.probe import HeldSpans
from shardmark.trials.trial import Trial
from shardmark.workloads import build_workload
from shardmark.workloads.base import BatchPlan
from shardmark.workloads.vision.options import ClassificationOptions
from tests.distributed.captures import (
    SHIPPED,
    WORKLOAD,
    Case,
    capture_all,
    check_verdict,
    recipe,
    refusals,
    trial,
)
from tests.distributed.layered import Probed, probed
from tests.distributed.ranks import run_ranks

WIDE = WORKLOAD.model_copy(update={"model": "tests.distributed.models:wide"})


def wide(name: str, ranks: int = 2, precision: str = "fp32") -> Trial:
    return trial(name, recipe(precision=precision), ranks=ranks, workload=WIDE)


def level(context: RankContext) -> tuple[int, int]:
    """Bytes that the probe of `ddp` counts between two steps, and those of the parameters."""
    workload = build_workload(WIDE, seed=3)
    before = live_tensor_bytes("cpu")
    worker = build_strategy("ddp", {}).start(workload, recipe(), context)
    assert not isinstance(worker, Server)
    shard = Shard(index=context.rank, count=context.world_size)
    batches = workload.batches(BatchPlan(global_batch=32, seed=3), shard)
    for _ in range(3):
        worker.step(next(batches), HeldSpans(worker, context.device))
    state = worker.held_state()
    found = live_tensor_bytes("cpu") + state.untracked_bytes - before
    return found, storage_bytes(state.parameters)


def test_buckets_are_counted_once_whoever_has_seen_them(tmp_path: Path) -> None:
    """Parameters, momentum and buckets; statistics of batch norms are small."""
    for found, parameters in run_ranks(level, world_size=2, directory=tmp_path):
        assert found == pytest.approx(3 * parameters, rel=0.05)


IN_BF16 = ("fsdp", "zero-1", "zero-3")
NORMS: dict[str, Callable[[], nn.Module]] = {
    "of vectors": lambda: nn.BatchNorm1d(3),
    "of maps": lambda: nn.BatchNorm2d(3, momentum=None),
    "bare": lambda: nn.BatchNorm2d(3, affine=False, track_running_stats=False),
}
PARTS = (slice(0, 5), slice(5, 6))
"""Samples of each rank: the second one has a single one, which torch alone would refuse."""


def normed(norm: nn.Module, part: slice, steps: int = 2) -> dict[str, Tensor]:
    """Outputs, gradients of an uneven loss and buffers."""
    shape = (6, 3) if isinstance(norm, nn.BatchNorm1d) else (6, 3, 2, 4)
    draws = torch.Generator().manual_seed(1)
    found: dict[str, Tensor] = {}
    for step in range(steps):
        whole, wanted = (3 + 2 * torch.randn(shape, generator=draws) for _ in range(2))
        inputs = whole[part].requires_grad_()
        outputs = norm(inputs)
        (outputs * wanted[part]).sum().backward()
        assert inputs.grad is not None
        found |= {f"outputs {step}": outputs.detach(), f"gradient {step}": inputs.grad}
    found |= {f"{name}'s": p.grad for name, p in norm.named_parameters() if p.grad is not None}
    return found | {f"{name}, tracked": buffer for name, buffer in norm.named_buffers()}


def work_on_two(context: RankContext) -> tuple[dict[str, Probed], dict[str, dict[str, Tensor]]]:
    part = PARTS[context.rank]
    norms = {
        name: normed(synchronise_batch_norms(made(), context.device), part)
        for name, made in NORMS.items()
    }
    in_bf16 = {f"{name}, bf16": probed(context, wide(name, precision="bf16")) for name in IN_BF16}
    return {name: probed(context, wide(name)) for name in SHIPPED} | in_bf16, norms


@pytest.fixture(scope="module")
def of_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return run_ranks(work_on_two, world_size=2, directory=tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def two_ranks(of_two_ranks: list[Any]) -> dict[str, Probed]:
    """Of the first rank."""
    first: dict[str, Probed] = of_two_ranks[0][0]
    return first


@pytest.mark.parametrize("name", NORMS)
def test_synchronised_norms_are_one_norm_of_all_samples(of_two_ranks: list[Any], name: str) -> None:
    ranks = [norms[name] for _, norms in of_two_ranks]
    expected = normed(NORMS[name](), slice(0, 6))
    for key, tensor in expected.items():
        parts = [rank[key] for rank in ranks]
        if key.endswith("tracked"):
            assert torch.equal(*parts)
            torch.testing.assert_close(parts[0], tensor)
        else:  # parameters' gradients are added up by whatever reduces them
            found = sum(parts) if key.endswith("'s") else torch.cat(parts)
            torch.testing.assert_close(found, tensor, rtol=1e-5, atol=1e-5)


def test_ranks_hold_the_state_that_the_strategy_shards(two_ranks: dict[str, Probed]) -> None:
    """Parameters, gradients and momentum are P bytes each when whole."""
    held = {name: two_ranks[name].held for name in SHIPPED}
    whole = held["ddp"]["parameter_bytes"]
    assert set(held["ddp"].values()) == {whole}
    assert held["fsdp"] == dict.fromkeys(held["fsdp"], pytest.approx(whole / 2, rel=0.01))
    assert held["zro"]["optimizer_state_bytes"] == pytest.approx(whole / 2, rel=0.1)
    assert held["zro"]["gradient_bytes"] == held["zro"]["parameter_bytes"] == whole
    # The root's parameters stay whole from forward to backward: here the first and the last layer.
    assert held["fsdp1"]["gradient_bytes"] == pytest.approx(whole / 2, rel=0.01)
    assert held["fsdp1"]["optimizer_state_bytes"] == pytest.approx(whole / 2, rel=0.01)
    assert held["fsdp1"]["parameter_bytes"] < 0.55 * whole
    assert held["zero-0"]["optimizer_state_bytes"] == whole
    # DeepSpeed's stages 1 to 3 hold half of the momentum and half of an fp32 copy.
    for stage in ("zero-1", "zero-2", "zero-3"):
        assert held[stage]["optimizer_state_bytes"] == pytest.approx(whole, rel=0.01)
    # Half, and the layer whose gradient is under way.
    assert held["zero-2"]["gradient_bytes"] < 0.8 * whole


def test_bf16_parameters_are_copies_of_fp32_ones(two_ranks: dict[str, Probed]) -> None:
    """FSDP's shards are fp32; DeepSpeed counts half of an fp32 copy as optimizer state."""
    whole = two_ranks["ddp"].held["parameter_bytes"]
    assert two_ranks["fsdp, bf16"].held == two_ranks["fsdp"].held
    for name in IN_BF16[1:]:
        held, wide = two_ranks[f"{name}, bf16"].held, two_ranks[name].held
        assert held["optimizer_state_bytes"] == pytest.approx(whole, rel=0.01)
        assert held["parameter_bytes"] == pytest.approx(wide["parameter_bytes"] / 2, rel=0.01)


@pytest.mark.parametrize(
    ("name", "kind", "parts"),
    [
        ("ddp", "all_reduce", 1),
        # A rank's own part of every gather: half of the parameters, before forward and backward.
        ("fsdp", "all_gather", 1),
        ("fsdp", "reduce_scatter", 1),
        ("fsdp-grad-op", "all_gather", 0.5),
        ("zro", "all_reduce", 1),
        ("zro", "broadcast", 1),
        ("fsdp1", "all_gather", 1),
        ("fsdp1", "reduce_scatter", 1),
        ("fsdp, bf16", "all_gather", 0.5),
        ("fsdp, bf16", "reduce_scatter", 1),
    ],
)
def test_collectives_carry_the_expected_bytes(
    two_ranks: dict[str, Probed], name: str, kind: str, parts: float
) -> None:
    whole = two_ranks["ddp"].held["parameter_bytes"]
    payload_bytes = two_ranks[name].collectives[kind].payload_bytes
    assert payload_bytes == pytest.approx(parts * whole, rel=0.0 if name == "ddp" else 0.02)


PARTLY = WORKLOAD.model_copy(update={"model": "tests.distributed.models:PartlyUsed"})
UNUSED = {
    told: Case(trial=trial("ddp", recipe(), workload=PARTLY, find_unused_parameters=told == "told"))
    for told in ("told", "not told")
}


def work_on_unused(context: RankContext) -> tuple[dict[str, Capture | None], str]:
    captures = capture_all(context, {"told": UNUSED["told"]})
    try:
        capture_all(context, {"not told": UNUSED["not told"]})
    except InputError as error:
        return captures, str(error)
    return captures, "nothing is said"


def test_unused_parameters_need_the_option(tmp_path: Path) -> None:
    ranks = run_ranks(work_on_unused, world_size=2, directory=tmp_path)
    check_verdict([captures for captures, _ in ranks], "told", UNUSED["told"])
    assert all("never.weight" in said for _, said in ranks)
    assert all("find_unused_parameters: true" in said for _, said in ranks)


def model_of(name: str) -> ClassificationOptions:
    return WORKLOAD.model_copy(update={"model": f"tests.distributed.models:{name}"})


FROZEN = {
    f"zero-{stage} {precision}": Case(
        trial=trial(f"zero-{stage}", recipe(precision=precision), workload=model_of("frozen"))
    )
    for stage in (1, 2, 3)
    for precision in ("fp32", "bf16")
}
SHARDING = ("fsdp", "fsdp-grad-op", "fsdp1", "zero-1", "zero-3")
SCALED = {name: trial(name, recipe(), workload=model_of("scaled")) for name in SHARDING}
ROUTED = {name: trial(name, recipe(), workload=model_of("Routed")) for name in SHARDING}


def work_on_models(context: RankContext) -> tuple[dict[str, Capture | None], dict[str, str]]:
    said = {f"{name} scaled": told for name, told in refusals(context, SCALED).items()}
    for name, of in ROUTED.items():
        try:
            capture_all(context, {name: Case(trial=of)})
        except StrategyUnavailable as error:
            said[name] = str(error)
    return capture_all(context, FROZEN), said


def test_frozen_parameters_train_and_scalars_or_unequal_calls_are_refused(tmp_path: Path) -> None:
    ranks = run_ranks(work_on_models, world_size=2, directory=tmp_path)
    for name, case in FROZEN.items():
        check_verdict([captures for captures, _ in ranks], name, case)
    for _, said in ranks:
        for name in SHARDING:
            assert "such as scale; give scale the shape (1,)" in said[f"{name} scaled"]
            assert "rank 0 calls experts.0" in said[name]
            assert "rank 1 calls experts.1" in said[name]
            assert "multiplied by zero" in said[name]


HYBRID = "two groups of two ranks"
LOUD = WORKLOAD.model_copy(update={"model": "tests.distributed.models:Loud"})
FP16 = recipe(gradient_clipping=0.1, precision="fp16")
CASES = {
    HYBRID: Case(trial=trial("fsdp-hybrid", recipe(gradient_clipping=0.1), ranks=4)),
    f"{HYBRID}, bf16": Case(trial=trial("fsdp-hybrid", recipe(precision="bf16"), ranks=4)),
    f"{HYBRID}, fp16": Case(trial=trial("fsdp-hybrid", FP16, ranks=4, workload=LOUD)),
}
"""The default on one node."""


def work_on_four(context: RankContext) -> tuple[dict[str, Capture | None], Probed]:
    return capture_all(context, CASES), probed(context, wide("fsdp-hybrid", ranks=4))


def test_hybrid_on_four_ranks(tmp_path: Path) -> None:
    ranks = run_ranks(work_on_four, world_size=4, directory=tmp_path)
    for name, case in CASES.items():
        check_verdict([captures for captures, _ in ranks], name, case)
    kinds = {"all_gather", "reduce_scatter", "all_reduce"}
    assert all(kinds <= probe.collectives.keys() for _, probe in ranks)
