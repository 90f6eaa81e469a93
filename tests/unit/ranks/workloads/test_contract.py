"""Every task has the same guarantees, however its samples are shared."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from importlib.resources import files
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from shardmark.base.errors import InputError
from shardmark.base.layout import Shard
from shardmark.ranks.workloads import build_workload, options
from shardmark.ranks.workloads.base import Batch, BatchPlan, Workload
from tests.unit.extras.detection import detection_data
from tests.unit.ranks.workloads.test_models import weights_hash

TEMPLATES = Path(str(files("shardmark.experiment"))) / "templates"
TEXT = "".join(f"def function_{number}(): return {number}\n" for number in range(60))
PLAN = BatchPlan(global_batch=8, seed=3)
WHOLE = Shard(index=0, count=1)
CPU = torch.device("cpu")
TEXTS = {"name": "language", "dataset": "text", "sequence_length": 16, "width": 16, "heads": 2}
TASKS: dict[str, dict[str, Any]] = {
    "classification": {
        "name": "classification",
        "model": "tests.distributed.models:small",
        "dataset": "random",
        "image_size": 16,
        "training_samples": 30,
        "augment": "crop_flip",
    },
    "detection": {
        "name": "detection",
        "model": detection_data.TWO_STAGES,
        "dataset": "coco",
        "augment": "flip",
    },
    "causal": TEXTS,
    "masked, padded": {**TEXTS, "objective": "masked", "packed": False},
    **{
        name: {"name": "own", "task": f"{TEMPLATES / name}.py:Task"}
        for name in ("tokens", "regression", "segmentation")
    },
}
ADDITIVE = [name for name in TASKS if name != "detection"]
Build = Callable[..., Workload]


@pytest.fixture
def build(tmp_path: Path, _own_cache: None) -> Build:
    """Makes a task anew, as each rank does."""

    def made(name: str, seed: int = 5, **changes: Any) -> Workload:
        folder = tmp_path / name
        if name == "detection" and not folder.exists():
            detection_data.write(folder, pictures=9)
        elif TASKS[name]["name"] == "language" and not folder.exists():
            folder.mkdir()
            for number in range(12):
                (folder / f"{number}.txt").write_text(TEXT[: 40 * (number + 1)])
        given = {"data_dir": str(folder)} if folder.exists() else {}
        return build_workload(options(TASKS[name] | given | changes), seed)

    return made


def taken(workload: Workload, shard: Shard = WHOLE, steps: int = 3) -> list[Batch]:
    return list(islice(workload.batches(PLAN, shard), steps))


@pytest.mark.parametrize(
    ("name", "count", "workers"),
    [*((name, 2, 0) for name in ADDITIVE), ("classification", 4, 0), ("segmentation", 2, 1)],
)
def test_shares_and_micro_batches_add_up(build: Build, name: str, count: int, workers: int) -> None:
    """Also those that other processes make ahead, which draw from no generator of torch's."""
    workload = build(name)
    model = workload.build_model().eval()
    before = torch.get_rng_state()
    whole = taken(workload)
    shares = [
        taken(build(name, loader_workers=workers), Shard(index=index, count=count))
        for index in range(count)
    ]
    assert torch.equal(torch.get_rng_state(), before), "dropout would differ"
    assert len({batch.sample_ids for batch in whole}) == len(whole)
    for step, expected in enumerate(whole):
        parts = [part for share in shares for part in share[step].split(2)]
        assert sum((part.sample_ids for part in parts), ()) == expected.sample_ids
        assert {part.step_weight for part in parts} == {expected.weight} == {expected.step_weight}
        assert sum(part.weight for part in parts) == expected.weight
        losses = [workload.loss(model, part) for part in parts]
        for loss, part in zip(losses, parts, strict=True):
            assert float(loss.weight) == pytest.approx(part.weight)
        total = torch.stack([loss.total for loss in losses]).sum()
        torch.testing.assert_close(
            total, workload.loss(model, expected).total, rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize("name", TASKS)
def test_evaluation_adds_up_whoever_evaluates(build: Build, name: str) -> None:
    workload = build(name, validation_samples=7)
    assert workload.validation_samples == 7
    model = workload.build_model().eval()
    alone = workload.quality([workload.evaluate(model, WHOLE, CPU)])
    parts = [workload.evaluate(model, Shard(index=i, count=3), CPU) for i in range(3)]
    assert alone
    assert workload.quality(pickle.loads(pickle.dumps(parts))) == pytest.approx(dict(alone))


@pytest.mark.parametrize("name", TASKS)
def test_models_come_from_the_seed_and_operations_are_counted_beside_them(
    build: Build, name: str
) -> None:
    workload = build(name)
    before = torch.get_rng_state()
    model = workload.build_model()
    assert torch.equal(torch.get_rng_state(), before)
    assert model.training
    weights = weights_hash(model)
    torch.rand(3)
    assert weights_hash(build(name).build_model()) == weights
    assert weights_hash(build(name, seed=6).build_model()) != weights
    model.eval()
    assert (workload.sample_input_flops(model) or 0) > 1000
    assert weights_hash(model) == weights, "nor batch norms' statistics"
    assert not any(module.training for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("name", ["detection", "masked, padded", "tokens"])
def test_unequal_micro_batches_are_refused(build: Build, name: str) -> None:
    (batch,) = taken(build(name), steps=1)
    assert batch.split(1) == (batch,)
    with pytest.raises(InputError, match="8 samples cannot be split into 3 equal micro-batches"):
        batch.split(3)
