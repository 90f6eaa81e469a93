"""Detection as a workload: what it trains on and its quality do not depend on how it is shared."""

from __future__ import annotations

import importlib
import json
import pickle
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.workloads.detection_folder import CATEGORIES, SIZES, TWO_STAGES, task
from tests.unit.workloads.test_models import weights_hash
from torch import Tensor, nn

from shardmark.core.errors import DataError, InputError
from shardmark.core.shares import Shard
from shardmark.workloads.base import BatchPlan
from shardmark.workloads.detection.annotated import EvaluatedPicture
from shardmark.workloads.detection.batch import DetectionBatch, Target
from shardmark.workloads.detection.task import Detection

PLAN = BatchPlan(global_batch=4, seed=3)
ALL = BatchPlan(global_batch=6, seed=0)
WHOLE = Shard(index=0, count=1)
CPU = torch.device("cpu")
MASKS: dict[str, Any] = {"model": "maskrcnn_resnet50_fpn", "augment": "flip"}
NAMES = ("map", "map_50", "map_75")
PERFECT = dict.fromkeys(NAMES, 1.0)
OWN = """if True:
    import torch
    from torch import nn

    class Mine(nn.Module):
        def __init__(self, outputs, width):
            super().__init__()
            self.layer = nn.Linear(3, outputs)
            self.width = width

        def forward(self, pictures, targets=None):
            if not self.training:
                return [
                    {"boxes": torch.tensor([[1.0, 1.0, 9.0, 9.0]]), "scores": torch.ones(1),
                     "labels": torch.ones(1, dtype=torch.int64)}
                    for _ in pictures
                ]
            means = torch.stack([picture.mean((1, 2)) for picture in pictures])
            assert all(target["masks"].shape[1:] == picture.shape[1:]
                       for picture, target in zip(pictures, targets))
            return self.losses(self.layer(means))

        def losses(self, logits):
            return {"first": logits.square().mean(), "second": logits.abs().mean().reshape(1)}

    class Odd(Mine):
        def losses(self, logits):
            return self.width

    def build(num_classes, width=4, min_size=1, max_size=1):
        assert (min_size, max_size) == (64, 64)
        return Mine(num_classes, width)

    def odd(num_classes, width=None):
        return Odd(num_classes, width)

    not_a_model = dict
"""


