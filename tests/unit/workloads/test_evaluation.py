"""The whole validation set once, no sample twice, however it is shared."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import nn

from shardmark.core.shares import Shard
from shardmark.workloads.vision.options import ClassificationOptions
from shardmark.workloads.vision.task import Classification, EvaluationPart

CPU = torch.device("cpu")


def task(**fields: Any) -> Classification:
    chosen = {"dataset": "random", "image_size": 8, "training_samples": 4} | fields
    return Classification(ClassificationOptions.model_validate(chosen), 0)


class Counting(nn.Module):
    """A fixed linear model that remembers what it has seen."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(3 * 8 * 8, classes)
        self.seen: list[torch.Tensor] = []

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        self.seen.append(pictures)
        logits: torch.Tensor = self.head(pictures.flatten(1))
        return logits


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_each_validation_sample_once(count: int, workers: int) -> None:
    made = task(validation_samples=601, loader_workers=workers)
    model = Counting(10).eval()
    parts = [made.evaluate(model, Shard(index=i, count=count), CPU) for i in range(count)]
    assert sum(part.samples for part in parts) == made.validation_samples == 601
    seen = {picture.numpy().tobytes() for batch in model.seen for picture in batch}
    assert len(seen) == 601

    whole = made._data.validation
    stored = whole.read(torch.arange(601).numpy())
    logits = model(((stored.pictures / 255) - 0.5) / 0.25)
    best = logits.topk(5).indices == stored.labels[:, None]
    metrics = made.quality(pickle.loads(pickle.dumps(parts)))
    expected = nn.functional.cross_entropy(logits, stored.labels).item()
    assert metrics["validation_loss"] == pytest.approx(expected, rel=1e-6)
    assert metrics["accuracy_top1"] == best[:, 0].sum().item() / 601
    assert metrics["accuracy_top5"] == best.sum().item() / 601


def test_top5_is_absent_where_it_says_nothing() -> None:
    made = task(classes=4, validation_samples=10)
    part = made.evaluate(Counting(4).eval(), Shard(index=0, count=1), CPU)
    assert set(made.quality([part])) == {"validation_loss", "accuracy_top1"}


def test_more_ranks_than_samples() -> None:
    made = task(validation_samples=2)
    part = made.evaluate(Counting(10).eval(), Shard(index=2, count=3), CPU)
    assert part == EvaluationPart(samples=0, loss=0.0, top1=0, top5=0)
    assert made.quality([part]) == {}


def test_a_model_learns_the_made_up_pictures() -> None:
    from shardmark.workloads.base import BatchPlan

    made = task(training_samples=256)
    model = Counting(10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    batches = made.batches(BatchPlan(global_batch=32, seed=0), Shard(index=0, count=1))
    for _ in range(40):
        optimizer.zero_grad()
        made.loss(model, next(batches)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    part = made.evaluate(model.eval(), Shard(index=0, count=1), CPU)
    assert made.quality([part])["accuracy_top1"] > 0.9
