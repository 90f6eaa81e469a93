"""Fairness: what is trained on does not depend on how it is shared."""

from __future__ import annotations

from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch

from shardmark.core.errors import DataError, InputError
from shardmark.core.shares import Shard
from shardmark.workloads.base import BatchPlan
from shardmark.workloads.order import epoch_order
from shardmark.workloads.vision.options import ClassificationOptions
from shardmark.workloads.vision.pictures import PADDING, ImageBatch, crop_flip
from shardmark.workloads.vision.task import Classification

PLAN = BatchPlan(global_batch=8, seed=3)
WHOLE = Shard(index=0, count=1)


def task(seed: int = 0, **fields: Any) -> Classification:
    chosen = {"dataset": "random", "image_size": 12, "training_samples": 20} | fields
    return Classification(ClassificationOptions.model_validate(chosen), seed)


def taken(made: Classification, steps: int, shard: Shard = WHOLE) -> list[ImageBatch]:
    return list(islice(made.batches(PLAN, shard), steps))


@pytest.mark.parametrize("augment", ["none", "crop_flip"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_shards_concatenate_to_the_unsharded_batch(count: int, augment: str) -> None:
    steps = 5  # two and a half epochs
    whole = taken(task(augment=augment), steps)
    shards = [
        taken(task(augment=augment), steps, Shard(index=index, count=count))
        for index in range(count)
    ]
    for step, expected in enumerate(whole):
        parts = [shard[step] for shard in shards]
        assert torch.equal(torch.cat([part.pictures for part in parts]), expected.pictures)
        assert torch.equal(torch.cat([part.labels for part in parts]), expected.labels)
        assert sum((part.sample_ids for part in parts), ()) == expected.sample_ids


def test_processes_that_load_ahead_make_the_same_batches() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    alone, ahead = (taken(task(augment="crop_flip", loader_workers=n), 5) for n in (0, 2))
    for expected, batch in zip(alone, ahead, strict=True):
        assert torch.equal(batch.pictures, expected.pictures)
        assert batch.sample_ids == expected.sample_ids
    assert torch.equal(torch.get_rng_state(), before), "dropout would differ"


def test_an_epoch_takes_no_sample_twice_and_drops_the_incomplete_batch() -> None:
    first, second, third, *_ = taken(task(), 4)
    epoch = first.sample_ids + second.sample_ids
    assert len(set(epoch)) == 16
    assert third.sample_ids == tuple(epoch_order(PLAN.seed, 1, 20)[:8])
    assert third.sample_ids != first.sample_ids


def test_order_depends_on_seed_and_epoch_alone() -> None:
    assert sorted(epoch_order(0, 0, 50)) == list(range(50))
    assert np.array_equal(epoch_order(1, 2, 50), epoch_order(1, 2, 50))
    assert not np.array_equal(epoch_order(1, 2, 50), epoch_order(2, 1, 50))


def test_samples_are_those_of_their_ids() -> None:
    made = task()
    batch = taken(made, 1)[0]
    stored = made._data.training.read(np.array(batch.sample_ids))
    assert torch.equal(batch.labels, stored.labels)
    torch.testing.assert_close(batch.pictures, (stored.pictures / 255 - 0.5) / 0.25)
    assert batch.pictures.dtype == torch.float32
    assert batch.labels.dtype == torch.int64


def test_augmentation_changes_from_epoch_to_epoch() -> None:
    plan = BatchPlan(global_batch=20, seed=0)
    batches = task(augment="crop_flip").batches(plan, WHOLE)
    by_epoch = [
        dict(zip(batch.sample_ids, batch.pictures, strict=True)) for batch in islice(batches, 2)
    ]
    changed = [not torch.equal(by_epoch[0][sample], by_epoch[1][sample]) for sample in range(20)]
    assert sum(changed) >= 15


def test_crop_flip_cuts_out_of_a_black_frame() -> None:
    pictures = torch.randint(1, 256, (50, 3, 6, 7), dtype=torch.uint8)
    drawn = np.random.default_rng(0)
    tops, lefts = drawn.integers(0, 2 * PADDING + 1, (2, 50))
    flipped = drawn.integers(0, 2, 50).astype(np.bool_)
    framed = torch.nn.functional.pad(pictures, [PADDING] * 4)
    for made, frame, top, left, flip in zip(
        crop_flip(pictures, np.stack([tops, lefts]), flipped),
        framed,
        tops,
        lefts,
        flipped,
        strict=True,
    ):
        cut = frame[:, top : top + 6, left : left + 7]
        assert torch.equal(made, cut.flip(-1) if flip else cut)


def test_micro_batches_are_consecutive() -> None:
    batch = taken(task(), 1)[0]
    parts = batch.split(4)
    assert [len(part) for part in parts] == [2, 2, 2, 2]
    assert torch.equal(torch.cat([part.pictures for part in parts]), batch.pictures)
    assert sum((part.sample_ids for part in parts), ()) == batch.sample_ids
    with pytest.raises(InputError, match="8 samples cannot be cut into 3 equal micro-batches"):
        batch.split(3)


def test_batch_moves_to_a_device() -> None:
    batch = taken(task(), 1)[0]
    assert batch.to(torch.device("cpu")).pictures is batch.pictures
    moved = batch.to(torch.device("meta"))
    assert moved.pictures.device.type == moved.labels.device.type == "meta"
    assert moved.sample_ids == batch.sample_ids


def test_too_few_samples_for_one_step() -> None:
    with pytest.raises(DataError, match="7 samples are fewer than one step of 8"):
        task(training_samples=7).batches(PLAN, WHOLE)


def test_batch_that_cannot_be_shared_equally() -> None:
    with pytest.raises(InputError, match="8 samples cannot be shared equally by 3 ranks"):
        task().batches(PLAN, Shard(index=0, count=3))
