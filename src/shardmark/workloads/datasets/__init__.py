"""The data sets: one file each, imported when it is used.  This module imports no torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Protocol, cast

if TYPE_CHECKING:
    from shardmark.workloads.datasets.sources import LabelledPictures
    from shardmark.workloads.detection.annotated import AnnotatedDataSet
    from shardmark.workloads.vision.options import ClassificationOptions

DATASETS: dict[str, str] = {
    "digits": "handwritten digits of scikit-learn, 1,437 + 360 of 8 x 8, no download (the default)",
    "mnist": "handwritten digits, 60,000 + 10,000 of 28 x 28, in torchvision's layout",
    "cifar10": "photographs in 10 classes, 50,000 + 10,000 of 32 x 32, in torchvision's layout",
    "imagefolder": "your own pictures: train/CLASS/*.jpg and test/CLASS/*.jpg",
    "random": "made up from the seed, of any size and number: for speed only",
    "digits-detection": "detection: handwritten digits on canvases, made once, no download",
    "coco": "detection: COCO 2017, or your own pictures in its layout",
}
"""Name -> one line."""

_MODULES = {
    "digits": "datasets.digits",
    "mnist": "datasets.mnist",
    "cifar10": "datasets.cifar10",
    "imagefolder": "datasets.imagefolder",
    "random": "datasets.random_pictures",
    "digits-detection": "detection.digits_detection",
    "coco": "detection.coco",
}


class PictureDataSet(Protocol):
    """What the module of a picture data set offers."""

    def check(self, options: ClassificationOptions) -> None:
        """Raise `DataError` or `InputError` if the data cannot be there.  Imports no torch."""

    def load(self, options: ClassificationOptions, seed: int) -> LabelledPictures:
        """Read it, or find its files; subsets are drawn from the seed."""


def picture_data_set(name: str) -> PictureDataSet:
    """The module of the data set of that name."""
    return cast("PictureDataSet", importlib.import_module(f"shardmark.workloads.{_MODULES[name]}"))


def annotated_data_set(name: str) -> AnnotatedDataSet:
    """The module of the detection data set of that name."""
    return cast(
        "AnnotatedDataSet", importlib.import_module(f"shardmark.workloads.{_MODULES[name]}")
    )
