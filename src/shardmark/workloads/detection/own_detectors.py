"""Detectors that torchvision has the parts for, but no function."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torchvision.models import get_model
from torchvision.models.detection import FasterRCNN
from torchvision.ops.feature_pyramid_network import FeaturePyramidNetwork, LastLevelMaxPool

from shardmark.workloads.detection.small_fcos import fcos_resnet18_fpn

SWIN_STAGES = (1, 3, 5, 7)
"""Places of Swin's four stages among its `features`; a patch embedding or merging before each."""


_PARTS_BEFORE = (0, 1, 2, 4, 6, 8)
"""Frozen layers -> parts of `features`: the embedding, a stage, then each stage and its merging."""


class SwinWithFPN(nn.Module):
    """Swin's four stages, each normalised, into a feature pyramid (Liu et al., 2021, section 4.2).

    Swin keeps channels last; the pyramid wants them after the batch.
    """

    def __init__(self, features: nn.Sequential, channels: tuple[int, ...], out_channels: int):
        super().__init__()
        self.out_channels = out_channels
        self.body = features
        self.norms = nn.ModuleList([nn.LayerNorm(number) for number in channels])
        self.fpn = FeaturePyramidNetwork(list(channels), out_channels, LastLevelMaxPool())

    def forward(self, pictures: Tensor) -> dict[str, Tensor]:
        levels: OrderedDict[str, Tensor] = OrderedDict()
        x = pictures
        for place, part in enumerate(self.body):
            x = part(x)  # (batch, height, width, channels)
            if place in SWIN_STAGES:
                level = len(levels)
                levels[str(level)] = self.norms[level](x).permute(0, 3, 1, 2).contiguous()
        pyramid: dict[str, Tensor] = self.fpn(levels)
        return pyramid


def fasterrcnn_swin_t_fpn(
    *,
    num_classes: int,
    weights_backbone: str | None = None,
    trainable_backbone_layers: int | None = None,
    **options: Any,
) -> FasterRCNN:
    """Faster R-CNN on Swin-T.  Trainable layers count its four stages, then the embedding."""
    features = get_model("swin_t", weights=weights_backbone).features
    assert isinstance(features, nn.Sequential)
    layers = len(SWIN_STAGES) + 1
    trained = layers if trainable_backbone_layers is None else trainable_backbone_layers
    if trained > layers:
        raise ValueError(f"trainable_backbone_layers is {trained}; {layers} at most")
    for part in features[: _PARTS_BEFORE[layers - trained]]:
        part.requires_grad_(False)
    return FasterRCNN(
        SwinWithFPN(features, (96, 192, 384, 768), 256), num_classes=num_classes, **options
    )


OWN_DETECTORS: dict[str, Callable[..., nn.Module]] = {
    "fasterrcnn_swin_t_fpn": fasterrcnn_swin_t_fpn,
    "fcos_resnet18_fpn": fcos_resnet18_fpn,
}
