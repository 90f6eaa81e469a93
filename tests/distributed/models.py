"""A user's own models and task: small, with everything in which strategies can go wrong."""

from __future__ import annotations

import copy
from importlib.resources import files
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from shardmark.ranks.workloads.language.gpt import GPT, parts_of
from shardmark.ranks.workloads.model_building import user_function

TEMPLATES = Path(str(files("shardmark.experiment"))) / "templates"


class Block(nn.Module):
    """Batch norm (statistics by rank), dropout (draws by rank), a residual path."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.dropout = nn.Dropout(0.1)

    def forward(self, pictures: Tensor) -> Tensor:
        out: Tensor = pictures + self.dropout(torch.relu(self.norm(self.convolution(pictures))))
        return out


def residual(num_classes: int, channels: int, blocks: int) -> nn.Module:
    """A residual network for any picture size."""
    return nn.Sequential(
        nn.Conv2d(3, channels, 3, stride=4, padding=1),
        nn.Sequential(*(Block(channels) for _ in range(blocks))),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(4 * channels, num_classes),
    )


def small(num_classes: int) -> nn.Module:
    return residual(num_classes, channels=16, blocks=3)


def wide(num_classes: int) -> nn.Module:
    """A model of 0.6 M parameters in 5 layers: state and messages are more than rounding."""
    return residual(num_classes, channels=128, blocks=4)


LOUDNESS = 5.0


class Loud(nn.Module):
    """Gradients that overflow fp16 while the loss scale is as high as it begins."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        first, last = nn.Linear(3 * 4 * 4, 32), nn.Linear(32, num_classes)
        self.network = nn.Sequential(
            nn.AdaptiveAvgPool2d(4), nn.Flatten(), first, nn.ReLU(), nn.Dropout(0.1), last
        )

    def forward(self, pictures: Tensor) -> Tensor:
        logits: Tensor = LOUDNESS * self.network(pictures)
        return logits


class Plain(nn.Module):
    """A model without norms that trains in bf16 throughout, parameters and inputs, on a CPU."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 8, 3, stride=4)
        self.classes = nn.Linear(8, num_classes)

    def forward(self, pictures: Tensor) -> Tensor:
        features = self.convolution(pictures).relu().mean((2, 3))  # (batch, 8)
        logits: Tensor = self.classes(features)
        return logits


class PartlyUsed(nn.Module):
    """A second layer that some ranks ask in some steps, and a third that nobody asks."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.network = small(num_classes)
        self.sometimes, self.never = (nn.Linear(num_classes, num_classes) for _ in range(2))

    def forward(self, pictures: Tensor) -> Tensor:
        logits: Tensor = self.network(pictures)
        # By the samples, so that one process can play it.
        even = self.training and float(pictures.sum()) % 2 < 1
        return logits + self.sometimes(logits) if even else logits


def frozen(num_classes: int) -> nn.Module:
    model = small(num_classes)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in ("0.weight", "0.bias", "4.bias"))
    return model


def scaled(num_classes: int) -> nn.Module:
    model = small(num_classes)
    model.register_parameter("scale", nn.Parameter(torch.ones(())))
    return model


class Routed(nn.Module):
    """Rank r calls expert r alone; experts are blocks."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, stride=4)
        self.experts = nn.ModuleList(Block(4) for _ in range(2))
        self.last = nn.Linear(4, num_classes)

    def forward(self, pictures: Tensor) -> Tensor:
        expert = self.experts[dist.get_rank()]
        outputs: Tensor = self.last(expert(self.first(pictures)).mean((2, 3)))
        return outputs


class GroupedTokens:
    """The guide's task of tokens; weights decay, and biases learn slowly without decay."""

    def __init__(self) -> None:
        self.task = user_function(f"{TEMPLATES / 'tokens'}.py:Task")()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.task, name)

    def parameter_groups(self, model: nn.Module) -> list[dict[str, Any]]:
        parameters = list(model.parameters())
        return [
            {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.3},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0, "lr": 0.01},
        ]


class PaddedTokens(GroupedTokens):
    """Nobody can weigh its samples before the padding of their batch."""

    weights = None


