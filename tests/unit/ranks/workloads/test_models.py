"""Models are built by name, with the same weights everywhere; their operations are counted."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardmark.base.errors import InputError
from shardmark.experiment.matrix import expand
from shardmark.ranks.strategies.blocks import checkpoint_blocks
from shardmark.ranks.train.rank import workload_of
from shardmark.ranks.workloads import model_building
from shardmark.ranks.workloads.models import registered_names
from shardmark.ranks.workloads.vision.options import ClassificationOptions
from shardmark.ranks.workloads.vision.task import Classification
from tests.unit.bench.launch.fakes import experiment


def task(model: str, seed: int = 0, **fields: Any) -> Classification:
    chosen = {"model": model, "dataset": "random", "training_samples": 4} | fields
    return Classification(ClassificationOptions.model_validate(chosen), seed)


def weights_hash(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("resnet18", {}),
        ("vit_cifar", {"image_size": 16, "model_options": {"num_layers": 1, "hidden_dim": 64}}),
        ("vit_b_16", {"image_size": 48}),
        ("googlenet", {}),
        ("vit_tiny_patch16_224", {"image_size": 64}),
    ],
)
def test_listed_models_take_pictures_of_the_given_size(name: str, fields: dict[str, Any]) -> None:
    """The output is a tensor of logits, in training mode, too; bare names may be timm's."""
    if name.startswith("vit_tiny"):
        pytest.importorskip("timm", reason="needs timm")
    size = fields.get("image_size", 32)
    made = task(name, **fields)
    with torch.device("cpu" if name == "vit_cifar" else "meta"):
        model = made.build_model()
        logits = model(torch.zeros(2, 3, size, size))
    assert model.training
    assert logits.shape == (2, 10)


def test_user_defined_model_is_imported_and_built(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source = """if True:
        from torch import nn
        def build(num_classes, width=4):
            layers = nn.Linear(3 * 32 * 32, width), nn.Linear(width, num_classes)
            return nn.Sequential(nn.Flatten(), *layers)
        not_a_model = dict
        number = 3
    """
    (tmp_path / "models_of_my_own.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["/nowhere"])
    importlib.invalidate_caches()
    made = task("models_of_my_own:build", model_options={"width": 6})
    model = made.build_model()
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    assert weights_hash(made.build_model()) == weights_hash(model)
    for name, message in (
        ("not_a_model", "made a dict"),
        ("number", "is not callable"),
        ("build", r"cannot be built with .*depth=3.*"),
    ):
        options = {"depth": 3} if name == "build" else {}
        with pytest.raises(InputError, match=message):
            task(f"models_of_my_own:{name}", model_options=options).build_model()


@pytest.mark.parametrize(
    ("name", "builds", "message"),
    [
        ("fresh", 2, None),
        ("kept", 2, "a second time"),
        ("with_a_kept_part", 2, "a second time"),
        ("trained", 1, "has gradients"),
        ("lazy", 1, "lazy layers"),
    ],
)
def test_a_model_that_was_used_before_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, builds: int, message: str | None
) -> None:
    """Each evaluation builds a model: it must not be the one that is sharded or trained."""
    kept, activation = nn.Linear(2, 2), nn.ReLU()

    def trained(num_classes: int) -> nn.Module:
        model = nn.Linear(2, num_classes)
        model(torch.ones(1, 2)).sum().backward()
        return model

    makers: dict[str, Callable[..., nn.Module]] = {
        "fresh": lambda num_classes: nn.Sequential(nn.Linear(2, num_classes), activation),
        "kept": lambda num_classes: kept,  # noqa: ARG005
        "with_a_kept_part": lambda num_classes: nn.Sequential(kept, nn.Linear(2, num_classes)),
        "trained": trained,
        "lazy": lambda num_classes: nn.LazyLinear(out_features=num_classes),
    }
    monkeypatch.setattr(model_building, "user_function", lambda _: makers[name])
    expected = nullcontext() if message is None else pytest.raises(InputError, match=message)
    made = task("torch.nn:Linear")
    models = [made.build_model() for _ in range(builds - 1)]
    with expected:
        models.append(made.build_model())
    assert len(models) == builds - (message is not None)


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("resnet18", {"model_options": {"depth": 3}}, "unexpected keyword argument 'depth'"),
        ("vit_cifar", {"image_size": 30}, "Input shape indivisible by patch size"),
        ("timm:resnet10t", {"model_options": {"depht": 3}}, "unexpected keyword argument 'depht'"),
    ],
)
def test_wrong_model_options_are_refused(name: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=f"^workload.model_options: .*{message}"):
        task(name, **fields).build_model()


