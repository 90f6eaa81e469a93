"""A small one-stage detector for small pictures: what torchvision has only in large."""

from __future__ import annotations

from typing import Any

from torch import nn
from torchvision.models import get_model
from torchvision.models.detection import FCOS
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.backbone_utils import BackboneWithFPN
from torchvision.models.detection.fcos import FCOSHead
from torchvision.models.resnet import BasicBlock, ResNet
from torchvision.ops import FrozenBatchNorm2d

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
    """FCOS on ResNet-18 for pictures of 128 pixels: three levels of 64 channels, short heads.

    `backbone_width` is the channels of the first stage, 64 in He et al. (2016).
    """
    trained = weights_backbone is not None
    if trained and backbone_width != 64:
        raise ValueError(f"the published weights have backbone_width 64, not {backbone_width}")
    norm = FrozenBatchNorm2d if trained else nn.BatchNorm2d
    body = get_model("resnet18", weights=weights_backbone, norm_layer=norm)
    if backbone_width != 64:
        body = _narrow(backbone_width)
    _freeze(
        body,
        (3 if trained else 5) if trainable_backbone_layers is None else (trainable_backbone_layers),
    )
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
    """All but the last so many stages, as torchvision counts them."""
    names = ("layer4", "layer3", "layer2", "layer1", "conv1")
    if layers > len(names):
        raise ValueError(f"trainable_backbone_layers is {layers}; {len(names)} at most")
    kept = (*names, "bn1") if layers == len(names) else names[:layers]
    for name, parameter in body.named_parameters():
        if not name.startswith(kept):
            parameter.requires_grad_(False)


def _small_head(num_classes: int) -> FCOSHead:
    """Two convolutions a branch, initialised after He et al. (2015).

    FCOS's own deviation of 0.01 is made for 256 channels and long schedules.
    """
    head = FCOSHead(_PYRAMID_CHANNELS, 1, num_classes, _HEAD_CONVOLUTIONS)
    for branch in (head.classification_head.conv, head.regression_head.conv):
        for module in branch.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
    return head


def _narrow(width: int) -> ResNet:
    """A ResNet-18 whose first stage has so many channels, initialised as torchvision's."""
    body = ResNet(BasicBlock, [2, 2, 2, 2])
    body.inplanes = width
    body.conv1 = nn.Conv2d(3, width, kernel_size=7, stride=2, padding=3, bias=False)
    body.bn1 = nn.BatchNorm2d(width)
    for stage in range(4):
        made = body._make_layer(BasicBlock, width << stage, 2, stride=1 if stage == 0 else 2)
        setattr(body, f"layer{stage + 1}", made)
    for module in body.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return body