@pytest.fixture
def own_module(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    (tmp_path / "detectors_of_my_own.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(sys.path))
    importlib.invalidate_caches()
    return "detectors_of_my_own"


def taken(
    folder: Path, steps: int = 1, shard: Shard = WHOLE, plan: BatchPlan = PLAN, **fields: Any
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
    return (
        ids and np.array_equal(one.boxes, other.boxes) and np.array_equal(one.labels, other.labels)
    )


def joined(parts: list[DetectionBatch]) -> DetectionBatch:
    return DetectionBatch(
        pictures=sum((part.pictures for part in parts), ()),
        targets=sum((part.targets for part in parts), ()),
        sample_ids=sum((part.sample_ids for part in parts), ()),
        masks=sum((part.masks or () for part in parts), ()),
        step_weight=parts[0].step_weight,
    )


# Batches.


@pytest.mark.parametrize(("count", "workers"), [(1, 2), (2, 0), (4, 0)])
def test_shards_concatenate_to_the_unsharded_batch(
    detection_folder: Path, count: int, workers: int
) -> None:
    """Also those that other processes make ahead, which draw from no generator of torch's."""
    steps = 5  # an epoch takes one step: two pictures are left over
    before = torch.get_rng_state()
    whole = taken(detection_folder, steps, **MASKS)
    shards = [
        taken(detection_folder, steps, Shard(index=i, count=count), loader_workers=workers, **MASKS)
        for i in range(count)
    ]
    for step, expected in enumerate(whole):
        assert len(expected) == len(expected.masks or ()) == 4
        assert same(joined([shard[step] for shard in shards]), expected)
    assert torch.equal(torch.get_rng_state(), before), "dropout would differ"


def test_targets_are_those_of_the_file(detection_folder: Path) -> None:
    (batch,) = taken(detection_folder, plan=ALL)
    assert batch.masks is None
    assert sorted(batch.sample_ids) == list(range(6))
    labels: list[int] = []
    for sample, picture, target in sorted(
        zip(batch.sample_ids, batch.pictures, batch.targets, strict=True), key=lambda item: item[0]
    ):
        width, height = SIZES[sample % 3]
        assert (picture.dtype, picture.shape) == (torch.uint8, (3, height, width))
        assert target.image_id == 100 + sample
        assert target.boxes.shape == (sample % 3, 4), "a picture without objects takes part"
        labels += target.labels.tolist()
    assert labels == [1, 2, 3, 1, 2, 3], "ids 3, 18 and 90 become 1, 2 and 3"


def test_masks_are_the_rectangles(detection_folder: Path) -> None:
    (batch,) = taken(detection_folder, plan=ALL, model="maskrcnn_resnet50_fpn")
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
    flips: dict[int, set[bool]] = {}
    for before, after in zip(plain, turned, strict=True):
        assert before.sample_ids == after.sample_ids
        for place, sample in enumerate(before.sample_ids):
            flips.setdefault(sample, set()).add(flipped(before, after, place))
    assert list(flips.values()) == [{False, True}] * 6, "another draw in each epoch"


def flipped(before: DetectionBatch, after: DetectionBatch, place: int) -> bool:
    """Whether this picture was; all that belongs to it must be, too."""
    assert before.masks is not None
    assert after.masks is not None
    picture, masks = before.pictures[place], before.masks[place]
    boxes = before.targets[place].boxes
    mirrored = not torch.equal(after.pictures[place], picture)
    if mirrored:
        left, top, right, bottom = boxes.T
        width = picture.shape[-1]
        boxes = np.stack([width - right, top, width - left, bottom], axis=1)
        picture, masks = picture.flip(-1), masks.flip(-1)
    assert torch.equal(after.pictures[place], picture)
    assert torch.equal(after.masks[place], masks)
    assert np.array_equal(after.targets[place].boxes, boxes)
    assert np.array_equal(after.targets[place].labels, before.targets[place].labels)
    return mirrored


def test_seeds_of_proposals_differ_by_picture_step_and_draws(detection_folder: Path) -> None:
    batches = taken(detection_folder, 6)
    seeds = {target.sampling_seed for batch in batches for target in batch.targets}
    assert len(seeds) == 24
    assert all(0 <= seed < 2**63 for seed in seeds), "as torch takes them"
    others = taken(detection_folder, 6, plan=BatchPlan(global_batch=4, seed=3, draws=1))
    assert not seeds & {target.sampling_seed for batch in others for target in batch.targets}
    assert [b.sample_ids for b in others] == [b.sample_ids for b in batches]


def test_batch_moves_and_splits(detection_folder: Path) -> None:
    (batch,) = taken(detection_folder, **MASKS)
    stored = [picture.clone() for picture in batch.pictures]
    moved = batch.to(CPU).to(CPU)
    assert batch.model_targets == []
    for picture, original, after in zip(stored, batch.pictures, moved.pictures, strict=True):
        assert torch.equal(original, picture), "the batch itself stays as it is"
        assert torch.equal(after, picture.float() / 255), "once"
    assert batch.masks is not None
    for target, masks, given in zip(batch.targets, batch.masks, moved.model_targets, strict=True):
        assert (given["boxes"].dtype, given["labels"].dtype) == (torch.float32, torch.int64)
        assert np.array_equal(given["boxes"].numpy(), target.boxes)
        assert np.array_equal(given["labels"].numpy(), target.labels)
        assert torch.equal(given["masks"], masks)
        assert (given["sampling_seed"], given["image_id"]) == (
            target.sampling_seed,
            target.image_id,
        )
    parts = moved.split(2)
    assert [len(part) for part in parts] == [2, 2]
    assert same(joined(list(parts)), moved)
    assert [target for part in parts for target in part.model_targets] == moved.model_targets
    assert batch.split(1) == (batch,)
    with pytest.raises(InputError, match="4 samples cannot be cut into 3 equal micro-batches"):
        batch.split(3)
    meta = batch.to(torch.device("meta"))
    assert meta.pictures[0].device == meta.model_targets[0]["boxes"].device == torch.device("meta")


def test_broken_pictures_are_told_once(detection_folder: Path) -> None:
    """In training the next one takes the place; in validation it is left out."""
    made = task(detection_folder, on_broken="skip", model="maskrcnn_resnet50_fpn")
    oracle = Oracle(made)
    for split in ("train2017", "val2017"):
        (detection_folder / split / "1.png").write_bytes(b"no picture")
    with pytest.raises(DataError, match="cannot be read"):
        taken(detection_folder, 6)
    batches = list(islice(made.batches(PLAN, WHOLE), 6))
    assert not any(1 in batch.sample_ids for batch in batches)
    assert all(len(b) == len(b.pictures) == len(b.targets) == len(b.masks or ()) for b in batches)
    for _ in range(2):
        assert len(made.evaluate(oracle, WHOLE, CPU)) == 5
    assert ["1.png: cannot be read" in line for line in made.data_errors] == [True, True]


# Losses.


def test_loss_is_the_sum_of_the_models(detection_folder: Path) -> None:
    made = task(detection_folder, min_size=64, model_options={"backbone_width": 8})
    model, batch = made.build_model(), taken(detection_folder)[0].to(CPU)
    loss = made.loss(model, batch)
    assert loss.weight == batch.weight == len(batch)
    losses = model(list(batch.pictures), batch.model_targets)
    assert len(losses) == 3
    mean = torch.stack(list(losses.values())).sum()
    torch.testing.assert_close(loss.total, mean * len(batch))
    loss.total.backward()  # type: ignore[no-untyped-call]
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_loss_of_replicas_is_the_mean_of_theirs(detection_folder: Path) -> None:
    """DataParallel gives a vector of each loss; low precision is summed in fp32."""

    class Fixed(nn.Module):
        def forward(self, *_: object) -> dict[str, Tensor]:
            return {"a": torch.tensor([1.0, 3.0]), "b": torch.tensor(0.5, dtype=torch.bfloat16)}

    batch = taken(detection_folder)[0].to(CPU)
    loss = task(detection_folder).loss(Fixed(), batch).total
    assert (loss.item(), loss.shape, loss.dtype) == (2.5 * len(batch), (), torch.float32)


def test_model_of_ones_own(detection_folder: Path, own_module: str) -> None:
    fields: dict[str, Any] = {"model": f"{own_module}:build", "min_size": 64, "max_size": 64}
    made = task(detection_folder, model_options={"width": 6}, **fields)
    model: Any = made.build_model()
    assert (model.width, model.layer.out_features) == (6, 4), "a background and three classes"
    assert weights_hash(made.build_model()) == weights_hash(model)
    batch = next(made.batches(PLAN, WHOLE)).to(CPU)
    losses = model(list(batch.pictures), batch.model_targets)
    mean = losses["first"] + losses["second"][0]
    torch.testing.assert_close(made.loss(model, batch).total, mean * len(batch))
    assert made.watch_draws()() == ()
    assert made.sample_input_flops(model) == 2 * 2 * 3 * 4, "weights' gradient, not pictures'"
    assert set(made.quality([made.evaluate(model.eval(), WHOLE, CPU)])) == set(NAMES)
    with pytest.raises(InputError, match=r"cannot be built with .*depth=3.*unexpected keyword"):
        task(detection_folder, model_options={"depth": 3}, **fields).build_model()
    with pytest.raises(InputError, match="made a dict"):
        task(detection_folder, model=f"{own_module}:not_a_model").build_model()


@pytest.mark.parametrize(
    ("losses", "returned"),
    [(None, "NoneType"), ([1], "list"), ({"loss": 3.0}, "dict"), ({}, "dict")],
)
def test_model_that_returns_no_losses(
    detection_folder: Path, own_module: str, losses: object, returned: str
) -> None:
    made = task(detection_folder, model=f"{own_module}:odd", model_options={"width": losses})
    model, batch = made.build_model(), next(made.batches(PLAN, WHOLE)).to(CPU)
    with pytest.raises(InputError, match=rf"workload.model: .*:odd returns a {returned} in train"):
        made.loss(model, batch)


def test_flops_leave_the_model_alone(detection_folder: Path) -> None:
    made = task(detection_folder, min_size=32, model_options={"backbone_width": 16})
    model = made.build_model().eval()
    before = weights_hash(model)
    flops = made.sample_input_flops(model)
    assert flops is not None
    assert flops > 10**7
    assert weights_hash(model) == before, "nor batch norms' statistics"
    assert not any(module.training for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())


# Evaluation.


class Oracle(nn.Module):
    """Finds exactly what is marked, and remembers what it was shown."""

    def __init__(self, made: Detection, *, masks: bool = False) -> None:
        super().__init__()
        reading = made._data.validation.read(np.arange(made.validation_samples))
        self.known = {
            picture.numpy().tobytes(): objects
            for picture, objects in zip(reading.pictures, reading.objects, strict=True)
        }
        self.masks = masks
        self.seen: list[bytes] = []

    def forward(self, pictures: list[Tensor]) -> list[dict[str, Tensor]]:
        return [self.detect(picture) for picture in pictures]

    def detect(self, picture: Tensor) -> dict[str, Tensor]:
        assert 0 <= picture.min() < picture.max() <= 1
        self.seen.append((picture * 255).round().to(torch.uint8).numpy().tobytes())
        objects = self.known[self.seen[-1]]
        detected = {
            "boxes": torch.tensor(objects.boxes),
            "labels": torch.tensor(objects.labels),
            "scores": torch.ones(len(objects)),
        }
        if self.masks:
            drawn = torch.zeros(len(objects), 1, *picture.shape[1:])
            for mask, (left, top, right, bottom) in zip(drawn, objects.boxes, strict=True):
                mask[0, int(top) : int(bottom), int(left) : int(right)] = 0.5
            detected["masks"] = drawn
        return detected


@pytest.mark.parametrize(("count", "workers"), [(1, 0), (2, 1), (3, 0), (5, 0)])
def test_every_picture_once(detection_folder: Path, count: int, workers: int) -> None:
    """Two groups of pictures: more ranks have nothing to do."""
    made = task(detection_folder, loader_workers=workers)
    oracle = Oracle(made)
    parts = [made.evaluate(oracle, Shard(index=i, count=count), CPU) for i in range(count)]
    assert sorted(oracle.seen) == sorted(oracle.known)
    assert sorted(p.image_id for part in parts for p in part) == list(range(100, 106))
    assert all(part == [] for part in parts[2:])
    assert dict(made.quality(pickle.loads(pickle.dumps(parts)))) == PERFECT


def test_masks_are_judged_where_the_model_finds_some(detection_folder: Path) -> None:
    made = task(detection_folder, model="maskrcnn_resnet50_fpn")
    averages = made.quality([made.evaluate(Oracle(made, masks=True), WHOLE, CPU)])
    assert averages == PERFECT | {f"mask_{name}": 1.0 for name in NAMES}, "from one half on"
    assert made.quality([made.evaluate(Oracle(made), WHOLE, CPU)]) == PERFECT


def test_detections_do_not_depend_on_how_pictures_are_shared(detection_folder: Path) -> None:
    """Pictures that are padded together stay together: padding changes what is found."""
    made = task(detection_folder, model=TWO_STAGES)
    model = made.build_model().eval()
    whole = detected_by(made, model, 1)
    assert any(len(picture.found.scores) for picture in whole.values())
    for count in (2, 3):
        shared = detected_by(made, model, count)
        assert shared.keys() == whole.keys()
        for key, picture in whole.items():
            for name in ("boxes", "scores", "labels"):
                one, other = getattr(picture.found, name), getattr(shared[key].found, name)
                assert np.array_equal(one, other), (key, name)


def detected_by(made: Detection, model: nn.Module, count: int) -> dict[int, EvaluatedPicture]:
    shards = (Shard(index=index, count=count) for index in range(count))
    return {p.image_id: p for shard in shards for p in made.evaluate(model, shard, CPU)}


def test_data_without_masks_or_objects(detection_folder: Path) -> None:
    """A model of one's own may not want masks; those that it finds cannot be judged."""
    file = detection_folder / "annotations" / "instances_val2017.json"
    content = json.loads(file.read_text())
    for annotation in content["annotations"]:
        del annotation["segmentation"]
    file.write_text(json.dumps(content))
    made = task(detection_folder, model=TWO_STAGES)
    assert next(made.batches(PLAN, WHOLE)).masks is None
    assert made.quality([made.evaluate(Oracle(made, masks=True), WHOLE, CPU)]) == PERFECT
    file.write_text(json.dumps(content | {"annotations": []}))
    made = task(detection_folder)
    assert made.quality([made.evaluate(Oracle(made), WHOLE, CPU)]) == dict.fromkeys(NAMES)


def test_what_it_says_of_itself(detection_folder: Path) -> None:
    made = task(detection_folder, training_samples=5, validation_samples=3)
    assert (made.training_samples, made.validation_samples) == (5, 3)
    assert made.classes == tuple(CATEGORIES.values())
    assert not made.synthetic
    assert made.data_errors == ()
