"""Options of object detection.  Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, PositiveInt, field_validator, model_validator

from shardmark.ranks.workloads.models import (
    check_function_spelling,
    check_model_name,
    is_user_function,
)
from shardmark.ranks.workloads.options import PictureOptions

_COCO = {
    "fasterrcnn_resnet50_fpn": "fasterrcnn_resnet50_fpn_coco-258fb6c6",
    "fasterrcnn_resnet50_fpn_v2": "fasterrcnn_resnet50_fpn_v2_coco-dd69338a",
    "fasterrcnn_mobilenet_v3_large_fpn": "fasterrcnn_mobilenet_v3_large_fpn-fb6a3cc7",
    "fasterrcnn_mobilenet_v3_large_320_fpn": "fasterrcnn_mobilenet_v3_large_320_fpn-907ea3f9",
    "maskrcnn_resnet50_fpn": "maskrcnn_resnet50_fpn_coco-bf2d0c1e",
    "maskrcnn_resnet50_fpn_v2": "maskrcnn_resnet50_fpn_v2_coco-73cbd019",
    "retinanet_resnet50_fpn": "retinanet_resnet50_fpn_coco-eeacb38b",
    "retinanet_resnet50_fpn_v2": "retinanet_resnet50_fpn_v2_coco-5905b1c5",
    "fcos_resnet50_fpn": "fcos_resnet50_fpn_coco-99b0c9b7",
}
"""Files of torchvision's trained weights, by detector; below by backbone."""
_BACKBONES = {
    "resnet101": "resnet101-63fe2227",
    "resnet50": "resnet50-0676ba61",
    "resnet18": "resnet18-f37072fd",
    "mobilenet_v3_large": "mobilenet_v3_large-8738ca79",
    "swin_t": "swin_t-704ceda3",
}
_WITHOUT_COCO = (
    *("fasterrcnn_resnet101_fpn", "fasterrcnn_swin_t_fpn"),
    *("maskrcnn_swin_t_fpn", "fcos_resnet18_fpn"),
)
"""Detectors that torchvision has not trained on COCO, and whose backbone it has trained."""

PUBLISHED: dict[str, dict[str, str]] = {
    "coco": _COCO,
    "imagenet": {
        detector: file
        for detector in (*_COCO, *_WITHOUT_COCO)
        for backbone, file in _BACKBONES.items()
        if backbone in detector
    },
}
"""Value of `workload.weights` -> detector -> NAME-HASH, with the first digits of the SHA-256."""

RANDOM = "random"
"""Value of `weights` of a plan: the same frozen layers and norms as with a published file."""


DETECTORS: dict[str, str] = {
    "fasterrcnn_resnet50_fpn": "detector: Faster R-CNN with feature pyramid, 41.8 M parameters"
    " (Ren et al., 2015; Lin et al., 2017)",
    "fasterrcnn_resnet50_fpn_v2": "detector: Faster R-CNN with batch norms, 43.7 M parameters"
    " (Li et al., 2021)",
    "fasterrcnn_resnet101_fpn": "detector: Faster R-CNN on ResNet-101, 60.8 M parameters",
    "fasterrcnn_mobilenet_v3_large_fpn": "detector: Faster R-CNN on MobileNetV3, 19.4 M parameters",
    "fasterrcnn_mobilenet_v3_large_320_fpn": "detector: the same for images of 320 pixels",
    "fasterrcnn_swin_t_fpn": "detector: Faster R-CNN on a Swin-T transformer with feature pyramid,"
    " 45.2 M parameters (Liu et al., 2021)",
    "maskrcnn_resnet50_fpn": "detector: Mask R-CNN, boxes and masks, 44.5 M parameters"
    " (He et al., 2017)",
    "maskrcnn_resnet50_fpn_v2": "detector: Mask R-CNN after Li et al. (2021), 46.4 M parameters",
    "maskrcnn_swin_t_fpn": "detector: Mask R-CNN on Swin-T, 47.9 M parameters",
    "retinanet_resnet50_fpn": "detector: RetinaNet, one stage, 34.1 M parameters"
    " (Lin et al., 2017)",
    "retinanet_resnet50_fpn_v2": "detector: RetinaNet after Zhang et al. (2020), 38.2 M parameters",
    "fcos_resnet50_fpn": "detector: FCOS, one stage, no anchors, 32.3 M parameters"
    " (Tian et al., 2019)",
    "fcos_resnet18_fpn": "detector: FCOS on a small backbone, for images of 128 pixels,"
    " 11.5 M parameters",
}
"""Description of each detector in one line, with its parameters for COCO's 91 outputs."""

