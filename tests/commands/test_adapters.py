"""The guide's tasks from other libraries, as written: their parts add up to the whole batch."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shardmark.base.recipe import Limits, Measure, Recipe
from shardmark.bench.reference.verdict import ReferenceCache
from shardmark.ranks.trial import StrategySpec, Trial
from shardmark.ranks.workloads.own.options import OwnOptions

GUIDE = (Path(__file__).parents[2] / "docs" / "guides" / "own-task.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "library", "compared"),
    [
        ("trainer_task", "transformers", True),
        ("lightning_task", "pytorch_lightning", True),
        ("torchvision_task", "torchvision", False),  # batch norm
    ],
)
@pytest.mark.filterwarnings("default")
def test_documented_adapters_train(
    name: str, library: str, compared: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # Lightning would, and leave it
    pytest.importorskip(library)
    code = re.search(rf"```python\n# {name}.py\n(.*?)```", GUIDE, re.DOTALL)
    assert code is not None
    (tmp_path / f"{name}.py").write_text(code[1])
    trial = Trial(
        id=name,
        experiment="adapters",
        workload=OwnOptions(task=f"{tmp_path / name}.py:Task"),
        recipe=Recipe(global_batch=8, steps=2, gradient_accumulation=2),
        strategy=StrategySpec(name="ddp"),
        world_size=2,
        measure=Measure(),
        limits=Limits(),
        device_type="cpu",
    )
    known = ReferenceCache().get(trial, 2)
    assert known.whole_batch.check.holds
    assert (known.whole_batch.check.in_tolerances is not None) is compared
    assert known.tolerances.reference.quality.keys() <= {"validation_loss", "accuracy_top1"}
    losses = known.tolerances.reference.losses
    assert all(0 < loss < 10 for rank in losses for loss in rank)