def test_flops_of_known_layers_are_counted() -> None:
    """Three passes over the weights, two where the input needs no gradient."""
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False),
        nn.ConvTranspose2d(8, 4, 2, stride=2, bias=False),
        nn.Flatten(),
        nn.Linear(4 * 16 * 16, 10, bias=False),
    )
    first, depthwise = 2 * 64 * 8 * 3 * 9, 2 * 64 * 8 * 9
    transposed, linear = 2 * 64 * 8 * 4 * 4, 2 * 1024 * 10
    expected = 2 * first + 3 * (depthwise + transposed + linear)
    assert task("resnet18", image_size=8).sample_input_flops(model) == expected


def test_flops_include_recomputed_layers() -> None:
    """A block's second forward pass ends at the last tensor that its backward pass needs."""
    block = nn.Sequential(nn.Linear(192, 16, bias=False), nn.Linear(16, 10, bias=False))
    model = nn.Sequential(nn.Flatten(), block)
    first, second = 2 * 192 * 16, 2 * 16 * 10
    assert task("resnet18", image_size=8).sample_input_flops(model) == 2 * first + 3 * second
    checkpoint_blocks(model, True, [block])
    assert task("resnet18", image_size=8).sample_input_flops(model) == 3 * first + 3 * second
    assert not any(parameter.is_meta for parameter in model.parameters())


def test_flops_of_a_residual_network_equal_those_of_its_layers() -> None:
    """Each weight meets each place of its output three times; the first layer's only twice."""
    made = task("resnet18")
    forward: list[int] = []

    def count(layer: nn.Module, _: object, output: torch.Tensor) -> None:
        assert isinstance(layer, nn.Conv2d | nn.Linear)
        forward.append(2 * output[0].numel() // output.shape[1] * layer.weight.numel())

    with torch.device("meta"):
        model = made.build_model()
        counted = made.sample_input_flops(model)
        for layer in model.modules():
            if isinstance(layer, nn.Conv2d | nn.Linear):
                layer.register_forward_hook(count)
        model(torch.zeros(2, 3, 32, 32))
    assert counted == 3 * sum(forward) - forward[0]


def test_flops_are_none_for_a_model_that_reads_values() -> None:
    class Looks(nn.Module):
        def forward(self, pictures: torch.Tensor) -> torch.Tensor:
            return pictures.flatten(1)[:, :10] * float(pictures.sum())

    assert task("resnet18").sample_input_flops(Looks()) is None


def test_names_read_from_source_are_those_that_the_libraries_register() -> None:
    from torchvision import models

    assert registered_names("torchvision") == set(models.list_models(module=models))
    timm = pytest.importorskip("timm", reason="needs timm")
    assert registered_names("timm") == set(timm.list_models())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_a_twin_starts_one_rounding_beside(dtype: torch.dtype) -> None:
    weights = torch.randn(1000, dtype=dtype)
    model = nn.Module()
    model.trained = nn.Parameter(weights.clone())
    model.frozen = nn.Parameter(weights.clone(), requires_grad=False)
    model_building.perturb_by_rounding(model, 7)
    assert torch.equal(model.frozen, weights)
    moved = torch.view_as_real(model.trained.detach()) if dtype.is_complex else model.trained
    before = torch.view_as_real(weights) if dtype.is_complex else weights
    neighbours = [
        torch.nextafter(before, torch.full_like(before, end)) for end in (-torch.inf, torch.inf)
    ]
    counts = [int((moved == at).sum()) for at in (before, *neighbours)]
    assert sum(counts) == before.numel()
    assert min(counts) > before.numel() // 4


def test_a_twin_of_bf16_weights_starts_one_rounding_of_bf16_beside() -> None:
    weights = torch.randn(1000)
    model = nn.Module()
    model.trained = nn.Parameter(weights.clone())
    model_building.perturb_by_rounding(model, 7, "bf16")
    moved, before = model.trained.detach(), weights.bfloat16()
    assert torch.equal(moved, moved.bfloat16().float())
    assert 500 < int((moved.bfloat16() != before).sum()) < 800


def test_a_twins_ranks_build_the_rounded_model() -> None:
    changes = ["workload.dataset=random", "workload.training_samples=64", "measure.verify=true"]
    plan = expand(experiment(*changes))
    assert plan.twin is not None
    cell = plan.twin.model_copy(update={"twin": False})
    start, twin, again = (
        workload_of(trial).build_model().state_dict() for trial in (cell, plan.twin, plan.twin)
    )
    assert all(torch.equal(twin[name], again[name]) for name in twin)
    assert not torch.equal(start["fc.weight"], twin["fc.weight"])
    torch.testing.assert_close(start, twin, rtol=2e-7, atol=1e-7)
