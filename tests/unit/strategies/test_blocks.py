"""Which parts of a model are blocks, and that checkpointing them changes nothing but memory."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from shardmark.strategies.blocks import LARGE_LEAF_ELEMENTS, blocks, checkpoint_blocks, wrapped

BuildsModel = Callable[[], nn.Module]


def names(model: nn.Module, found: list[nn.Module]) -> list[str]:
    known = {id(module): name for name, module in model.named_modules()}
    return [known[id(module)] for module in found]


def torchvision(name: str) -> BuildsModel:
    def build() -> nn.Module:
        from torchvision.models import get_model_builder

        model: nn.Module = get_model_builder(name)(weights=None, num_classes=10)
        return model

    return build


def vit_cifar() -> nn.Module:
    from torchvision.models import VisionTransformer

    model: nn.Module = VisionTransformer(
        image_size=32, patch_size=4, num_layers=6, num_heads=4, hidden_dim=256, mlp_dim=512
    )
    return model


def small_convnext() -> nn.Module:
    from torchvision.models.convnext import CNBlockConfig, ConvNeXt

    stages = [CNBlockConfig(8, 16, 1), CNBlockConfig(16, None, 2)]
    model: nn.Module = ConvNeXt(stages, num_classes=10)
    return model


EXPECTED: dict[str, tuple[BuildsModel, list[str]]] = {
    "resnet18": (
        torchvision("resnet18"),
        [f"layer{stage}.{block}" for stage in (1, 2, 3, 4) for block in (0, 1)],
    ),
    "mobilenet_v2": (torchvision("mobilenet_v2"), [f"features.{i}" for i in range(19)]),
    "vit_cifar": (vit_cifar, [f"encoder.layers.encoder_layer_{i}" for i in range(6)]),
    "densenet121": (
        torchvision("densenet121"),
        [
            "features.denseblock1",
            "features.transition1",
            "features.denseblock2",
            "features.transition2",
            "features.denseblock3",
            "features.transition3",
            "features.denseblock4",
        ],
    ),
    # No repeated part: its large layers alone.
    "vgg16": (
        torchvision("vgg16"),
        [*(f"features.{i}" for i in (17, 19, 21, 24, 26, 28)), "classifier.0", "classifier.3"],
    ),
    # Downsampling layers stand between the stages in plain containers.
    "small convnext": (
        small_convnext,
        ["features.0", "features.1.0", "features.3.0", "features.3.1"],
    ),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_blocks_of_real_models(name: str) -> None:
    build, expected = EXPECTED[name]
    with torch.device("meta"):
        model = build()
    found = blocks(model)
    assert names(model, found) == expected
    inside = [part for block in found for part in block.modules()]
    assert len({id(part) for part in inside}) == len(inside), "a block inside another"


def test_large_layer_is_a_block() -> None:
    with torch.device("meta"):
        side = LARGE_LEAF_ELEMENTS // 1000
        model = nn.Sequential(nn.Linear(side, 1000), nn.Linear(1000, 10), nn.ReLU())
    assert names(model, blocks(model)) == ["0"]


class Block(nn.Module):
    def __init__(self, momentum: float | None = 0.1, tracked: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6, momentum=momentum, track_running_stats=tracked)
        self.dropout = nn.Dropout(0.3)

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = inputs + self.dropout(torch.relu(self.norm(self.linear(inputs))))
        return out


def tower(momentum: float | None = 0.1, tracked: bool = True) -> nn.Module:
    torch.manual_seed(0)
    parts = [Block(momentum, tracked) for _ in range(3)]
    return nn.Sequential(nn.Linear(4, 6), nn.Sequential(*parts), nn.Linear(6, 2))


def test_wrap_policies() -> None:
    model = tower()
    assert names(model, wrapped(model, "blocks")) == ["1.0", "1.1", "1.2"]
    layers = [f"1.{i}.{part}" for i in range(3) for part in ("linear", "norm")]
    assert names(model, wrapped(model, "layers")) == ["0", *layers, "2"]
    assert wrapped(model, "root") == []


def run(model: nn.Module, steps: int) -> tuple[list[Tensor], list[Tensor]]:
    outputs = []
    for step in range(steps):
        torch.manual_seed(step)
        output = model(torch.randn(8, 4))
        output.square().mean().backward()
        outputs.append(output.detach())
    gradients = [parameter.grad for parameter in model.parameters()]
    return outputs, [gradient for gradient in gradients if gradient is not None]


@pytest.mark.parametrize(("momentum", "tracked"), [(0.1, True), (None, True), (0.1, False)])
def test_checkpointing_changes_nothing(momentum: float | None, tracked: bool) -> None:
    plain = tower(momentum, tracked)
    checkpointed = copy.deepcopy(plain)
    checkpoint_blocks(checkpointed)
    expected, found = run(plain, 3), run(checkpointed, 3)
    for wanted, got in zip(expected, found, strict=True):
        assert len(wanted) == len(got) > 0
        assert all(torch.equal(a, b) for a, b in zip(wanted, got, strict=True))
    buffers = dict(checkpointed.named_buffers())
    assert buffers.keys() == dict(plain.named_buffers()).keys()
    for name, buffer in plain.named_buffers():
        assert torch.equal(buffer, buffers[name]), name
    assert [m.momentum for m in checkpointed.modules() if isinstance(m, nn.BatchNorm1d)] == (
        [momentum] * 3
    )


def test_checkpointing_saves_activations() -> None:
    """Between the passes a checkpointed block keeps its input alone."""

    def saved(model: nn.Module) -> int:
        kept: list[int] = []

        def pack(tensor: Tensor) -> Tensor:
            kept.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(torch.randn(64, 4))
        return sum(kept)

    plain, checkpointed = tower(), tower()
    checkpoint_blocks(checkpointed)
    assert saved(checkpointed) < saved(plain) / 2


def test_checkpointed_block_is_bound_to_its_own_parameters() -> None:
    """Why `dp` cannot have it: a replica on another device would compute on the first one's."""
    model = tower()
    checkpoint_blocks(model)
    block = model[1][0]  # type: ignore[index]
    replica = block._replicate_for_data_parallel()
    assert replica.forward.args[0].__self__ is block
