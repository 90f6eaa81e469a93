"""Detection as a workload: its loss, its quality however it is shared, and what it counts."""

from __future__ import annotations

import importlib
import json
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.workloads.detection_folder import SIZES, task
from tests.unit.workloads.test_models import weights_hash
from torch import Tensor, nn

from shardmark.core.errors import InputError
from shardmark.core.shares import Shard
from shardmark.workloads.base import BatchPlan
from shardmark.workloads.detection.average_precision import EvaluatedPicture
from shardmark.workloads.detection.batch import DetectionBatch
from shardmark.workloads.detection.task import Detection

CPU = torch.device("cpu")
WHOLE = Shard(index=0, count=1)
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

    def odd(num_classes, width=None, **sizes):
        return Odd(num_classes, width)

    not_a_model = dict
"""


def batch_of(made: Detection, pictures: int = 4) -> DetectionBatch:
    plan = BatchPlan(global_batch=pictures, seed=0)
    return next(made.batches(plan, WHOLE)).to(CPU)


@pytest.fixture
def own_module(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    (tmp_path / "detectors_of_my_own.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(sys.path))
    importlib.invalidate_caches()
    return "detectors_of_my_own"


@pytest.mark.parametrize("name", ["fasterrcnn_mobilenet_v3_large_320_fpn", "fcos_resnet18_fpn"])
def test_loss_is_the_sum_of_the_models(detection_folder: Path, name: str) -> None:
    made = task(detection_folder, model=name)
    model, batch = made.build_model(), batch_of(made, 3)
    loss = made.loss(model, batch)
    assert (loss.shape, loss.dtype) == ((), torch.float32)
    losses = model(list(batch.pictures), batch.model_targets)
    assert len(losses) >= 3
    torch.testing.assert_close(loss, torch.stack(list(losses.values())).sum())
    loss.backward()  # type: ignore[no-untyped-call]
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_loss_of_replicas_is_the_mean_of_theirs(detection_folder: Path) -> None:
    """DataParallel gives a vector of each loss; low precision is summed in fp32."""

    class Fixed(nn.Module):
        def forward(self, *_: object) -> dict[str, Tensor]:
            return {"a": torch.tensor([1.0, 3.0]), "b": torch.tensor(0.5, dtype=torch.bfloat16)}

    made = task(detection_folder)
    loss = made.loss(Fixed(), batch_of(made))
    assert (loss.item(), loss.shape, loss.dtype) == (2.5, (), torch.float32)


def test_model_of_ones_own(detection_folder: Path, own_module: str) -> None:
    made = task(detection_folder, model=f"{own_module}:build", model_options={"width": 6})
    model: Any = made.build_model()
    assert (model.width, model.layer.out_features) == (6, 4), "a background and three classes"
    assert weights_hash(made.build_model()) == weights_hash(model)
    batch = batch_of(made)
    losses = model(list(batch.pictures), batch.model_targets)
    torch.testing.assert_close(made.loss(model, batch), losses["first"] + losses["second"][0])
    assert made.watch_draws()() == ()
    assert made.sample_input_flops(model) == 2 * 2 * 3 * 4, "weights' gradient, not pictures'"
    found = made.quality([made.evaluate(model.eval(), WHOLE, CPU)])
    assert set(found) == {"map", "map_50", "map_75"}


def test_data_without_masks_for_a_model_of_ones_own(
    detection_folder: Path, own_module: str
) -> None:
    """It may not want them; if it finds some all the same, they cannot be judged."""
    file = detection_folder / "annotations" / "instances_val2017.json"
    content = json.loads(file.read_text())
    for annotation in content["annotations"]:
        del annotation["segmentation"]
    file.write_text(json.dumps(content))
    made = task(detection_folder, model=f"{own_module}:build")
    assert batch_of(made).masks is None
    assert "masks" not in batch_of(made).model_targets[0]
    part = made.evaluate(Oracle(made, masks=True), WHOLE, CPU)
    assert dict(made.quality([part])) == {"map": 1.0, "map_50": 1.0, "map_75": 1.0}


@pytest.mark.parametrize(
    ("losses", "kind"),
    [(None, "NoneType"), ([1], "list"), ({"loss": 3.0}, "dict"), ({}, "dict")],
)
def test_model_that_returns_no_losses(
    detection_folder: Path, own_module: str, losses: object, kind: str
) -> None:
    name = f"{own_module}:odd"
    made = task(detection_folder, model=name, model_options={"width": losses})
    model = made.build_model()
    with pytest.raises(InputError) as caught:
        made.loss(model, batch_of(made))
    assert str(caught.value) == (
        f"workload.model: {name} returns a {kind} in training mode; "
        "a dictionary of losses, as torchvision's detectors do"
    )


def test_function_that_makes_no_model(detection_folder: Path, own_module: str) -> None:
    made = task(detection_folder, model=f"{own_module}:not_a_model")
    with pytest.raises(InputError, match="made a dict"):
        made.build_model()
    made = task(detection_folder, model=f"{own_module}:build", model_options={"depth": 3})
    with pytest.raises(InputError, match=r"cannot be built with .*depth=3.*unexpected keyword"):
        made.build_model()


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
        return [self.found(picture) for picture in pictures]

    def found(self, picture: Tensor) -> dict[str, Tensor]:
        assert 0 <= picture.min() < picture.max() <= 1
        self.seen.append((picture * 255).round().to(torch.uint8).numpy().tobytes())
        objects = self.known[self.seen[-1]]
        found = {
            "boxes": torch.tensor(objects.boxes),
            "labels": torch.tensor(objects.labels),
            "scores": torch.ones(len(objects)),
        }
        if self.masks:
            drawn = torch.zeros(len(objects), 1, *picture.shape[1:])
            for mask, (left, top, right, bottom) in zip(drawn, objects.boxes, strict=True):
                mask[0, int(top) : int(bottom), int(left) : int(right)] = 0.5
            found["masks"] = drawn
        return found


@pytest.mark.parametrize(("count", "workers"), [(1, 0), (2, 0), (2, 1), (3, 0), (5, 0)])
def test_every_picture_once(detection_folder: Path, count: int, workers: int) -> None:
    made = task(detection_folder, loader_workers=workers)
    oracle = Oracle(made)
    parts = [made.evaluate(oracle, Shard(index=i, count=count), CPU) for i in range(count)]
    assert sorted(oracle.seen) == sorted(oracle.known)
    assert sorted(p.image_id for part in parts for p in part) == list(range(100, 106))
    sent = pickle.loads(pickle.dumps(parts))
    assert dict(made.quality(sent)) == {"map": 1.0, "map_50": 1.0, "map_75": 1.0}


def test_masks_are_judged_too(detection_folder: Path) -> None:
    made = task(detection_folder, model="maskrcnn_resnet50_fpn")
    found = made.quality([made.evaluate(Oracle(made, masks=True), WHOLE, CPU)])
    assert set(found) == {f"{kind}{name}" for kind in ("", "mask_") for name in NAMES}
    assert set(found.values()) == {1.0}, "a probability of one half is in the mask"
    found = made.quality([made.evaluate(Oracle(made), WHOLE, CPU)])
    assert set(found) == set(NAMES), "a model that finds no masks"


NAMES = ("map", "map_50", "map_75")


def test_detections_do_not_depend_on_how_pictures_are_shared(detection_folder: Path) -> None:
    """Pictures that are padded together stay together: padding changes what is found."""
    made = task(detection_folder)
    assert len(set(SIZES)) == 3
    model = made.build_model().eval()
    whole = found_by(made, model, 1)
    assert any(len(picture.found.scores) for picture in whole.values())
    for count in (2, 3):
        shared = found_by(made, model, count)
        assert shared.keys() == whole.keys()
        for key, picture in whole.items():
            for name in ("boxes", "scores", "labels"):
                one, other = getattr(picture.found, name), getattr(shared[key].found, name)
                assert np.array_equal(one, other), (key, name)


def found_by(made: Detection, model: nn.Module, count: int) -> dict[int, EvaluatedPicture]:
    shards = (Shard(index=index, count=count) for index in range(count))
    return {p.image_id: p for shard in shards for p in made.evaluate(model, shard, CPU)}


def test_no_quality_without_objects(detection_folder: Path) -> None:
    file = detection_folder / "annotations" / "instances_val2017.json"
    content = json.loads(file.read_text())
    file.write_text(json.dumps(content | {"annotations": []}))
    made = task(detection_folder)
    parts = [made.evaluate(Oracle(made), Shard(index=i, count=2), CPU) for i in range(2)]
    assert dict(made.quality(parts)) == dict.fromkeys(NAMES)


def test_more_shards_than_pictures(detection_folder: Path) -> None:
    made = task(detection_folder)
    part = made.evaluate(Oracle(made), Shard(index=4, count=5), CPU)
    assert part == []
    assert dict(made.quality([part])) == dict.fromkeys(NAMES)


def test_broken_validation_picture_is_left_out_and_told(detection_folder: Path) -> None:
    made = task(detection_folder, on_broken="skip")
    oracle = Oracle(made)
    (detection_folder / "val2017" / "1.png").write_bytes(b"no picture")
    for _ in range(2):
        assert len(made.evaluate(oracle, WHOLE, CPU)) == 5
    assert len(made.data_errors) == 1
    assert "1.png: cannot be read" in made.data_errors[0]


def test_flops_leave_the_model_alone(detection_folder: Path) -> None:
    made = task(detection_folder, model="fcos_resnet18_fpn", min_size=32)
    model = made.build_model().eval()
    before = weights_hash(model)
    flops = made.sample_input_flops(model)
    assert flops is not None
    assert flops > 10**8
    assert weights_hash(model) == before, "nor batch norms' statistics"
    assert not any(module.training for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_what_it_says_of_itself(detection_folder: Path) -> None:
    made = task(detection_folder, training_samples=5, validation_samples=3)
    assert (made.training_samples, made.validation_samples) == (5, 3)
    assert made.classes == ("gizmo", "dog", "person")
    assert not made.synthetic
    assert made.data_errors == ()
