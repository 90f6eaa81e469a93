"""Object detection: which detector, on which pictures.  Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveInt, field_validator, model_validator

from shardmark.core.errors import DataError
from shardmark.workloads.datasets import annotated_data_set
from shardmark.workloads.detection.detectors import check_detector_name, has_masks
from shardmark.workloads.detection.weights import PUBLISHED, ensure
from shardmark.workloads.models import is_user_function
from shardmark.workloads.options import WorkloadOptions

if TYPE_CHECKING:
    from shardmark.workloads.base import Workload

VERIFIED_SAMPLES = 8

_SET_ELSEWHERE = (
    "weights",
    "weights_backbone",
    "trainable_backbone_layers",
    "min_size",
    "max_size",
)


class DetectionOptions(WorkloadOptions):
    """A model that finds objects in pictures: boxes and classes, and masks for Mask R-CNN."""

    name: Literal["detection"] = "detection"
    model: str = "fasterrcnn_resnet50_fpn"
    """A detector of `shardmark list models`, or `package.module:function` of your own."""
    model_options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments passed to the model as they are, e.g. {"box_detections_per_img": 50}."""
    dataset: Literal["digits-detection", "coco"] = "digits-detection"
    data_dir: str | None = None
    """Folder with annotations/, train2017/ and val2017/; `~` expands.  `digits-detection` is made
    there, or in the user's cache folder where this is null."""
    training_samples: PositiveInt | None = None
    """Train on so many pictures, drawn from the seed; null takes all."""
    validation_samples: PositiveInt | None = None
    """Validate on so many pictures, drawn from the seed; null takes all."""
    min_size: PositiveInt | None = None
    """Shorter side in pixels to which the model resizes; null is the model's own (mostly 800)."""
    max_size: PositiveInt | None = None
    """Longest side in pixels that resizing may reach; null is the model's own (mostly 1,333)."""
    weights: str | None = None
    """null: from the seed.  `coco`: torchvision's detector trained on COCO.  `imagenet`: a
    backbone trained on ImageNet.  Else a file of the model's state dictionary."""
    download: bool = False
    """Fetch the named weights where they are not in torch's cache yet."""
    trainable_backbone_layers: Annotated[int, Field(ge=0, le=6)] | None = None
    """Last stages of the backbone that train, with weights `coco` or `imagenet`; null is
    torchvision's own, 3 of ResNet's 5.  All train where weights come from the seed or a file."""
    augment: Literal["none", "flip"] = "none"
    """`flip`: a horizontal flip of every other picture, drawn from the seed."""
    pictures_without_objects: Literal["keep", "drop"] = "keep"
    """Whether pictures without any object to learn take part in training."""
    loader_workers: NonNegativeInt = 0
    """Processes of each rank that read pictures ahead; 0 reads them inside the step."""
    on_broken: Literal["fail", "skip"] = "fail"
    """Missing or unreadable picture: end the trial, or train on the next readable one and report
    it."""

    @field_validator("model")
    @classmethod
    def _known(cls, name: str) -> str:
        check_detector_name(name)
        return name

    @model_validator(mode="after")
    def _agree(self) -> DetectionOptions:
        own = is_user_function(self.model)
        for key in sorted({"num_classes", *_SET_ELSEWHERE}.intersection(self.model_options)):
            raise ValueError(
                f"model_options.{key} cannot be given: "
                + (
                    "the data set sets the number of classes"
                    if key == "num_classes"
                    else f"use workload.{key.removesuffix('_backbone')}"
                )
            )
        if own and self.weights in PUBLISHED:
            raise ValueError(f"weights is {self.weights}; a model of your own takes null or a file")
        published = PUBLISHED.get(self.weights or "")
        if published is not None and published(self.model) is None:
            raise ValueError(f"weights is {self.weights}; torchvision has none for {self.model}")
        if self.trainable_backbone_layers is not None and self.weights not in PUBLISHED:
            raise ValueError(
                f"trainable_backbone_layers is {self.trainable_backbone_layers}; it needs weights"
                " coco or imagenet, else the whole backbone trains"
            )
        if self.min_size and self.max_size and self.min_size > self.max_size:
            raise ValueError(f"min_size {self.min_size} is larger than max_size {self.max_size}")
        if self.dataset == "coco" and not self.data_dir:
            raise ValueError("data_dir is missing; coco needs the folder that holds it")
        return self

    @property
    def folder(self) -> Path | None:
        """`data_dir` as a path."""
        return None if self.data_dir is None else Path(self.data_dir).expanduser()

    @property
    def with_masks(self) -> bool:
        """Whether the model learns masks.  A model of your own may, so it gets them."""
        return has_masks(self.model)

    def shortened(self) -> Self:
        """The same task, of whose validation pictures at most 8 are evaluated."""
        return self.evaluating(min(VERIFIED_SAMPLES, self.validation_samples or VERIFIED_SAMPLES))

    def check_data(self) -> None:
        """Raise `DataError` or `InputError` if the data cannot be there.  Imports no torch."""
        annotated_data_set(self.dataset).check(self)
        if self.weights is None:
            return
        published = PUBLISHED.get(self.weights)
        if published is not None:
            file = published(self.model)
            assert file is not None, "checked with the options"
            ensure(file, download=self.download)
        elif not Path(self.weights).expanduser().is_file():
            raise DataError(
                "workload.weights",
                f"there is no file {self.weights}",
                "null, coco, imagenet, or a file of the model's state dictionary",
            )

    def loads(self) -> tuple[str, ...]:
        return ("shardmark.workloads.detection.task",)

    def build(self, seed: int) -> Workload:
        """Find the data and make the task."""
        from shardmark.workloads.detection.task import Detection

        return Detection(self, seed)
