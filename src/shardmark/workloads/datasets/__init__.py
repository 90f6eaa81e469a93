"""The data sets: one file each, imported when it is used.  This module imports no torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Protocol, TypeVar, cast

if TYPE_CHECKING:
    from shardmark.workloads.datasets.sources import LabelledPictures
    from shardmark.workloads.detection.annotated import AnnotatedPictures
    from shardmark.workloads.detection.options import DetectionOptions
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

_MODULES = {  # below shardmark.workloads; a module, or an object in one
    "digits": "datasets.digits",
    "mnist": "datasets.torchvision_sets:MNIST",
    "cifar10": "datasets.torchvision_sets:CIFAR10",
    "imagefolder": "datasets.imagefolder",
    "random": "datasets.random_pictures",
    "digits-detection": "detection.digits_detection",
    "coco": "detection.coco",
}


Options_contra = TypeVar("Options_contra", contravariant=True)
Data_co = TypeVar("Data_co", covariant=True)


class DataSet(Protocol[Options_contra, Data_co]):
    """What a data set offers: a module, or an object."""

    def check(self, options: Options_contra) -> None:
        """Raise `DataError` or `InputError` if the data cannot be there.  Imports no torch.

        Runs once before the first trial: whatever has to be made or read once is made here.
        """

    def load(self, options: Options_contra, seed: int) -> Data_co:
        """Read it, or find its files; subsets are drawn from the seed."""


def picture_data_set(name: str) -> DataSet[ClassificationOptions, LabelledPictures]:
    """The classification data set of that name."""
    return cast("DataSet[ClassificationOptions, LabelledPictures]", _imported(name))


def annotated_data_set(name: str) -> DataSet[DetectionOptions, AnnotatedPictures]:
    """The detection data set of that name."""
    return cast("DataSet[DetectionOptions, AnnotatedPictures]", _imported(name))


def _imported(name: str) -> object:
    module, _, attribute = _MODULES[name].partition(":")
    imported = importlib.import_module(f"shardmark.workloads.{module}")
    return getattr(imported, attribute) if attribute else imported