class Features(nn.Module):
    """Two levels for a small detector: every 8th and every 16th pixel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.out_channels = channels
        self.stem = nn.Conv2d(3, channels, 8, stride=8)
        self.blocks = nn.Sequential(*(Block(channels) for _ in range(2)))
        self.down = nn.Conv2d(channels, channels, 3, stride=2, padding=1)

    def forward(self, pictures: Tensor) -> dict[str, Tensor]:
        fine = self.blocks(self.stem(pictures))
        return {"0": fine, "1": self.down(fine)}


def small_detector(num_classes: int) -> nn.Module:
    """A two-stage detector of 0.1 M parameters for pictures of 96 pixels."""
    from torchvision.models.detection import FasterRCNN
    from torchvision.models.detection.anchor_utils import AnchorGenerator
    from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
    from torchvision.ops import MultiScaleRoIAlign

    made: nn.Module = FasterRCNN(
        Features(16),
        num_classes=None,
        rpn_anchor_generator=AnchorGenerator(((24,), (48,)), ((0.5, 1.0, 2.0),) * 2),
        rpn_batch_size_per_image=32,
        rpn_pre_nms_top_n_train=100,
        rpn_post_nms_top_n_train=50,
        box_roi_pool=MultiScaleRoIAlign(featmap_names=["0", "1"], output_size=4, sampling_ratio=2),
        box_head=TwoMLPHead(16 * 4 * 4, 32),
        box_predictor=FastRCNNPredictor(32, num_classes),
        box_batch_size_per_image=16,
        min_size=96,
        max_size=192,
    )
    return made


class SharedSequences:
    """Next tokens by rotary attention, as a user's own; padded samples weigh differently."""

    sequence_units: ClassVar = {"heads": 4, "positions": 16}

    def __init__(self) -> None:
        rows = torch.randint(1, 32, (72, 17), generator=torch.Generator().manual_seed(5))
        samples = [row[: 9 + number % 9] for number, row in enumerate(rows)]
        self.train_data, self.validation_data = lambda: samples[:64], lambda: samples[64:]

    def model(self) -> nn.Module:
        return GPT(vocabulary=32, sequence_length=16, layers=1, width=32, heads=4)

    def weights(self, samples: Any) -> list[int]:
        return [len(sample) - 1 for sample in samples]

    def collate(self, samples: list[Tensor]) -> dict[str, Tensor]:
        tokens = torch.stack([functional.pad(each, (0, 17 - len(each))) for each in samples])
        return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        logits, targets = model(batch["inputs"]).flatten(0, 1).float(), batch["targets"].flatten()
        total = functional.cross_entropy(logits, targets, ignore_index=0, reduction="sum")
        return total, (targets > 0).sum()

    def sequence_plan(self, _: nn.Module) -> dict[str, str]:
        attention = "blocks.*.attention"
        return {f"{attention}.queries_keys_values": "after", f"{attention}.out": "before"}

    def sequence_part(self, batch: dict[str, Tensor], index: int, count: int) -> dict[str, Tensor]:
        return {name: tokens.chunk(count, dim=1)[index] for name, tokens in batch.items()}


class PaddedSequences(SharedSequences):
    """Nobody can weigh its samples before the padding of their batch."""

    weights: Any = None  # as of a class without the method

    def pipeline_parts(self, model: nn.Module) -> list[nn.Module]:
        assert isinstance(model, GPT)
        return parts_of(model)


class Averaged(nn.Module):
    """A network and the moving average of its weights, a teacher that is evaluated."""

    level: Tensor

    def __init__(self) -> None:
        super().__init__()
        block = nn.Sequential(nn.GELU(), nn.Linear(33, 33), nn.GELU())
        self.network = nn.Sequential(nn.Linear(10, 33), block, nn.Linear(33, 1))
        self.average = copy.deepcopy(self.network).requires_grad_(False)
        self.register_buffer("seen", torch.zeros(4, dtype=torch.int64))
        self.register_buffer("level", torch.zeros(()))
        self.register_buffer("slow_level", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.average(inputs)
        if not self.training:
            return outputs
        self.level.copy_(inputs.mean())
        return torch.stack([self.network(inputs), outputs])


class MovingAverage:
    """Friedman's regression, whose outputs are also drawn to those of the averaged weights."""

    def __init__(self) -> None:
        x = torch.rand(160, 10, generator=torch.Generator().manual_seed(0))
        samples = [*zip(x, (torch.pi * x[:, :1] * x[:, 1:2]).sin() + x[:, 3:4], strict=True)]
        self.train_data, self.validation_data = lambda: samples[:96], lambda: samples[96:]

    def model(self) -> nn.Module:
        return Averaged()

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Tensor:
        outputs = model(batch[0])
        if not model.training:
            return functional.mse_loss(outputs, batch[1])
        return functional.mse_loss(outputs[0], batch[1]) + functional.mse_loss(*outputs)

    def after_step(self, model: Any, step: int) -> None:
        pairs = zip(model.average.parameters(), model.network.parameters(), strict=True)
        for average, weight in pairs:
            average.lerp_(weight, 1 / (1 + step))
        model.slow_level.lerp_(model.level, 0.5)
        model.seen[torch.randint(0, 4, ())] += step
