"""What an experiment may say about its workload, and what it is told when it says it wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from tests.unit.workloads import detection_folder as detection

from shardmark.core.errors import DataError, InputError
from shardmark.workloads import build_workload, check_data, options, shortened
from shardmark.workloads.datasets import DATASETS
from shardmark.workloads.detection.options import DETECTORS, DetectionOptions
from shardmark.workloads.language.options import LanguageOptions
from shardmark.workloads.models import MODELS, model_known, registered_names
from shardmark.workloads.options import WorkloadOptions
from shardmark.workloads.vision.options import ClassificationOptions


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model": "resnet81"}, "unknown model 'resnet81'; nearest: resnet1"),
        ({"model": "ResNet18"}, "nearest: resnet18"),
        ({"model": "fasterrcnn_resnet50_fpn"}, "unknown model"),
        ({"model": "timm:resnet1888"}, "nearest: timm:resnet"),
        ({"model": "no_such_module:build"}, "no module 'no_such_module'"),
        ({"model": "json:no_such_name"}, "has no 'no_such_name'"),
        ({"model": "json.decoder.JSONDecoder"}, "did you mean json.decoder:JSONDecoder?"),
        ({"model": "json.decoder.deeper:build"}, "no module 'json.decoder.deeper'"),
        ({"model_options": {"num_classes": 3}}, "model_options.num_classes cannot be given"),
        ({"model_options": {"weights": "DEFAULT"}}, "weights start from the seed"),
        ({"dataset": "cifar10"}, "data_dir is missing; cifar10"),
        ({"dataset": "imagefolder", "data_dir": "x", "download": True}, "download is true"),
        ({"classes": 3}, "only random data let you choose it"),
        ({"dataset": "digit"}, "'digits', 'mnist', 'cifar10', 'imagefolder' or 'random'"),
        ({"lerning_rate": 1}, "Extra inputs are not permitted"),
        ({"label_smoothing": 1.0}, "less than 1"),
        ({"image_size": 0}, "greater than 0"),
    ],
)
def test_wrong_fields_of_classification(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        options({"name": "classification"} | fields)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model": "fasterrcnn_resnet50"}, "unknown detector 'fasterrcnn_resnet50'; nearest: fas"),
        ({"model": "MaskRCNN_ResNet50_FPN"}, "nearest: maskrcnn_resnet50_fpn, "),
        ({"model": "resnet18"}, "or package.module:function of your own"),
        ({"model": "json.decoder.JSONDecoder"}, "did you mean json.decoder:JSONDecoder?"),
        ({"model": "json:no_such_name"}, "has no 'no_such_name'"),
        ({"model_options": {"num_classes": 3}}, "the data set sets the number of classes"),
        ({"model_options": {"weights_backbone": None}}, "use workload.weights"),
        ({"model_options": {"min_size": 3}}, "use workload.min_size"),
        ({"model_options": {"trainable_backbone_layers": 3}}, "use workload.trainable_backbone_la"),
        ({"model": "json:loads", "weights": "coco"}, "torchvision has none for json:loads"),
        ({"model": "json:loads", "weights": "imagenet"}, "takes null or a file"),
        ({"model": "fasterrcnn_swin_t_fpn", "weights": "coco"}, "torchvision has none for faster"),
        ({"min_size": 800, "max_size": 640}, "min_size 800 is larger than max_size 640"),
        ({"dataset": "coco"}, "data_dir is missing; coco"),
        ({"trainable_backbone_layers": 2}, "it needs weights coco or imagenet"),
        ({"trainable_backbone_layers": 0, "weights": "mine.pth"}, "it needs weights coco or im"),
        ({"trainable_backbone_layers": 7, "weights": "coco"}, "less than or equal to 6"),
        ({"loader_workers": -1}, "greater than or equal to 0"),
        ({"image_size": 32}, "Extra inputs are not permitted"),
    ],
)
def test_wrong_fields_of_detection(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        options({"name": "detection"} | fields)
    assert message in str(caught.value)


def test_timm_model_without_timm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardmark.workloads.models.find_spec", lambda _: None)
    registered_names.cache_clear()
    try:
        with pytest.raises(ValidationError, match="timm is not installed; pip install"):
            ClassificationOptions(model="timm:resnet18")
    finally:
        registered_names.cache_clear()


def test_names_read_from_source_are_those_that_the_libraries_register() -> None:
    from torchvision import models

    assert registered_names("torchvision") == set(models.list_models(module=models))
    timm = pytest.importorskip("timm", reason="needs timm")
    assert registered_names("timm") == set(timm.list_models())


def test_listed_models_are_known() -> None:
    assert all(model_known(name) for name in MODELS)
    assert all(map(model_known, ("timm:resnet50", "timm:resnet50.a1_in1k", "json:loads")))
    assert not any(map(model_known, ("", "timm:", "resnet", "a b", "json:none", ":", "json:")))


def test_listed_data_sets_can_be_chosen() -> None:
    kinds: dict[str, type[WorkloadOptions]] = {
        "detection": DetectionOptions,
        "language": LanguageOptions,
    }
    for name, line in DATASETS.items():
        own = kinds.get(line.partition(":")[0], ClassificationOptions)
        every: list[type[WorkloadOptions]] = [ClassificationOptions, *kinds.values()]
        for kind in every:
            given: dict[str, Any] = {"dataset": name, "data_dir": "x"}
            given |= {"vocabulary": 300} if kind is LanguageOptions else {}
            if kind is own:
                assert kind.model_validate(given)
            else:
                with pytest.raises(ValidationError):
                    kind.model_validate(given)


def test_masks_are_read_for_models_that_may_learn_them() -> None:
    """A user's own may."""
    for name in (*DETECTORS, "json:loads"):
        masks = name.startswith("maskrcnn") or name == "json:loads"
        assert DetectionOptions(model=name).with_masks == masks


def test_a_verification_evaluates_few_or_all_there_are(
    make_folder: Callable[..., Path], detection_folder: Path
) -> None:
    chosen = ClassificationOptions(dataset="imagefolder", data_dir=str(make_folder()))
    assert shortened(chosen) == chosen, "there are only 12"
    assert shortened(ClassificationOptions()).validation_samples == 256
    assert shortened(ClassificationOptions(validation_samples=20)).validation_samples == 20
    few = detection.options(detection_folder)
    assert shortened(few) == few, "there are only 6"
    file = detection_folder / "annotations" / "instances_val2017.json"
    content = json.loads(file.read_text())
    content["images"] += [content["images"][0] | {"id": number} for number in range(200, 206)]
    file.write_text(json.dumps(content))
    for given, evaluated in ((None, 8), (3, 3), (9, 8)):
        short = shortened(detection.options(detection_folder, validation_samples=given))
        assert short.validation_samples == evaluated
    nowhere = shortened(detection.options(detection_folder / "nowhere"))
    with pytest.raises(DataError):
        check_data(nowhere)


def test_home_folder_is_expanded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for dataset, name in (("cifar10", "classification"), ("coco", "detection")):
        with pytest.raises(DataError, match=f"{tmp_path}/data: no such folder"):
            check_data(options({"name": name, "dataset": dataset, "data_dir": "~/data"}))


@pytest.mark.parametrize(("key", "most"), [("training_samples", 1437), ("validation_samples", 360)])
def test_more_samples_than_there_are(key: str, most: int) -> None:
    chosen = options({"name": "classification", key: most + 1})
    for call in (check_data, lambda chosen: build_workload(chosen, 0)):
        with pytest.raises(InputError, match=rf"workload.{key}: found {most + 1}; .* {most} at"):
            call(chosen)
