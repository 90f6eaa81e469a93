"""What an experiment may say about its workload, and what it is told when it says it wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from shardmark.core.errors import DataError, InputError
from shardmark.workloads import WORKLOADS, build_workload, options
from shardmark.workloads.datasets import DATASETS
from shardmark.workloads.detection.options import DetectionOptions
from shardmark.workloads.models import MODELS, model_known, registered_names
from shardmark.workloads.vision.options import ClassificationOptions


def test_options_are_those_of_the_named_task() -> None:
    assert WORKLOADS["classification"] is ClassificationOptions
    chosen = options({"name": "classification", "dataset": "random", "classes": 7})
    assert isinstance(chosen, ClassificationOptions)
    assert (chosen.classes, chosen.model) == (7, "resnet18")


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
        ({"dataset": "cifar10"}, "data_dir is missing; cifar10 needs the folder that holds it"),
        ({"dataset": "imagefolder", "data_dir": "x", "download": True}, "download is true"),
        ({"classes": 3}, "only random data let you choose it"),
        ({"dataset": "digit"}, "'digits', 'mnist', 'cifar10', 'imagefolder' or 'random'"),
        ({"lerning_rate": 1}, "Extra inputs are not permitted"),
        ({"label_smoothing": 1.0}, "less than 1"),
        ({"image_size": 0}, "greater than 0"),
    ],
)
def test_wrong_fields(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        options({"name": "classification"} | fields)
    assert message in str(caught.value)


def test_timm_model_without_timm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardmark.workloads.models.find_spec", lambda _: None)
    registered_names.cache_clear()
    try:
        with pytest.raises(ValidationError, match="timm is not installed; pip install"):
            ClassificationOptions(model="timm:resnet18")
    finally:
        registered_names.cache_clear()


def test_names_read_from_source_are_those_that_torchvision_registers() -> None:
    from torchvision import models

    assert registered_names("torchvision") == set(models.list_models(module=models))


def test_names_read_from_source_are_those_that_timm_registers() -> None:
    timm = pytest.importorskip("timm", reason="needs timm")
    assert registered_names("timm") == set(timm.list_models())


def test_every_listed_model_is_known() -> None:
    assert all(model_known(name) for name in MODELS)
    assert all(map(model_known, ("timm:resnet50", "timm:resnet50.a1_in1k", "json:loads")))
    assert not any(map(model_known, ("", "timm:", "resnet", "a b", "json:none", ":", "json:")))


def test_every_data_set_can_be_chosen() -> None:
    for name, line in DATASETS.items():
        kind = DetectionOptions if line.startswith("detection: ") else ClassificationOptions
        other = ClassificationOptions if kind is DetectionOptions else DetectionOptions
        assert kind.model_validate({"dataset": name, "data_dir": "x"})
        with pytest.raises(ValidationError):
            other.model_validate({"dataset": name, "data_dir": "x"})


def test_a_verification_evaluates_few_or_all_there_are(make_folder: Callable[..., Path]) -> None:
    chosen = ClassificationOptions(dataset="imagefolder", data_dir=str(make_folder()))
    assert chosen.shortened() == chosen, "there are only 12"
    options(chosen.shortened().model_dump(mode="json")).check_data()
    assert ClassificationOptions().shortened().validation_samples == 256
    assert ClassificationOptions(validation_samples=20).shortened().validation_samples == 20


def test_home_folder_is_expanded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    chosen = ClassificationOptions(dataset="cifar10", data_dir="~/data")
    assert chosen.folder == tmp_path / "data"
    with pytest.raises(DataError, match="no such folder for cifar10"):
        options({"name": "classification", "dataset": "cifar10", "data_dir": "~/data"}).check_data()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"training_samples": 1438}, "workload.training_samples: found 1438; digits has 1437"),
        ({"validation_samples": 361}, "workload.validation_samples: found 361; digits has 360"),
    ],
)
def test_more_samples_than_there_are(fields: dict[str, Any], message: str) -> None:
    mapping = {"name": "classification"} | fields
    for check in (lambda: options(mapping).check_data(), lambda: build_workload(mapping, 0)):
        with pytest.raises(InputError) as caught:
            check()
        assert message in str(caught.value)
