"""What an experiment may say about detection, and what it is told when it says it wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from tests.unit.workloads.detection_folder import options as on

from shardmark.core.errors import DataError, InputError
from shardmark.workloads import WORKLOADS, options
from shardmark.workloads.detection.options import DETECTORS, DetectionOptions


def test_defaults() -> None:
    chosen = options({"name": "detection"})
    assert WORKLOADS["detection"] is type(chosen) is DetectionOptions
    assert (chosen.model, chosen.dataset) == ("fasterrcnn_resnet50_fpn", "digits-detection")
    assert chosen.loads() == ("shardmark.workloads.detection.task",)


@pytest.mark.parametrize("name", DETECTORS)
def test_every_detector_can_be_chosen(name: str) -> None:
    assert DetectionOptions(model=name).with_masks == name.startswith("maskrcnn")
    assert DETECTORS[name].startswith("detector: ")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model": "fasterrcnn_resnet50"}, "unknown detector 'fasterrcnn_resnet50'; nearest: fas"),
        ({"model": "MaskRCNN_ResNet50_FPN"}, "nearest: maskrcnn_resnet50_fpn, maskrcnn_resnet50_f"),
        ({"model": "resnet18"}, "or package.module:function of your own"),
        ({"model": "json.decoder.JSONDecoder"}, "did you mean json.decoder:JSONDecoder?"),
        ({"model": "zzz"}, "nearest: fasterrcnn_resnet50_fpn, "),
        ({"model": "no_such_module:build"}, "no module 'no_such_module'"),
        ({"model": "json:no_such_name"}, "has no 'no_such_name'"),
        (
            {"model_options": {"num_classes": 3}},
            "model_options.num_classes cannot be given: the data set sets the number of classes",
        ),
        (
            {"model_options": {"weights": "DEFAULT"}},
            "model_options.weights cannot be given: use workload.weights",
        ),
        (
            {"model_options": {"weights_backbone": None}},
            "model_options.weights_backbone cannot be given: use workload.weights",
        ),
        ({"model_options": {"min_size": 3}}, "cannot be given: use workload.min_size"),
        ({"model_options": {"max_size": 3}}, "cannot be given: use workload.max_size"),
        (
            {"model_options": {"trainable_backbone_layers": 3}},
            "cannot be given: use workload.trainable_backbone_layers",
        ),
        (
            {"model": "json:loads", "weights": "coco"},
            "weights is coco; torchvision has none for json:loads, which takes null or a file",
        ),
        ({"model": "json:loads", "weights": "imagenet"}, "takes null or a file"),
        (
            {"model": "fasterrcnn_swin_t_fpn", "weights": "coco"},
            "weights is coco; torchvision has none for fasterrcnn_swin_t_fpn",
        ),
        ({"model": "fcos_resnet18_fpn", "weights": "coco"}, "torchvision has none for fcos"),
        ({"min_size": 800, "max_size": 640}, "min_size 800 is larger than max_size 640"),
        ({"min_size": 0}, "greater than 0"),
        ({"dataset": "coco"}, "data_dir is missing; coco needs the folder that holds it"),
        ({"dataset": "cocoa"}, "'digits-detection' or 'coco'"),
        (
            {"trainable_backbone_layers": 2},
            "trainable_backbone_layers is 2; it needs weights coco or imagenet",
        ),
        (
            {"trainable_backbone_layers": 0, "weights": "mine.pth"},
            "trainable_backbone_layers is 0; it needs weights coco or imagenet",
        ),
        ({"trainable_backbone_layers": 7, "weights": "coco"}, "less than or equal to 6"),
        ({"loader_workers": -1}, "greater than or equal to 0"),
        ({"augment": "crop"}, "'none' or 'flip'"),
        ({"image_size": 32}, "Extra inputs are not permitted"),
    ],
)
def test_wrong_fields(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        options({"name": "detection"} | fields)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "fields",
    [
        {"min_size": 640, "max_size": 640},
        {"max_size": 100},
        {"weights": "coco", "trainable_backbone_layers": 0, "download": True},
        {"model": "fasterrcnn_swin_t_fpn", "weights": "imagenet"},
        {"model": "json:loads", "weights": "mine.pth", "model_options": {"depth": 3, "a": None}},
        {"dataset": "coco", "data_dir": "~/coco", "pictures_without_objects": "drop"},
    ],
)
def test_options_survive_a_file(fields: dict[str, Any]) -> None:
    chosen = options({"name": "detection"} | fields)
    written = json.dumps(chosen.model_dump(mode="json"))
    assert options(json.loads(written)) == chosen


def test_home_folder_is_expanded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    chosen = DetectionOptions(dataset="coco", data_dir="~/data")
    assert chosen.folder == tmp_path / "data"
    with pytest.raises(DataError, match=str(tmp_path / "data")):
        chosen.check_data()


def test_masks_are_read_for_models_that_may_learn_them() -> None:
    assert DetectionOptions(model="json:loads").with_masks
    assert not DetectionOptions(model="retinanet_resnet50_fpn").with_masks


@pytest.mark.parametrize(("given", "shown"), [(None, 8), (3, 3), (9, 8)])
def test_a_verification_evaluates_few(
    detection_folder: Path, given: int | None, shown: int
) -> None:
    file = detection_folder / "annotations" / "instances_val2017.json"
    content = json.loads(file.read_text())
    first = content["images"][0]
    content["images"] += [first | {"id": number} for number in range(200, 206)]
    file.write_text(json.dumps(content))
    short = on(detection_folder, validation_samples=given).shortened()
    assert short == on(detection_folder, validation_samples=shown)
    options(short.model_dump(mode="json")).check_data()


def test_a_verification_of_fewer_pictures_evaluates_all(detection_folder: Path) -> None:
    chosen = on(detection_folder)
    assert chosen.shortened() == chosen
    options(chosen.shortened().model_dump(mode="json")).check_data()


def test_a_verification_without_data_says_so_later(tmp_path: Path) -> None:
    short = on(tmp_path / "nowhere").shortened()
    assert short.validation_samples == 8
    with pytest.raises(DataError):
        short.check_data()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"training_samples": 7}, "workload.training_samples: found 7; coco has 6 at most"),
        ({"validation_samples": 7}, "workload.validation_samples: found 7; coco has 6 at most"),
    ],
)
def test_more_pictures_than_there_are(
    detection_folder: Path, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        on(detection_folder, **fields).check_data()