_WORKLOAD_KEYS = (
    *("weights", "weights_backbone", "trainable_backbone_layers", "min_size", "max_size"),
)
"""Arguments of torchvision's detectors that are options of the workload."""


class DetectionOptions(PictureOptions):
    """Object detection: boxes and classes of objects in images, and masks for Mask R-CNN."""

    verified_samples: ClassVar[int] = 8
    models: ClassVar[Mapping[str, str]] = DETECTORS

    name: Literal["detection"] = "detection"
    model: str = "fasterrcnn_resnet50_fpn"
    """A detector of `shardmark list models`, or `package.module:function` of your own."""
    dataset: Literal["digits-detection", "coco"] = "digits-detection"
    data_dir: str | None = None
    """Folder with annotations/, train2017/ and val2017/; `~` is expanded.  `digits-detection` is
    generated there, or in the user's cache folder if this is null."""
    download: bool = False
    """Download the named weights if they are missing in torch's cache."""
    min_size: PositiveInt | None = None
    """Shorter side in pixels to which the model resizes; null: the model's default (mostly 800)."""
    max_size: PositiveInt | None = None
    """Maximum longer side in pixels after resizing; null: the model's default (mostly 1,333)."""
    weights: str | None = None
    """null: initialise from the seed.  `coco`: torchvision's detector trained on COCO.  `imagenet`:
    a backbone trained on ImageNet.  Otherwise a file with the model's state dictionary."""
    trainable_backbone_layers: Annotated[int, Field(ge=0, le=6)] | None = None
    """Number of last backbone stages that are trained with weights `coco` or `imagenet`; null is
    torchvision's default, 3 of ResNet's 5.  With other weights all stages are trained."""
    augment: Literal["none", "flip"] = "none"
    """`flip`: flip half of the images horizontally, drawn from the seed."""
    pictures_without_objects: Literal["keep", "drop"] = "keep"
    """`drop` leaves images without an object to learn out of training."""

    @property
    def weights_file(self) -> str | None:
        """The user's own file of weights."""
        return None if self.weights in {RANDOM, *PUBLISHED} else self.weights

    def without_weights(self) -> Self:
        """Return options whose model has random weights, and as many frozen layers as before."""
        weights = None if self.weights is None or self.weights_file else RANDOM
        return self.model_copy(update={"weights": weights, "download": False})

    def optional_modules(self) -> dict[str, str]:
        modules = ("faster_coco_eval", "torchvision", "PIL")  # the first one names the widest extra
        return dict.fromkeys(modules, "workload.name detection")

    @field_validator("model")
    @classmethod
    def _check_model(cls, name: str) -> str:
        if is_user_function(name):
            check_model_name(name)
        elif name not in DETECTORS:
            check_function_spelling(name)
            nearest = get_close_matches(name.lower(), DETECTORS, n=3) or list(DETECTORS)
            raise ValueError(
                f"unknown detector {name!r}; nearest: {', '.join(nearest)}; "
                "or package.module:function of your own"
            )
        return name

    @model_validator(mode="after")
    def _agree(self) -> DetectionOptions:
        for key in self.model_options:
            if key == "num_classes":
                raise ValueError(
                    f"model_options.{key} is set by the data set, from the number of its classes"
                )
            if key in _WORKLOAD_KEYS:
                option = f"workload.{key.removesuffix('_backbone')}"
                raise ValueError(f"model_options.{key} is set by the workload: use {option}")
        if self.weights == RANDOM:
            raise ValueError("weights is random; null initialises from the seed")
        published = PUBLISHED.get(self.weights or "")
        if published is not None and self.model not in published:
            raise ValueError(
                f"weights is {self.weights}; torchvision has none for {self.model}: use null"
                " or a file"
            )
        if self.trainable_backbone_layers is not None and self.weights not in PUBLISHED:
            raise ValueError(
                f"trainable_backbone_layers is {self.trainable_backbone_layers}; it needs weights:"
                " coco or imagenet"
            )
        if self.min_size and self.max_size and self.min_size > self.max_size:
            raise ValueError(f"min_size {self.min_size} is larger than max_size {self.max_size}")
        if self.dataset == "coco" and not self.data_dir:
            raise ValueError("data_dir is missing; coco needs the folder of its files")
        return self

    @property
    def casts_parameters(self) -> bool:
        """False: torchvision's box operators do not support bf16, which is inexact beyond 256."""
        return False

    @property
    def with_masks(self) -> bool:
        """True if the model learns masks, or is user-defined and may learn them."""
        return self.model.startswith("maskrcnn") or is_user_function(self.model)
