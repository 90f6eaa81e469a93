"""The data sets of classification: one file each.  Imports torch only to load one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from shardmark.workloads.datasets import digits, imagefolder, random_pictures
from shardmark.workloads.datasets.torchvision_sets import CIFAR10, MNIST

if TYPE_CHECKING:
    from shardmark.workloads.datasets.sources import LabelledPictures
    from shardmark.workloads.vision.options import ClassificationOptions


class PictureDataSet(Protocol):
    """A module, or an object."""

    def check(self, options: ClassificationOptions) -> int:
        """The number of training samples; `DataError` or `InputError` if the data cannot be there.

        Imports no torch.
        """

    def paths(self, options: ClassificationOptions) -> tuple[Path, ...]:
        """Files and folders that `load` reads; some may not be there yet."""

    def load(self, options: ClassificationOptions, seed: int) -> LabelledPictures:
        """Read it, or find its files."""


DATA_SETS: dict[str, PictureDataSet] = {
    "digits": digits,
    "mnist": MNIST,
    "cifar10": CIFAR10,
    "imagefolder": imagefolder,
    "random": random_pictures,
}


def check(options: ClassificationOptions) -> int:
    return DATA_SETS[options.dataset].check(options)


def paths(options: ClassificationOptions) -> tuple[Path, ...]:
    return DATA_SETS[options.dataset].paths(options)


def load(options: ClassificationOptions, seed: int) -> LabelledPictures:
    """Load both splits; `InputError` if the options ask for more samples than there are."""
    data = DATA_SETS[options.dataset].load(options, seed)
    options.check_sample_counts(len(data.training), len(data.validation))
    return data
