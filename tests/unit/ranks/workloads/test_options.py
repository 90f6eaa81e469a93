"""Valid options of a workload in an experiment, and messages about invalid ones."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from shardmark.base.errors import DataError, InputError
from shardmark.extras.detection.options import DETECTORS, DetectionOptions
from shardmark.ranks.workloads import check_data, options, shortened
from shardmark.ranks.workloads.datasets import DATASETS
from shardmark.ranks.workloads.models import MODELS, model_known, registered_names
from shardmark.ranks.workloads.vision.options import ClassificationOptions
from tests.unit.extras.detection import detection_data as detection

WRONG: dict[str, list[tuple[dict[str, Any], str]]] = {
    "classification": [
        ({"model": "resnet81"}, "unknown model 'resnet81'; nearest: resnet1"),
        ({"model": "ResNet18"}, "nearest: resnet18"),
        ({"model": "fasterrcnn_resnet50_fpn"}, "unknown model"),
        ({"model": "timm:resnet1888"}, "nearest: timm:resnet"),
        ({"model": "no_such_module:build"}, "no module 'no_such_module'"),
        ({"model": "json:no_such_name"}, "has no 'no_such_name'"),
        ({"model": "json.decoder.JSONDecoder"}, "did you mean json.decoder:JSONDecoder?"),
        ({"model": "json.decoder.deeper:build"}, "no module 'json.decoder.deeper'"),
        ({"model_options": {"num_classes": 3}}, "model_options.num_classes cannot be given"),
        ({"model_options": {"checkpoint_path": "a.bin"}}, "model_options.checkpoint_path cannot"),
        ({"model_options": {"pretrained_cfg": {}}}, "model_options.pretrained_cfg cannot be given"),
        ({"model_options": {"weights": "DEFAULT"}}, "and workload.weights the initial weights"),
        ({"model": "vit_cifar", "weights": "default"}, "torchvision has none for vit_cifar"),
        ({"model": "timm:resnet18", "weights": "default"}, "none for timm:resnet18: use null or"),
        ({"dataset": "cifar10"}, "data_dir is missing; cifar10"),
        ({"dataset": "imagefolder", "data_dir": "x", "download": True}, "download is true"),
        ({"classes": 3}, "only dataset: random has this option"),
        ({"dataset": "digit"}, "'digits', 'mnist', 'cifar10', 'imagefolder' or 'random'"),
        ({"lerning_rate": 1}, "Extra inputs are not permitted"),
    ],
    "detection": [
        ({"model": "fasterrcnn_resnet50"}, "unknown detector 'fasterrcnn_resnet50'; nearest: fas"),
        ({"model": "MaskRCNN_ResNet50_FPN"}, "nearest: maskrcnn_resnet50_fpn, "),
        ({"model": "json.decoder.JSONDecoder"}, "did you mean json.decoder:JSONDecoder?"),
        ({"model": "json:no_such_name"}, "has no 'no_such_name'"),
        ({"model_options": {"num_classes": 3}}, "is set by the data set"),
        ({"model_options": {"weights_backbone": None}}, "use workload.weights"),
        ({"model_options": {"min_size": 3}}, "use workload.min_size"),
        ({"model": "json:loads", "weights": "coco"}, "torchvision has none for json:loads"),
        ({"model": "fasterrcnn_swin_t_fpn", "weights": "coco"}, "torchvision has none for faster"),
        ({"min_size": 800, "max_size": 640}, "min_size 800 is larger than max_size 640"),
        ({"dataset": "coco"}, "data_dir is missing; coco"),
        ({"trainable_backbone_layers": 0, "weights": "mine.pth"}, "it needs weights: coco or im"),
    ],
    "language": [
        ({"model": "gpt3"}, "unknown model 'gpt3'; nearest: "),
        ({"model": "hf:gpt9"}, "nearest: hf:gpt2"),
        ({"model": "hf:nowhere.json"}, "no such file"),
        ({"model": "json:none"}, "has no 'none'"),
        ({"model": "hf:gpt2", "layers": 3}, "hf:gpt2 has no layers"),
        ({"model_options": {"n_layer": 3}}, "gpt has no model_options"),
        ({"model": "hf:gpt2", "model_options": {"vocab_size": 3}}, "use workload.vocabulary"),
        ({"model": "hf:.", "model_options": {"resid_pdrop": 0}}, "model_options has no effect"),
        ({"width": 100, "heads": 3}, "an even number of channels"),
        ({"model": "hf:bert"}, "it needs objective: masked"),
        ({"model": "hf:llama", "objective": "masked"}, "hf:llama is causal"),
        ({"dataset": "text"}, "data_dir is missing; text"),
        ({"dataset": "tokens", "data_dir": "x"}, "vocabulary is missing"),
        ({"packed": False, "document_masks": True}, "document_masks needs packed"),
        ({"tokenizer": "words"}, "allowed are bytes, FILE.json and {bpe: SIZE}"),
        ({"tokenizer": {"bpe": 100}}, "greater than or equal to 258"),
    ],
    "own": [
        ({"task": "no_such_module:Task"}, "no module 'no_such_module'"),
        ({"task": "json:Missing"}, "has no 'Missing'"),
        ({"task": "tokens"}, "names no class"),
    ],
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_fields_are_refused(name: str) -> None:
    for fields, message in WRONG[name]:
        with pytest.raises(ValidationError) as caught:
            options({"name": name} | fields)
        assert message in str(caught.value)


def test_timm_model_without_timm_names_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    registered_names.cache_clear()
    try:
        with pytest.raises(ValidationError, match="timm is not installed; pip install"):
            ClassificationOptions(model="timm:resnet18")
    finally:
        registered_names.cache_clear()


def test_listed_models_are_known() -> None:
    assert all(model_known(name) for name in MODELS)
    assert all(map(model_known, ("timm:resnet50", "timm:resnet50.a1_in1k", "json:loads")))
    assert not any(map(model_known, ("", "timm:", "resnet", "a b", "json:none", ":", "json:")))


def test_listed_data_sets_can_be_chosen() -> None:
    for name, line in DATASETS.items():
        task = line.partition(":")[0]
        given: dict[str, Any] = {"dataset": name, "data_dir": "x"}
        if task == "language":
            given |= {"name": task, "vocabulary": 300}
        else:
            given["name"] = task if task == "detection" else "classification"
        assert options(given)


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
    more = [{"id": n, "file_name": "1.png", "width": 32, "height": 48} for n in range(200, 206)]
    detection.edit(detection_folder, lambda content: content["images"].extend(more), "val2017")
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
def test_more_samples_than_the_data_set_has_are_refused(key: str, most: int) -> None:
    chosen = options({"name": "classification", key: most + 1})
    with pytest.raises(InputError, match=rf"workload.{key}: found {most + 1}; .* {most} at"):
        check_data(chosen)
