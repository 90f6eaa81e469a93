"""The blocks of a model are found and sharded, and checkpointing them changes memory alone."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torchvision.models import get_model_builder
from torchvision.models.convnext import CNBlockConfig, ConvNeXt

from shardmark.ranks.strategies.blocks import (
    blocks,
    checkpoint_blocks,
    checkpointed_blocks,
    sharding_units,
)
from shardmark.ranks.strategies.fsdp1.worker import without_shared_parameters


def names(model: nn.Module, parts: list[nn.Module]) -> list[str]:
    known = {id(module): name for name, module in model.named_modules()}
    return [known[id(module)] for module in parts]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("resnet18", [f"layer{stage}.{block}" for stage in (1, 2, 3, 4) for block in (0, 1)]),
        ("vit_b_16", [f"encoder.layers.encoder_layer_{i}" for i in range(12)]),
        # No repeated part: its large layers alone.
        (
            "vgg16",
            [*(f"features.{i}" for i in (17, 19, 21, 24, 26, 28)), "classifier.0", "classifier.3"],
        ),
        # Downsampling layers stand between the stages in plain containers.
        ("small convnext", ["features.0", "features.1.0", "features.3.0", "features.3.1"]),
    ],
)
def test_repeated_parts_of_a_model_are_its_blocks(name: str, expected: list[str]) -> None:
    with torch.device("meta"):
        if name == "small convnext":
            stages = [CNBlockConfig(8, 16, 1), CNBlockConfig(16, None, 2)]
            model: nn.Module = ConvNeXt(stages, num_classes=10)
        else:
            model = get_model_builder(name)(weights=None, num_classes=10)
    assert names(model, blocks(model)) == expected


class Block(nn.Module):
    def __init__(self, momentum: float | None, tracked: bool) -> None:
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


def test_policy_selects_the_sharding_units() -> None:
    model = tower()
    assert names(model, sharding_units(model, "blocks")) == ["1.0", "1.1", "1.2"]
    layers = [f"1.{i}.{part}" for i in range(3) for part in ("linear", "norm")]
    assert names(model, sharding_units(model, "layers")) == ["0", *layers, "2"]
    assert sharding_units(model, "root") == []


def run(model: nn.Module) -> tuple[dict[str, Tensor], int]:
    """Outputs, gradients and buffers of three steps, and the elements that autograd saved."""
    results: dict[str, Tensor] = {}
    kept: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    for step in range(3):
        torch.manual_seed(step)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = model(torch.randn(64, 4))
        output.square().mean().backward()
        results[f"output {step}"] = output.detach()
    gradients = {
        f"gradient of {n}": p.grad for n, p in model.named_parameters() if p.grad is not None
    }
    return results | gradients | dict(model.named_buffers()), sum(kept)


@pytest.mark.filterwarnings("ignore:A saved_tensors_hooks context")  # which counts them here
@pytest.mark.parametrize("how", [True, "selective", 2])
@pytest.mark.parametrize(("momentum", "tracked"), [(0.1, True), (None, True), (0.1, False)])
def test_checkpointing_changes_nothing_but_memory(
    momentum: float | None, tracked: bool, how: bool | str | int
) -> None:
    """Batch norm's statistics and dropout's draws are those of one forward pass, not of two."""
    plain = tower(momentum, tracked)
    checkpointed = copy.deepcopy(plain)
    checkpoint_blocks(checkpointed, how)
    (expected, plain_elements), (found, elements) = run(plain), run(checkpointed)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    assert elements < (plain_elements / 2 if how is True else plain_elements)
    norms = [m for m in checkpointed.modules() if isinstance(m, nn.BatchNorm1d)]
    assert [norm.momentum for norm in norms] == [momentum] * 3


def test_every_nth_block_is_computed_again() -> None:
    layers = [nn.Identity() for _ in range(7)]
    for how, expected in (
        (False, []),
        (True, [*range(7)]),
        ("selective", [*range(7)]),
        (3, [2, 5]),
    ):
        assert [layers.index(layer) for layer in checkpointed_blocks(layers, how)] == expected  # type: ignore[arg-type]


def test_parts_that_share_a_parameter_stay_with_the_root() -> None:
    """Tied weights in separate units would be two, and trained apart without a message."""
    embedding, head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
    head.weight = embedding.weight
    block = nn.Linear(4, 4)
    twice = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    twice[2].weight = twice[0].weight
    model = nn.Sequential(embedding, block, twice, head)
    assert without_shared_parameters(model, [embedding, block, twice, head]) == {block, twice}
