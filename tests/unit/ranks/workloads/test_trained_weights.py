"""Classifiers that start from trained weights: a file, or torchvision's cache."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchvision.models import DenseNet, get_model, get_model_weights

from shardmark.base.errors import DataError
from shardmark.base.recipe import Recipe
from shardmark.predict.models import Models
from shardmark.ranks.workloads import build_workload, check_data, data_paths
from shardmark.ranks.workloads.base import Workload
from shardmark.ranks.workloads.model_building import build_on_meta
from shardmark.ranks.workloads.trained_weights import fill_classifier, path, published_classifier
from shardmark.ranks.workloads.vision.options import ClassificationOptions

MODEL = "squeezenet1_1"
HEAD = ("classifier.1.weight", "classifier.1.bias")
FEW = {"dataset": "random", "image_size": 32, "training_samples": 8, "validation_samples": 4}
State = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def _torch_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))


def options(**fields: Any) -> ClassificationOptions:
    return ClassificationOptions.model_validate(FEW | {"model": MODEL} | fields)


def task(**fields: Any) -> Workload:
    return build_workload(options(**fields), 0)


def state(classes: int = 10) -> State:
    """Other weights than those of any seed, in the layout of the published file."""
    model = get_model(MODEL, weights=None, num_classes=classes)
    return {name: torch.full_like(value, 0.25) for name, value in model.state_dict().items()}


def stored(file: Path, content: object) -> str:
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.save(content, file)
    return str(file)


@pytest.mark.parametrize("wrapped", [None, "model", "state_dict"])
def test_a_file_of_as_many_classes_sets_all_weights(tmp_path: Path, wrapped: str | None) -> None:
    content = state() if wrapped is None else {wrapped: state(), "epoch": 3}
    made = task(weights=stored(tmp_path / "mine.pt", content))
    model = made.build_model()
    assert all((value == 0.25).all() for value in model.state_dict().values())
    assert made.settings == {"initial_weights": "mine.pt"}
    assert data_paths(options(weights=str(tmp_path / "mine.pt"))) == (tmp_path / "mine.pt",)


def test_a_classifier_of_other_classes_starts_from_the_seed(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    file = tmp_path / "large.safetensors"
    safetensors.save_file(state(1000), file)
    made = task(weights=str(file))
    found, initial = made.build_model().state_dict(), task().build_model().state_dict()
    for name, value in found.items():
        assert torch.equal(value, initial[name]) if name in HEAD else (value == 0.25).all()
    kept = f"large.safetensors; {' and '.join(HEAD)} from the seed, for 10 classes"
    assert made.settings == {"initial_weights": kept}


def test_default_weights_are_read_from_torchs_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> object:
        raise AssertionError("nothing is to be fetched")

    monkeypatch.setattr(torch.hub, "urlopen", refuse)
    chosen = options(weights="default")
    url = get_model_weights(MODEL)["DEFAULT"].url
    file = path(published_classifier(MODEL))
    for call in (lambda: check_data(chosen), lambda: task(weights="default").build_model()):
        with pytest.raises(DataError, match=f"set it to true; or save {url} as {file}, or set"):
            call()
    stored(file, state(1000))
    assert check_data(chosen) == 8
    assert data_paths(chosen) == (file,)
    made = task(weights="default")
    assert (made.build_model().state_dict()["features.0.weight"] == 0.25).all()
    assert str(made.settings["initial_weights"]).startswith(f"{file.name}; classifier.1.weight")


def test_a_plan_needs_no_file_of_weights() -> None:
    linear = options(model="torch.nn:Flatten", weights="default.pt", dataset="digits")
    assert Models().training_samples(linear.without_weights()) is not None
    assert Models().training_samples(linear) == Models().training_samples(linear.without_weights())
    recipe: dict[str, Any] = {"global_batch": 2, "steps": 1, "optimizer": {"name": "sgd", "lr": 1}}
    profile = Models().profile(options(weights="default"), Recipe.model_validate(recipe))
    assert profile.size.parameters == sum(p.numel() for p in task().build_model().parameters())


def test_a_model_on_meta_is_built_with_weights(tmp_path: Path) -> None:
    built = build_on_meta(task(weights=stored(tmp_path / "mine.pt", state())))
    assert built is not None
    assert all(parameter.is_meta for parameter in built.parameters())


def renamed(pattern: str, by: str) -> State:
    return {re.sub(pattern, by, name): value for name, value in state().items()}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([1, 2], "has no state dictionary"),
        ({"epoch": 3}, "has no state dictionary"),
        (renamed("features", "body"), "does not fit SqueezeNet: it lacks 50 tensors (features.0."),
        (
            state() | {"features.0.weight": torch.zeros(64, 3, 5, 5)},
            "the shape of its features.0.weight is (64, 3, 5, 5), and the model's (64, 3, 3, 3)",
        ),
    ],
)
def test_files_that_do_not_fit_are_refused(tmp_path: Path, content: object, message: str) -> None:
    with pytest.raises(DataError, match=re.escape(message)):
        task(weights=stored(tmp_path / "mine.pt", content)).build_model()


def test_missing_and_broken_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no such file: mine\.pt; use null, default, or a file"):
        check_data(options(weights="mine.pt"))
    (tmp_path / "mine.pt").write_bytes(b"cut off")
    with pytest.raises(DataError, match=r"mine\.pt: cannot be read"):
        task(weights=str(tmp_path / "mine.pt")).build_model()


def test_names_of_published_files_that_torchvision_has_renamed(tmp_path: Path) -> None:
    """DenseNet's layers, and the auxiliary heads of Inception."""
    model: nn.Module = DenseNet(4, (1, 1, 1, 1), 8, num_classes=3)
    old = {re.sub(r"(norm|conv)(\d)\.", r"\1.\2.", n): v for n, v in model.state_dict().items()}
    old = {
        n if "denselayer" in n else m: old[n] for n, m in zip(old, model.state_dict(), strict=True)
    }
    assert any("denselayer1.norm.1.weight" in name for name in old)
    old["AuxLogits.fc.weight"] = torch.zeros(1)
    stored(tmp_path / "dense.pth", {name: torch.ones_like(value) for name, value in old.items()})
    assert fill_classifier(model, tmp_path / "dense.pth", classes=3) == ()
    assert all((value == 1).all() for value in model.state_dict().values())
