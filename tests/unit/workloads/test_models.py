"""Models are built by name, with the same weights everywhere."""

from __future__ import annotations

import hashlib
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardmark.core.errors import InputError
from shardmark.core.shares import Shard
from shardmark.workloads.base import BatchPlan
from shardmark.workloads.flops import training_flops
from shardmark.workloads.vision.options import ClassificationOptions
from shardmark.workloads.vision.task import Classification


def task(model: str, seed: int = 0, **fields: Any) -> Classification:
    chosen = {"model": model, "dataset": "random", "training_samples": 4} | fields
    return Classification(ClassificationOptions.model_validate(chosen), seed)


def weights_hash(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


def test_weights_come_from_the_seed_alone() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    made = task("mobilenet_v2", seed=1)
    first = weights_hash(made.build_model())
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(3)
    assert weights_hash(made.build_model()) == first
    assert weights_hash(task("mobilenet_v2", seed=1).build_model()) == first
    assert weights_hash(task("mobilenet_v2", seed=2).build_model()) != first


@pytest.mark.parametrize(
    ("name", "image_size", "parameters"),
    [
        ("resnet18", 32, 11_181_642),
        ("mobilenet_v2", 32, 2_236_682),
        ("vit_cifar", 32, 3_195_146),
        ("squeezenet1_1", 32, 727_626),
        ("googlenet", 32, 5_610_154),
    ],
)
def test_model_trains(name: str, image_size: int, parameters: int) -> None:
    made = task(name, image_size=image_size)
    model = made.build_model()
    assert model.training
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    plan = BatchPlan(global_batch=4, seed=0)
    loss = made.loss(model, next(made.batches(plan, Shard(index=0, count=1))))
    assert loss.shape == ()
    loss.backward()  # type: ignore[no-untyped-call]
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_vision_transformer_is_built_for_the_size_of_the_pictures() -> None:
    small = task("vit_cifar", image_size=16, model_options={"num_layers": 1, "hidden_dim": 64})
    model = small.build_model()
    assert model(torch.zeros(2, 3, 16, 16)).shape == (2, 10)


@pytest.mark.parametrize("name", ["timm:resnet10t", "vit_tiny_patch16_224"])
def test_timm_model(name: str) -> None:
    pytest.importorskip("timm", reason="needs timm")
    model = task(name, image_size=64).build_model().eval()
    assert model(torch.zeros(1, 3, 64, 64)).shape == (1, 10)


def test_model_of_ones_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source = """if True:
        from torch import nn
        def build(num_classes, width=4):
            layers = nn.Linear(3 * 32 * 32, width), nn.Linear(width, num_classes)
            return nn.Sequential(nn.Flatten(), *layers)
        def two(num_classes):
            return nn.LSTM(32, num_classes)
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
    for name, message in (("not_a_model", "made a dict"), ("number", "is not callable")):
        with pytest.raises(InputError, match=message):
            task(f"models_of_my_own:{name}").build_model()
    with pytest.raises(InputError, match=r"cannot be built with .*width"):
        task("models_of_my_own:two", model_options={"width": 6}).build_model()


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("resnet18", {"model_options": {"depth": 3}}, "unexpected keyword argument 'depth'"),
        ("vit_cifar", {"image_size": 30}, "Input shape indivisible by patch size"),
        ("timm:resnet10t", {"model_options": {"depht": 3}}, "unexpected keyword argument 'depht'"),
    ],
)
def test_wrong_model_options(name: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        task(name, **fields).build_model()
    assert str(caught.value).startswith("workload.model_options: ")


@pytest.mark.parametrize(
    ("head", "message"),
    [(nn.Identity(), r"logits of shape \(4, 10, 7\)"), (nn.LSTM(7, 7), "a tuple")],
)
def test_model_that_returns_no_logits(head: nn.Module, message: str) -> None:
    made = task("resnet18")
    batch = next(made.batches(BatchPlan(global_batch=4, seed=0), Shard(index=0, count=1)))
    model = nn.Sequential(nn.AdaptiveAvgPool2d((10, 7)), nn.Flatten(0, 1), nn.Unflatten(0, (4, 3)))
    model.append(nn.Flatten(1)).append(nn.Linear(210, 70)).append(nn.Unflatten(1, (10, 7)))
    with pytest.raises(InputError, match=message):
        made.loss(model.append(head), batch)


def test_loss_is_smoothed_mean_cross_entropy() -> None:
    made = task("resnet18", label_smoothing=0.25)
    batch = next(made.batches(BatchPlan(global_batch=4, seed=0), Shard(index=0, count=1)))
    logits = torch.randn(4, 10)
    log_probabilities = logits.log_softmax(1)
    target = torch.full((4, 10), 0.025).scatter_(1, batch.labels[:, None], 0.775)
    expected = -(target * log_probabilities).sum(1).mean()

    class Fixed(nn.Module):
        def forward(self, _: torch.Tensor) -> torch.Tensor:
            return logits.bfloat16()

    torch.testing.assert_close(made.loss(Fixed(), batch), expected, rtol=2e-2, atol=0)
    assert made.loss(Fixed(), batch).dtype == torch.float32


def test_flops_of_known_layers() -> None:
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
    assert training_flops(model, (3, 8, 8), 10) == expected


def flops_by_shape(model: nn.Module) -> int:
    """Each weight meets each place of its output three times; the first layer's only twice."""
    forward: list[int] = []

    def count(layer: nn.Module, _: object, output: torch.Tensor) -> None:
        assert isinstance(layer, nn.Conv2d | nn.Linear)
        places = output[0].numel() // output.shape[1]
        forward.append(2 * places * layer.weight.numel())

    layers = [layer for layer in model.modules() if isinstance(layer, nn.Conv2d | nn.Linear)]
    handles = [layer.register_forward_hook(count) for layer in layers]
    with torch.no_grad():
        model(torch.zeros(1, 3, 32, 32))
    for handle in handles:
        handle.remove()
    return 3 * sum(forward) - forward[0]


def test_flops_leave_the_model_alone() -> None:
    made = task("mobilenet_v2")
    model = made.build_model().eval()
    before = weights_hash(model)
    assert made.sample_input_flops(model) == flops_by_shape(model)
    assert weights_hash(model) == before
    assert not any(module.training for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_flops_unknown() -> None:
    class Looks(nn.Module):
        def forward(self, pictures: torch.Tensor) -> torch.Tensor:
            return pictures.flatten(1)[:, :10] * float(pictures.sum())

    assert task("resnet18").sample_input_flops(Looks()) is None
