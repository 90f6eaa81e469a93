"""Detection as a workload: what it trains on and its quality do not depend on how it is shared."""

from __future__ import annotations

import importlib
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from shardmark.base.errors import InputError
from shardmark.base.layout import Shard
from shardmark.extras.detection.data import EvaluatedPicture
from shardmark.extras.detection.task import Detection, DetectionBatch
from shardmark.ranks.workloads.base import BatchPlan
from tests.unit.extras.detection.detection_data import CATEGORIES, SIZES, TWO_STAGES, edit, task
from tests.unit.ranks.workloads.test_models import weights_hash

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
        def __init__(self, outputs, losses):
            super().__init__()
            self.layer = nn.Linear(3, outputs)
            self.losses = losses

        def forward(self, pictures, targets=None):
            if not self.training:
                return [
                    {"boxes": torch.tensor([[1.0, 1.0, 9.0, 9.0]]), "scores": torch.ones(1),
                     "labels": torch.ones(1, dtype=torch.int64)}
                    for _ in pictures
                ]
            logits = self.layer(torch.stack([picture.mean((1, 2)) for picture in pictures]))
            assert all(target["masks"].shape[1:] == picture.shape[1:]
                       for picture, target in zip(pictures, targets))
            if self.losses != "two":
                return self.losses
            return {"first": logits.square().mean(), "second": logits.abs().mean().reshape(1)}

    def build(num_classes, losses="two", min_size=64, max_size=64):
        assert (min_size, max_size) == (64, 64)
        return Mine(num_classes, losses)

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


