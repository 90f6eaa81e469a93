"""The data sets of classification.  A module is imported when its data set is needed."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from shardmark.ranks.workloads.vision.options import DEFAULT

if TYPE_CHECKING:
    from shardmark.ranks.workloads.datasets.sources import LabelledPictures
    from shardmark.ranks.workloads.vision.options import ClassificationOptions


class ImageDataSet(Protocol):
    """Functions of a module, or methods of an object, that read one data set."""

    def check(self, options: ClassificationOptions) -> int:
        """Return the number of training samples without importing torch.

        Raises `DataError` or `InputError` for missing or invalid data.
        """

    def paths(self, options: ClassificationOptions) -> tuple[Path, ...]:
        """Return the files and folders that `load` reads; some may not exist yet."""

    def load(self, options: ClassificationOptions, seed: int) -> LabelledPictures:
        """Read the images, or find their files."""


DATA_SETS = {
    "digits": "digits",
    "mnist": "torchvision_sets:MNIST",
    "cifar10": "torchvision_sets:CIFAR10",
    "imagefolder": "imagefolder",
    "random": "random_pictures",
}
"""Module in `workloads.datasets`, and the object in it, that reads the data set of each name."""


def data_set(name: str) -> ImageDataSet:
    """Import the data set of that name."""
    module, _, attribute = DATA_SETS[name].partition(":")
    imported = importlib.import_module(f"shardmark.ranks.workloads.datasets.{module}")
    selected: ImageDataSet = getattr(imported, attribute) if attribute else imported
    return selected


def check(options: ClassificationOptions) -> int:
    samples = data_set(options.dataset).check(options)
    weights_file(options)
    return samples


def paths(options: ClassificationOptions) -> tuple[Path, ...]:
    """Files of the data set, and of the weights."""
    file = weights_file(options)
    return (*data_set(options.dataset).paths(options), *([] if file is None else [file]))


def weights_file(options: ClassificationOptions) -> Path | None:
    """Return the file of the initial weights, None for weights from the seed.

    Raises `DataError` if it is missing.  Imports torch for the names of torchvision's files.
    """
    if options.weights is None:
        return None
    from shardmark.ranks.workloads.trained_weights import check_file, ensure, published_classifier

    if options.weights == DEFAULT:
        return ensure(published_classifier(options.model), download=options.download)
    check_file(options.weights, "null, default, or a file with the model's state dictionary")
    return Path(options.weights).expanduser()


def load(options: ClassificationOptions, seed: int) -> LabelledPictures:
    """Load both splits; `InputError` if the options ask for more samples than there are."""
    data = data_set(options.dataset).load(options, seed)
    options.check_sample_counts(len(data.training), len(data.validation))
    return data
