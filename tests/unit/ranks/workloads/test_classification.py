"""Classification: what is trained on, and its quality, do not depend on how it is shared."""

from __future__ import annotations

import pickle
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from shardmark.base.errors import DataError, InputError
from shardmark.base.layout import Shard
from shardmark.ranks.workloads.base import BatchPlan
from shardmark.ranks.workloads.order import epoch_order
from shardmark.ranks.workloads.vision.options import ClassificationOptions
from shardmark.ranks.workloads.vision.task import PADDING, Classification, ImageBatch, crop_flip

PLAN = BatchPlan(global_batch=8, seed=3)
WHOLE = Shard(index=0, count=1)
CPU = torch.device("cpu")


def task(**fields: Any) -> Classification:
    chosen = {"dataset": "random", "image_size": 8, "training_samples": 20} | fields
    return Classification(ClassificationOptions.model_validate(chosen), 0)


def taken(steps: int) -> list[ImageBatch]:
    return list(islice(task().batches(PLAN, WHOLE), steps))


def test_an_epoch_takes_no_sample_twice_and_drops_the_incomplete_batch() -> None:
    first, second, third, *_ = taken(4)
    assert len(set(first.sample_ids + second.sample_ids)) == 16
    assert third.sample_ids == tuple(epoch_order(PLAN.seed, 1, 20)[:8]) != first.sample_ids
    assert not np.array_equal(epoch_order(1, 2, 50), epoch_order(2, 1, 50))


def test_samples_are_those_of_their_ids() -> None:
    made = task()
    batch = next(made.batches(PLAN, WHOLE))
    stored = made._training.read(np.array(batch.sample_ids))
    assert torch.equal(batch.labels, stored.labels)
    torch.testing.assert_close(batch.pictures, (stored.pictures / 255 - 0.5) / 0.25)
    assert (batch.pictures.dtype, batch.labels.dtype) == (torch.float32, torch.int64)


def test_augmentation_changes_from_epoch_to_epoch() -> None:
    batches = task(augment="crop_flip").batches(BatchPlan(global_batch=20, seed=0), WHOLE)
    first, second = (
        dict(zip(batch.sample_ids, batch.pictures, strict=True)) for batch in islice(batches, 2)
    )
    assert sum(not torch.equal(first[sample], second[sample]) for sample in range(20)) >= 15


def test_crop_flip_cuts_out_of_a_black_frame() -> None:
    pictures = torch.randint(1, 256, (50, 3, 6, 7), dtype=torch.uint8)
    drawn = np.random.default_rng(0)
    corners = drawn.integers(0, 2 * PADDING + 1, (2, 50))
    flipped = drawn.integers(0, 2, 50).astype(np.bool_)
    framed = nn.functional.pad(pictures, [PADDING] * 4)
    for made, frame, (top, left), flip in zip(
        crop_flip(pictures, corners, flipped), framed, corners.T, flipped, strict=True
    ):
        cut = frame[:, top : top + 6, left : left + 7]
        assert torch.equal(made, cut.flip(-1) if flip else cut)


def test_batch_moves_its_tensors_to_the_device() -> None:
    (batch,) = taken(1)
    assert batch.to(CPU).pictures is batch.pictures
    moved = batch.to(torch.device("meta"))
    assert moved.pictures.device.type == moved.labels.device.type == "meta"
    assert moved.sample_ids == batch.sample_ids


def test_too_few_samples_or_unequal_shares_are_refused() -> None:
    with pytest.raises(DataError, match="7 samples are fewer than one step of 8"):
        task(training_samples=7).batches(PLAN, WHOLE)
    with pytest.raises(InputError, match="8 samples cannot be shared equally by 3 ranks"):
        task().batches(PLAN, Shard(index=0, count=3))


class Linear(nn.Module):
    """A fixed linear model that remembers what it has seen."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(3 * 8 * 8, classes)
        self.seen: list[torch.Tensor] = []

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        self.seen.append(pictures)
        logits: torch.Tensor = self.head(pictures.flatten(1))
        return logits


def test_loss_is_smoothed_mean_cross_entropy() -> None:
    """The loss is computed in fp32 under every precision."""
    made = task(label_smoothing=0.25)
    batch = next(made.batches(PLAN, WHOLE))
    logits = torch.randn(8, 10).bfloat16()
    target = torch.full((8, 10), 0.025).scatter_(1, batch.labels[:, None], 0.775)
    expected = -(target * logits.float().log_softmax(1)).sum(1).mean()

    class Fixed(nn.Module):
        def forward(self, _: torch.Tensor) -> torch.Tensor:
            return logits

    torch.testing.assert_close(made.loss(Fixed(), batch).total, expected * len(batch))


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (nn.Unflatten(1, (5, 2)), r"returns a tensor of shape \(8, 5, 2\); expected .* \(8, 10\)"),
        (nn.LSTM(10, 7), "returns a tuple; expected one tensor of shape"),
    ],
)
def test_model_that_returns_no_logits_is_refused(head: nn.Module, message: str) -> None:
    made = task()
    with pytest.raises(InputError, match=message):
        made.loss(nn.Sequential(Linear(), head), next(made.batches(PLAN, WHOLE)))


@pytest.mark.parametrize(("count", "workers"), [(1, 1), (3, 0)])
def test_evaluation_visits_each_sample_once(count: int, workers: int) -> None:
    made = task(validation_samples=601, loader_workers=workers)
    model = Linear().eval()
    parts = [made.evaluate(model, Shard(index=i, count=count), CPU) for i in range(count)]
    assert made.validation_samples == 601
    assert len({picture.numpy().tobytes() for batch in model.seen for picture in batch}) == 601

    stored = made._validation.read(np.arange(601))
    logits = model(((stored.pictures / 255) - 0.5) / 0.25)
    best = logits.topk(5).indices == stored.labels[:, None]
    expected = nn.functional.cross_entropy(logits, stored.labels).item()
    assert made.quality(pickle.loads(pickle.dumps(parts))) == {
        "validation_loss": pytest.approx(expected, rel=1e-6),
        "accuracy_top1": best[:, 0].sum().item() / 601,
        "accuracy_top5": best.sum().item() / 601,
    }


def test_quality_is_defined_for_few_classes_and_for_no_sample() -> None:
    made = task(classes=4, validation_samples=2)
    model = Linear(4).eval()
    some, none = (made.evaluate(model, Shard(index=i, count=3), CPU) for i in (0, 2))
    assert set(made.quality([some, none])) == {"validation_loss", "accuracy_top1"}
    assert made.quality([none]) == made.quality([]) == {}