def same(part: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Compare pictures, or targets."""
    return all(
        all(np.array_equal(left[key], right[key]) for key in left | right)
        if isinstance(left, dict)
        else torch.equal(left, right)
        for left, right in zip(part, other, strict=True)
    )


# Batches.


@pytest.mark.parametrize(("count", "workers"), [(1, 2), (2, 0)])
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
        parts = [shard[step] for shard in shards]
        assert sum((part.sample_ids for part in parts), ()) == expected.sample_ids
        assert same(sum((part.pictures for part in parts), ()), expected.pictures)
        assert same(sum((part.targets for part in parts), ()), expected.targets)
    assert torch.equal(torch.get_rng_state(), before), "dropout would differ"


def test_targets_are_those_of_the_file(detection_folder: Path) -> None:
    (batch,) = taken(detection_folder, plan=ALL, model="maskrcnn_resnet50_fpn")
    assert sorted(batch.sample_ids) == list(range(6))
    labels: list[int] = []
    for sample, picture, target in sorted(
        zip(batch.sample_ids, batch.pictures, batch.targets, strict=True), key=lambda item: item[0]
    ):
        width, height = SIZES[sample % 3]
        assert (picture.dtype, picture.shape) == (torch.uint8, (3, height, width))
        assert target["image_id"] == 100 + sample
        assert target["boxes"].shape == (sample % 3, 4), "a picture without objects takes part"
        assert target["masks"].shape == (sample % 3, height, width)
        for (left, top, right, bottom), mask in zip(target["boxes"], target["masks"], strict=True):
            expected = torch.zeros(height, width, dtype=torch.uint8)
            expected[int(top) : int(bottom), int(left) : int(right)] = 1
            assert torch.equal(mask, expected)
        labels += target["labels"].tolist()
    assert labels == [1, 2, 3, 1, 2, 3], "ids 3, 18 and 90 become 1, 2 and 3"
    made = task(detection_folder)
    assert made.classes == tuple(CATEGORIES.values())
    assert "masks" not in next(made.batches(ALL, WHOLE)).targets[0]


def test_flips_turn_boxes_and_masks_with_the_picture(detection_folder: Path) -> None:
    plain = taken(detection_folder, 20, model="maskrcnn_resnet50_fpn")
    turned = taken(detection_folder, 20, **MASKS)
    flips: dict[int, set[bool]] = {}
    for before, after in zip(plain, turned, strict=True):
        assert before.sample_ids == after.sample_ids
        for place, sample in enumerate(before.sample_ids):
            picture, target = before.pictures[place], before.targets[place]
            mirrored = not torch.equal(after.pictures[place], picture)
            if mirrored:
                left, top, right, bottom = target["boxes"].T
                width = picture.shape[-1]
                boxes = np.stack([width - right, top, width - left, bottom], axis=1)
                target = target | {"boxes": boxes, "masks": target["masks"].flip(-1)}
                picture = picture.flip(-1)
            assert same((after.pictures[place],), (picture,))
            assert same((after.targets[place],), (target,))
            flips.setdefault(sample, set()).add(mirrored)
    assert list(flips.values()) == [{False, True}] * 6, "another draw in each epoch"


def test_seeds_of_proposals_differ_by_picture_step_and_draws(detection_folder: Path) -> None:
    def seeds(batches: list[DetectionBatch]) -> set[int]:
        return {target["sampling_seed"] for batch in batches for target in batch.targets}

    batches = taken(detection_folder, 6)
    assert len(seeds(batches)) == 24
    assert all(0 <= seed < 2**63 for seed in seeds(batches)), "as torch takes them"
    others = taken(detection_folder, 6, plan=BatchPlan(global_batch=4, seed=3, draws=1))
    assert not seeds(batches) & seeds(others)
    assert [b.sample_ids for b in others] == [b.sample_ids for b in batches]


def test_batch_moves_and_splits(detection_folder: Path) -> None:
    (batch,) = taken(detection_folder, **MASKS)
    stored = [picture.clone() for picture in batch.pictures]
    moved = batch.to(CPU).to(CPU)
    for picture, original, after in zip(stored, batch.pictures, moved.pictures, strict=True):
        assert torch.equal(original, picture), "the batch itself stays as it is"
        assert torch.equal(after, picture.float() / 255), "once"
    assert same(moved.targets, batch.targets)
    for target in moved.targets:
        assert (target["boxes"].dtype, target["labels"].dtype) == (torch.float32, torch.int64)
    parts = moved.split(2)
    assert [len(part) for part in parts] == [2, 2]
    assert same(parts[0].targets + parts[1].targets, moved.targets)
    assert same(parts[0].pictures + parts[1].pictures, moved.pictures)
    meta = batch.to(torch.device("meta"))
    assert meta.pictures[0].device == meta.targets[0]["boxes"].device == torch.device("meta")


# Losses.


def test_loss_is_the_sum_of_the_models(detection_folder: Path) -> None:
    made = task(detection_folder, min_size=32, model_options={"backbone_width": 8})
    model, batch = made.build_model(), taken(detection_folder)[0].to(CPU)
    loss = made.loss(model, batch)
    assert loss.weight == batch.weight == len(batch)
    losses = model(list(batch.pictures), list(batch.targets))
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


def test_user_defined_detector_is_trained_and_evaluated(
    detection_folder: Path, own_module: str
) -> None:
    fields: dict[str, Any] = {"model": f"{own_module}:build", "min_size": 64, "max_size": 64}
    made = task(detection_folder, **fields)
    model: Any = made.build_model()
    assert model.layer.out_features == 4, "a background and three classes"
    assert weights_hash(made.build_model()) == weights_hash(model)
    batch = next(made.batches(PLAN, WHOLE)).to(CPU)
    losses = model(list(batch.pictures), list(batch.targets))
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
    ("name", "losses", "found"),
    [
        ("fasterrcnn_resnet101_fpn", 4, {"boxes", "labels", "scores"}),
        ("maskrcnn_swin_t_fpn", 5, {"boxes", "labels", "scores", "masks"}),
    ],
)
def test_detectors_of_our_own_take_a_training_step(
    detection_folder: Path, name: str, losses: int, found: set[str]
) -> None:
    made = task(detection_folder, model=name, min_size=64, max_size=64, training_samples=6)
    model = made.build_model()
    batch = next(made.batches(BatchPlan(global_batch=2, seed=0), WHOLE)).to(CPU)
    assert len(model(list(batch.pictures), list(batch.targets))) == losses
    made.loss(model, batch).total.backward()  # type: ignore[no-untyped-call]
    norms = [p.grad.norm() for p in model.parameters() if p.grad is not None]
    assert len(norms) == len([*model.parameters()])
    assert torch.stack(norms).isfinite().all()
    with torch.no_grad():
        outputs = model.eval()([torch.rand(3, 64, 64)])
    assert set(outputs[0]) == found


@pytest.mark.parametrize(
    ("losses", "returned"),
    [(None, "NoneType"), ([1], "list"), ({"loss": 3.0}, "dict"), ({}, "dict")],
)
def test_model_that_returns_no_losses_is_refused(
    detection_folder: Path, own_module: str, losses: object, returned: str
) -> None:
    made = task(detection_folder, model=f"{own_module}:build", model_options={"losses": losses})
    model, batch = made.build_model(), next(made.batches(PLAN, WHOLE)).to(CPU)
    with pytest.raises(InputError, match=rf"workload.model: .*:build returns a {returned} in trai"):
        made.loss(model, batch)


# Evaluation.


class Oracle(nn.Module):
    """A model that finds exactly the marked objects."""

    def __init__(self, made: Detection, *, masks: bool = False) -> None:
        super().__init__()
        reading = made._validation.read(np.arange(made.validation_samples))
        self.known = {
            picture.numpy().tobytes(): objects
            for picture, objects in zip(reading.pictures, reading.objects, strict=True)
        }
        self.masks = masks

    def forward(self, pictures: list[Tensor]) -> list[dict[str, Tensor]]:
        return [self.detect(picture) for picture in pictures]

    def detect(self, picture: Tensor) -> dict[str, Tensor]:
        assert 0 <= picture.min() < picture.max() <= 1
        objects = self.known[(picture * 255).round().to(torch.uint8).numpy().tobytes()]
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


def test_masks_are_judged_where_the_model_finds_some(detection_folder: Path) -> None:
    """A model of one's own may not want masks; those that it finds cannot be judged."""
    made = task(detection_folder, model="maskrcnn_resnet50_fpn")
    averages = made.quality([made.evaluate(Oracle(made, masks=True), WHOLE, CPU)])
    assert averages == PERFECT | {f"mask_{name}": 1.0 for name in NAMES}, "from one half on"
    assert made.quality([made.evaluate(Oracle(made), WHOLE, CPU)]) == PERFECT

    def unmask(content: dict[str, Any]) -> None:
        for annotation in content["annotations"]:
            del annotation["segmentation"]

    edit(detection_folder, unmask, "val2017")
    made = task(detection_folder, model=TWO_STAGES)
    assert "masks" not in next(made.batches(PLAN, WHOLE)).targets[0]
    assert made.quality([made.evaluate(Oracle(made, masks=True), WHOLE, CPU)]) == PERFECT
    edit(detection_folder, lambda content: content.update(annotations=[]), "val2017")
    made = task(detection_folder)
    assert made.quality([made.evaluate(Oracle(made), WHOLE, CPU)]) == dict.fromkeys(NAMES)


def test_detections_do_not_depend_on_how_pictures_are_shared(detection_folder: Path) -> None:
    """Pictures that are padded together stay together: padding changes what is found."""
    made = task(detection_folder, model=TWO_STAGES)
    model = made.build_model().eval()
    whole, shared = (detected_by(made, model, count) for count in (1, 2))
    assert any(len(picture.detections.scores) for picture in whole.values())
    assert shared.keys() == whole.keys()
    for key, picture in whole.items():
        for name in ("boxes", "scores", "labels"):
            found, other = getattr(picture.detections, name), getattr(shared[key].detections, name)
            assert np.array_equal(found, other), (key, name)


def detected_by(made: Detection, model: nn.Module, count: int) -> dict[int, EvaluatedPicture]:
    shards = (Shard(index=index, count=count) for index in range(count))
    return {p.image_id: p for shard in shards for p in made.evaluate(model, shard, CPU)}
