"""Options of image classification.  Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, PositiveInt, field_validator, model_validator

from shardmark.ranks.workloads.models import (
    MODELS,
    SMALL_VITS,
    check_model_name,
    is_user_function,
    only_in_timm,
)
from shardmark.ranks.workloads.options import PictureOptions

_DOWNLOADED = ("mnist", "cifar10")
_ON_DISK = (*_DOWNLOADED, "imagefolder")
DEFAULT = "default"
"""Value of `weights` for torchvision's own."""
_FROM_THE_SEED = (
    *("pretrained", "weights", "weights_backbone", "checkpoint_path"),
    *("pretrained_cfg", "pretrained_cfg_overlay", "pretrained_strict"),
)
"""Arguments of torchvision and timm that load weights."""


class ClassificationOptions(PictureOptions):
    """Image classification: the model assigns each image to one of several classes."""

    verified_samples: ClassVar[int] = 256
    models: ClassVar[Mapping[str, str]] = MODELS

    name: Literal["classification"] = "classification"
    model: str = "resnet18"
    """A torchvision or timm classification model, or `package.module:function` of your own."""
    dataset: Literal["digits", "mnist", "cifar10", "imagefolder", "random"] = "digits"
    """`random` generates 1,024 + 256 images unless the numbers of samples are given."""
    weights: str | None = None
    """null: initialise from the seed.  `default`: torchvision's weights, from torch's cache.
    Otherwise a file with the model's state dictionary (.pt, .pth or .safetensors).  A classifier
    for another number of classes is initialised from the seed."""
    download: bool = False
    """Download what is missing: `mnist` or `cifar10` into `data_dir`, and the weights `default`
    into torch's cache."""
    image_size: PositiveInt | None = None
    """Side of the square images in pixels; others are resized bilinearly.

    Null is the size of the data set: 32, and for `imagefolder` the side of the first training
    image if it is square and smaller than 224, else 224.
    """
    classes: Annotated[int, Field(ge=2)] | None = None
    """`random` only: number of classes; null makes 10."""
    augment: Literal["none", "crop_flip"] = "none"
    """`crop_flip`: pad by 4 black pixels, crop at random, and flip half of the images."""
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Fraction of the target spread over all classes, in training only."""

    def optional_modules(self) -> dict[str, str]:
        modules = {}
        if not is_user_function(self.model):
            library = "timm" if only_in_timm(self.model) else "torchvision"
            modules[library] = f"workload.model {self.model}"
        if self.dataset in _DOWNLOADED:
            modules.setdefault("torchvision", f"workload.dataset {self.dataset}")
        if self.dataset == "imagefolder":
            modules["PIL"] = "workload.dataset imagefolder"
        return modules

    def without_weights(self) -> Self:
        download = self.download and self.dataset in _DOWNLOADED
        return self.model_copy(update={"weights": None, "download": download})

    @field_validator("model")
    @classmethod
    def _check_model(cls, name: str) -> str:
        check_model_name(name)
        return name

    @model_validator(mode="after")
    def _agree(self) -> ClassificationOptions:
        reserved = {"num_classes"}.union(() if is_user_function(self.model) else _FROM_THE_SEED)
        for key in sorted(reserved.intersection(self.model_options)):
            raise ValueError(
                f"model_options.{key} cannot be given: the data set sets the number of classes, "
                "and workload.weights the initial weights"
            )
        if self.dataset in _ON_DISK and not self.data_dir:
            raise ValueError(f"data_dir is missing; {self.dataset} needs the folder of its files")
        if self.dataset == "imagefolder" and self.download and self.weights != DEFAULT:
            raise ValueError(
                "download is true; only mnist, cifar10 and weights: default can be downloaded"
            )
        if self.weights == DEFAULT and (
            is_user_function(self.model) or self.model in SMALL_VITS or only_in_timm(self.model)
        ):
            raise ValueError(
                f"weights is default; torchvision has none for {self.model}: use null or a file"
            )
        if self.dataset != "random" and self.classes is not None:
            raise ValueError(f"classes is {self.classes}; only dataset: random has this option")
        return self
