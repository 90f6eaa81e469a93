"""Fits the heads of a detector that knows COCO's categories to another data set's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

COCO_OUTPUTS = 91
"""The background and COCO's category ids up to 90, ten of them unused."""

_LAYERS = (
    ("roi_heads.box_predictor.cls_score", False),
    ("roi_heads.box_predictor.bbox_pred", False),
    ("roi_heads.mask_predictor.mask_fcn_logits", False),
    ("head.classification_head.cls_logits", True),
)
"""Layers of torchvision's detectors with an output a class, and whether classes are the inner axis
of their outputs (several anchors, each with all classes) or the outer (a class's four box edges).
"""


def coco_rows(classes: Sequence[str]) -> list[int | None]:
    """For the background and each class: its output in COCO's 91, None where COCO has no such."""
    from torchvision.models.detection import FasterRCNN_ResNet50_FPN_Weights

    names = FasterRCNN_ResNet50_FPN_Weights.COCO_V1.meta["categories"]
    numbers = {name: number for number, name in enumerate(names) if name != "N/A"}
    return [0, *(numbers.get(name) for name in classes)]


def head_outputs(model: nn.Module, tensors: Mapping[str, Tensor]) -> int | None:
    """Outputs of the heads whose tensors these are; None where the model's heads are unknown."""
    own = dict(model.named_modules())
    for name, inner in _LAYERS:
        if name not in own or f"{name}.bias" not in tensors:
            continue
        if name.endswith("bbox_pred"):
            return len(tensors[f"{name}.bias"]) // 4
        anchors = _anchors(model) if inner else 1
        return len(tensors[f"{name}.bias"]) // anchors
    return None


def fit_heads(model: nn.Module, rows: Sequence[int | None]) -> None:
    """Keep these outputs, in this order; those without a source stay as they were drawn."""
    modules = dict(model.named_modules())
    for name, inner in _LAYERS:
        if name not in modules:
            continue
        parent, _, attribute = name.rpartition(".")
        layer = modules[name]
        assert isinstance(layer, nn.Linear | nn.Conv2d)
        setattr(modules[parent], attribute, _with_outputs(layer, rows, inner, _anchors(model)))
        if inner:
            modules[parent].num_classes = len(rows)


def _anchors(model: nn.Module) -> int:
    """Anchors at each place of a one-stage detector: its heads' outputs are so many times more."""
    generator = getattr(model, "anchor_generator", None)
    if generator is None:
        return 1
    counts = set(generator.num_anchors_per_location())
    assert len(counts) == 1, "torchvision's heads have as many anchors on each level"
    return int(counts.pop())


def _with_outputs(
    layer: nn.Linear | nn.Conv2d, rows: Sequence[int | None], inner: bool, anchors: int
) -> nn.Linear | nn.Conv2d:
    """A layer of the same kind with `rows` for its classes."""
    assert layer.bias is not None
    per_class = anchors if inner else 1
    if not inner:
        per_class = len(layer.bias) // COCO_OUTPUTS  # 1, or a box's 4 edges
    outputs = len(rows) * per_class
    if isinstance(layer, nn.Linear):
        made: nn.Linear | nn.Conv2d = nn.Linear(layer.in_features, outputs)
    else:
        made = nn.Conv2d(
            layer.in_channels,
            outputs,
            layer.kernel_size,  # type: ignore[arg-type]  # a pair, as torch keeps it
            layer.stride,  # type: ignore[arg-type]
            layer.padding,  # type: ignore[arg-type]
        )
        nn.init.normal_(made.weight, std=0.01)
    assert made.bias is not None
    nn.init.constant_(made.bias, float(layer.bias.detach().min()) if inner else 0.0)
    with torch.no_grad():
        for source, target in ((layer.weight, made.weight), (layer.bias, made.bias)):
            old, new = _by_class(source, inner, per_class), _by_class(target, inner, per_class)
            for index, row in enumerate(rows):
                if row is not None:
                    new[:, index] = old[:, row]
    return made


def _by_class(tensor: Tensor, inner: bool, per_class: int) -> Tensor:
    """A view (places, classes, ...) of a layer's weight or bias."""
    rest = tensor.shape[1:]
    if inner:
        return tensor.view(per_class, -1, *rest)
    return tensor.view(1, -1, per_class, *rest)
