"""Fairness: what a detector is trained on does not depend on how it is shared."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.workloads.detection_folder import CATEGORIES, SIZES, task
from torch import Tensor

from shardmark.core.errors import DataError, InputError
from shardmark.core.shares import Shard
from shardmark.workloads.base import BatchPlan
from shardmark.workloads.detection.batch import DetectionBatch, Target

PLAN = BatchPlan(global_batch=4, seed=3)
WHOLE = Shard(index=0, count=1)
CPU = torch.device("cpu")
MASKS: dict[str, Any] = {"model": "maskrcnn_resnet50_fpn", "augment": "flip"}


def taken(
    folder: Path, steps: int, shard: Shard = WHOLE, plan: BatchPlan = PLAN, **fields: Any
) -> list[DetectionBatch]:
    return list(islice(task(folder, **fields).batches(plan, shard), steps))


def same(one: DetectionBatch, other: DetectionBatch) -> bool:
    return (
        one.sample_ids == other.sample_ids
        and all(map(torch.equal, one.pictures, other.pictures))
        and all(map(torch.equal, one.masks or (), other.masks or ()))
        and len(one.targets) == len(other.targets)
        and all(map(same_target, one.targets, other.targets))
    )


def same_target(one: Target, other: Target) -> bool:
    ids = (one.image_id, one.sampling_seed) == (other.image_id, other.sampling_seed)
    arrays = np.array_equal(one.boxes, other.boxes) and np.array_equal(one.labels, other.labels)
    return ids and arrays


def joined(parts: list[DetectionBatch]) -> DetectionBatch:
    return DetectionBatch(
        pictures=sum((part.pictures for part in parts), ()),
        targets=sum((part.targets for part in parts), ()),
        sample_ids=sum((part.sample_ids for part in parts), ()),
        masks=sum((part.masks or () for part in parts), ()),
    )


@pytest.mark.parametrize("count", [1, 2, 4])
def test_shards_concatenate_to_the_unsharded_batch(detection_folder: Path, count: int) -> None:
    steps = 5  # an epoch takes one step: two pictures are left over
    whole = taken(detection_folder, steps, **MASKS)
    shards = [
        taken(detection_folder, steps, Shard(index=index, count=count), **MASKS)
        for index in range(count)
    ]
    for step, expected in enumerate(whole):
        assert len(expected) == len(expected.masks or ()) == 4
        assert same(joined([shard[step] for shard in shards]), expected)


def test_processes_that_load_ahead_make_the_same_batches(detection_folder: Path) -> None:
    before = torch.get_rng_state()
    alone, ahead = (taken(detection_folder, 4, loader_workers=n, **MASKS) for n in (0, 2))
    assert all(map(same, alone, ahead))
    assert torch.equal(torch.get_rng_state(), before), "dropout would differ"


def test_targets_are_those_of_the_file(detection_folder: Path) -> None:
    plan = BatchPlan(global_batch=6, seed=0)
    batch = taken(detection_folder, 1, plan=plan)[0]
    assert batch.masks is None
    assert sorted(batch.sample_ids) == list(range(6))
    seen: list[int] = []
    for sample, picture, target in sorted(
        zip(batch.sample_ids, batch.pictures, batch.targets, strict=True), key=lambda item: item[0]
    ):
        width, height = SIZES[sample % 3]
        assert (picture.dtype, picture.shape) == (torch.uint8, (3, height, width))
        assert target.image_id == 100 + sample
        assert target.boxes.shape == (sample % 3, 4), "a picture without objects takes part"
        assert target.boxes.dtype == np.dtype(np.float32)
        assert target.labels.dtype == np.dtype(np.int64)
        seen += target.labels.tolist()
    assert seen == [1, 2, 3, 1, 2, 3], "ids 3, 18 and 90 become 1, 2 and 3"
    assert task(detection_folder).classes == tuple(CATEGORIES.values())


def test_masks_are_the_rectangles(detection_folder: Path) -> None:
    plan = BatchPlan(global_batch=6, seed=0)
    batch = taken(detection_folder, 1, plan=plan, model="maskrcnn_resnet50_fpn")[0]
    assert batch.masks is not None
    for picture, target, masks in zip(batch.pictures, batch.targets, batch.masks, strict=True):
        assert masks.dtype == torch.uint8
        assert masks.shape == (len(target.labels), *picture.shape[1:])
        for (left, top, right, bottom), mask in zip(target.boxes, masks, strict=True):
            expected = torch.zeros_like(mask)
            expected[int(top) : int(bottom), int(left) : int(right)] = 1
            assert torch.equal(mask, expected)


def test_flips_turn_boxes_and_masks_with_the_picture(detection_folder: Path) -> None:
    plain = taken(detection_folder, 20, model="maskrcnn_resnet50_fpn")
    turned = taken(detection_folder, 20, **MASKS)
    assert all(map(same, turned, taken(detection_folder, 20, **MASKS)))
    flips: dict[int, set[bool]] = {}
    for before, after in zip(plain, turned, strict=True):
        assert before.sample_ids == after.sample_ids
        for place, sample in enumerate(before.sample_ids):
            found = flipped(before, after, place)
            flips.setdefault(sample, set()).add(found)
    assert list(flips.values()) == [{False, True}] * 6, "another draw in each epoch"


def flipped(before: DetectionBatch, after: DetectionBatch, place: int) -> bool:
    """Whether this picture was; all that belongs to it must be, too."""
    picture, target = before.pictures[place], before.targets[place]
    assert before.masks is not None
    assert after.masks is not None
    masks: Tensor = before.masks[place]
    boxes = target.boxes
    mirrored = not torch.equal(after.pictures[place], picture)
    if mirrored:
        left, top, right, bottom = boxes.T
        width = picture.shape[-1]
        boxes = np.stack([width - right, top, width - left, bottom], axis=1)
        picture, masks = picture.flip(-1), masks.flip(-1)
    assert torch.equal(after.pictures[place], picture)
    assert torch.equal(after.masks[place], masks)
    assert np.array_equal(after.targets[place].boxes, boxes)
    assert np.array_equal(after.targets[place].labels, target.labels)
    return mirrored


def test_seeds_of_proposals_differ_by_picture_step_and_draws(detection_folder: Path) -> None:
    seeds = [t.sampling_seed for b in taken(detection_folder, 6) for t in b.targets]
    assert len(set(seeds)) == 24
    assert all(0 <= seed < 2**63 for seed in seeds), "as torch takes them"
    other = BatchPlan(global_batch=4, seed=3, draws=1)
    others = taken(detection_folder, 6, plan=other)
    assert not {t.sampling_seed for b in others for t in b.targets}.intersection(seeds)
    assert [b.sample_ids for b in others] == [b.sample_ids for b in taken(detection_folder, 6)]


def test_batch_moves_to_a_device_once(detection_folder: Path) -> None:
    batch = taken(detection_folder, 1, **MASKS)[0]
    stored = [picture.clone() for picture in batch.pictures]
    moved = batch.to(CPU)
    again = moved.to(CPU)
    assert batch.model_targets == []
    assert all(map(torch.equal, batch.pictures, stored)), "the batch itself stays as it is"
    for picture, first, second in zip(stored, moved.pictures, again.pictures, strict=True):
        assert first.dtype == torch.float32
        assert torch.equal(first, picture.float() / 255)
        assert torch.equal(second, first)
    assert moved.masks is batch.masks
    assert batch.masks is not None
    for target, masks, given in zip(batch.targets, batch.masks, again.model_targets, strict=True):
        assert given["boxes"].dtype == torch.float32
        assert given["labels"].dtype == torch.int64
        assert np.array_equal(given["boxes"].numpy(), target.boxes)
        assert np.array_equal(given["labels"].numpy(), target.labels)
        assert torch.equal(given["masks"], masks)
        assert given["sampling_seed"] == target.sampling_seed
        assert given["image_id"] == target.image_id
    meta = batch.to(torch.device("meta"))
    assert {picture.device.type for picture in meta.pictures} == {"meta"}
    assert meta.model_targets[0]["boxes"].device.type == "meta"


@pytest.mark.parametrize("masks", [False, True])
def test_micro_batches_are_consecutive(detection_folder: Path, masks: bool) -> None:
    fields = MASKS if masks else {}
    batch = taken(detection_folder, 1, **fields)[0].to(CPU)
    parts = batch.split(2)
    assert [len(part) for part in parts] == [2, 2]
    assert same(joined(list(parts)), batch)
    assert all((part.masks is not None) == masks for part in parts)
    assert [target for part in parts for target in part.model_targets] == batch.model_targets
    assert batch.split(1) == (batch,)
    with pytest.raises(InputError, match="4 samples cannot be cut into 3 equal micro-batches"):
        batch.split(3)


def test_broken_picture_is_replaced_and_told_once(detection_folder: Path) -> None:
    (detection_folder / "train2017" / "1.png").write_bytes(b"no picture")
    with pytest.raises(DataError, match="cannot be read"):
        taken(detection_folder, 6)
    made = task(detection_folder, on_broken="skip", model="maskrcnn_resnet50_fpn")
    batches = list(islice(made.batches(PLAN, WHOLE), 6))
    assert not any(1 in batch.sample_ids for batch in batches)
    assert all(len(b) == len(b.pictures) == len(b.targets) == len(b.masks or ()) for b in batches)
    assert len(made.data_errors) == 1
    assert "1.png" in made.data_errors[0]


def test_batches_that_cannot_be_made(detection_folder: Path) -> None:
    made = task(detection_folder)
    with pytest.raises(DataError, match="6 samples are fewer than one step of 8"):
        made.batches(BatchPlan(global_batch=8, seed=0), WHOLE)
    with pytest.raises(InputError, match="4 samples cannot be shared equally by 3 ranks"):
        made.batches(PLAN, Shard(index=0, count=3))
