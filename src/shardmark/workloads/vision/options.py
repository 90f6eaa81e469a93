"""Picture classification: which model, on which data.  Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveInt, field_validator, model_validator

from shardmark.workloads.datasets import picture_data_set
from shardmark.workloads.models import check_model_name, is_user_function
from shardmark.workloads.options import WorkloadOptions

if TYPE_CHECKING:
    from shardmark.workloads.base import Workload

VERIFIED_SAMPLES = 256

_ON_DISK = ("mnist", "cifar10", "imagefolder")
_FROM_THE_SEED = ("pretrained", "weights", "weights_backbone")


class ClassificationOptions(WorkloadOptions):
    """A model that puts each picture into one of several classes."""

    name: Literal["classification"] = "classification"
    model: str = "resnet18"
    """A torchvision or timm classification model, or `package.module:function` of your own."""
    model_options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments passed to the model as they are, e.g. {"dropout": 0.1}."""
    dataset: Literal["digits", "mnist", "cifar10", "imagefolder", "random"] = "digits"
    data_dir: str | None = None
    """Folder that holds the data set's layout; `~` expands.  Unused by `digits` and `random`."""
    download: bool = False
    """Fetch `mnist` or `cifar10` into `data_dir` where it is not there yet."""
    image_size: PositiveInt | None = None
    """Side of the square pictures in pixels, bilinearly resized where they have another.

    Null is the data set's own: 32, and for `imagefolder` the side of the first training picture
    where that is square and under 224, else 224.
    """
    classes: Annotated[int, Field(ge=2)] | None = None
    """`random` only: number of classes; null makes 10."""
    training_samples: PositiveInt | None = None
    """Train on so many samples, drawn from the seed; null takes all (`random`: makes 1,024)."""
    validation_samples: PositiveInt | None = None
    """Validate on so many samples, drawn from the seed; null takes all (`random`: makes 256)."""
    augment: Literal["none", "crop_flip"] = "none"
    """`crop_flip`: 4 black pixels around, a random crop, a horizontal flip of every other one."""
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the target spread over all classes, in training only."""
    loader_workers: NonNegativeInt = 0
    """Processes of each rank that make batches ahead; 0 makes them inside the step."""
    on_broken: Literal["fail", "skip"] = "fail"
    """Unreadable picture: end the trial, or train on the next readable one and report it."""

    @field_validator("model")
    @classmethod
    def _known(cls, name: str) -> str:
        check_model_name(name)
        return name

    @model_validator(mode="after")
    def _agree(self) -> ClassificationOptions:
        reserved = {"num_classes"}.union(() if is_user_function(self.model) else _FROM_THE_SEED)
        for key in sorted(reserved.intersection(self.model_options)):
            raise ValueError(
                f"model_options.{key} cannot be given: the data set sets the number of classes, "
                "and weights start from the seed"
            )
        if self.dataset in _ON_DISK and not self.data_dir:
            raise ValueError(f"data_dir is missing; {self.dataset} needs the folder that holds it")
        if self.dataset == "imagefolder" and self.download:
            raise ValueError("download is true; only mnist and cifar10 can be downloaded")
        if self.dataset != "random" and self.classes is not None:
            raise ValueError(f"classes is {self.classes}; only random data let you choose it")
        return self

    @property
    def folder(self) -> Path:
        """`data_dir` as a path."""
        assert self.data_dir is not None, "checked for the data sets that ask"
        return Path(self.data_dir).expanduser()

    def shortened(self) -> Self:
        """The same task, of whose validation samples at most 256 are evaluated."""
        return self.evaluating(min(VERIFIED_SAMPLES, self.validation_samples or VERIFIED_SAMPLES))

    def check_data(self) -> None:
        """Raise `DataError` or `InputError` if the data cannot be there.  Imports no torch."""
        picture_data_set(self.dataset).check(self)

    def build(self, seed: int) -> Workload:
        """Read the data and make the task."""
        from shardmark.workloads.vision.task import Classification

        return Classification(self, seed)
