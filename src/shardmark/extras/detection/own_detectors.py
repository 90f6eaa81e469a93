"""Detectors built from torchvision's modules, for which torchvision has no function."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models import get_model
from torchvision.models.detection import FCOS, FasterRCNN, MaskRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.backbone_utils import BackboneWithFPN, resnet_fpn_backbone
from torchvision.models.detection.fcos import FCOSHead
from torchvision.models.resnet import BasicBlock, ResNet
from torchvision.ops import FrozenBatchNorm2d
from torchvision.ops.feature_pyramid_network import FeaturePyramidNetwork, LastLevelMaxPool

SWIN_STAGES = (1, 3, 5, 7)
"""Indices of Swin's four stages among its `features`, each behind an embedding or merging."""


_FROZEN_FEATURES = (0, 1, 2, 4, 6, 8)
"""Number of frozen layers -> number of frozen modules of `features`."""


class SwinWithFPN(nn.Module):
    """A feature pyramid on Swin's four normalised stages (Liu et al., 2021, section 4.2).

    Swin has channels in the last axis; the pyramid has them in the second.
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
        for index, module in enumerate(self.body):
            x = module(x)  # (batch, height, width, channels)
            if index in SWIN_STAGES:
                level = len(levels)
                levels[str(level)] = self.norms[level](x).permute(0, 3, 1, 2).contiguous()
        pyramid: dict[str, Tensor] = self.fpn(levels)
        return pyramid


def fasterrcnn_resnet101_fpn(
    *,
    num_classes: int,
    weights_backbone: str | None = None,
    trainable_backbone_layers: int | None = None,
    **options: Any,
) -> FasterRCNN:
    """Faster R-CNN on ResNet-101, built like torchvision's on ResNet-50."""
    trained = weights_backbone is not None
    backbone = resnet_fpn_backbone(
        backbone_name="resnet101",
        weights=weights_backbone,
        norm_layer=FrozenBatchNorm2d if trained else nn.BatchNorm2d,
        trainable_layers=_num_trained(trainable_backbone_layers, trained=trained),
    )
    return FasterRCNN(backbone, num_classes=num_classes, **options)


def _on_swin_t(
    detector: type[FasterRCNN],
    *,
    weights_backbone: str | None = None,
    trainable_backbone_layers: int | None = None,
    **options: Any,
) -> FasterRCNN:
    """A detector on Swin-T.  Trainable layers are its four stages, then the embedding."""
    return detector(_swin_t(weights_backbone, trainable_backbone_layers), **options)


def _swin_t(weights: str | None, trainable_layers: int | None) -> SwinWithFPN:
    features = get_model("swin_t", weights=weights).features
    assert isinstance(features, nn.Sequential)
    layers = len(SWIN_STAGES) + 1
    trained = layers if trainable_layers is None else trainable_layers
    if trained > layers:
        raise ValueError(f"trainable_backbone_layers is {trained}; {layers} at most")
    for part in features[: _FROZEN_FEATURES[layers - trained]]:
        part.requires_grad_(False)
    return SwinWithFPN(features, (96, 192, 384, 768), 256)


def _num_trained(layers: int | None, *, trained: bool) -> int:
    """Number of ResNet's stages that are trained: by default 3 of trained weights, else all."""
    layers = (3 if trained else 5) if layers is None else layers
    if layers > 5:
        raise ValueError(f"trainable_backbone_layers is {layers}; 5 at most")
    return layers


_PYRAMID_STRIDES = (8, 16, 32)
_PYRAMID_CHANNELS = 64
_HEAD_CONVOLUTIONS = 2


def fcos_resnet18_fpn(
    *,
    num_classes: int,
    weights_backbone: str | None = None,
    trainable_backbone_layers: int | None = None,
    backbone_width: int = 64,
    **options: Any,
) -> FCOS:
    """FCOS on ResNet-18 for images of 128 pixels, with three levels of 64 channels and short heads.

    `backbone_width` is the number of channels of the first stage, 64 in He et al. (2016).
    """
    trained = weights_backbone is not None
    if trained and backbone_width != 64:
        raise ValueError(f"the published weights have backbone_width 64, not {backbone_width}")
    if backbone_width == 64:
        norm = FrozenBatchNorm2d if trained else nn.BatchNorm2d
        body = get_model("resnet18", weights=weights_backbone, norm_layer=norm)
    else:
        body = _narrow(backbone_width)
    _freeze(body, _num_trained(trainable_backbone_layers, trained=trained))
    channels = [backbone_width * stride // 4 for stride in _PYRAMID_STRIDES]
    levels = {f"layer{level + 2}": str(level) for level in range(len(channels))}
    backbone = BackboneWithFPN(body, levels, channels, _PYRAMID_CHANNELS)
    backbone.fpn.extra_blocks = None  # torchvision's default adds a level
    sizes = tuple((stride,) for stride in _PYRAMID_STRIDES)
    return FCOS(
        backbone,
        num_classes,
        **{
            "min_size": 128,
            "max_size": 256,
            "anchor_generator": AnchorGenerator(sizes, ((1.0,),) * len(sizes)),
            "head": _small_head(num_classes),
            **options,
        },
    )


def _freeze(body: nn.Module, layers: int) -> None:
    """Freeze all but the last `layers` stages, numbered like torchvision's."""
    names = ("layer4", "layer3", "layer2", "layer1", "conv1")
    trained = (*names, "bn1") if layers == len(names) else names[:layers]
    for name, parameter in body.named_parameters():
        if not name.startswith(trained):
            parameter.requires_grad_(False)


def _small_head(num_classes: int) -> FCOSHead:
    """A head with two convolutions per branch, initialised after He et al. (2015).

    FCOS's own standard deviation of 0.01 is meant for 256 channels and long schedules.
    """
    head = FCOSHead(_PYRAMID_CHANNELS, 1, num_classes, _HEAD_CONVOLUTIONS)
    for branch in (head.classification_head.conv, head.regression_head.conv):
        for module in branch.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
    return head


def _narrow(width: int) -> ResNet:
    """A ResNet-18 with `width` channels in its first stage, initialised like torchvision's."""
    with torch.device("meta"):  # every module that the detector uses is replaced below
        body = ResNet(BasicBlock, [2, 2, 2, 2])
    body.inplanes = width
    body.conv1 = nn.Conv2d(3, width, kernel_size=7, stride=2, padding=3, bias=False)
    body.bn1 = nn.BatchNorm2d(width)
    for stage in range(4):
        layer = body._make_layer(BasicBlock, width << stage, 2, stride=1 if stage == 0 else 2)
        setattr(body, f"layer{stage + 1}", layer)
    for module in body.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return body


OWN_DETECTORS: dict[str, Callable[..., nn.Module]] = {
    "fasterrcnn_resnet101_fpn": fasterrcnn_resnet101_fpn,
    "fasterrcnn_swin_t_fpn": partial(_on_swin_t, FasterRCNN),
    "maskrcnn_swin_t_fpn": partial(_on_swin_t, MaskRCNN),
    "fcos_resnet18_fpn": fcos_resnet18_fpn,
}
