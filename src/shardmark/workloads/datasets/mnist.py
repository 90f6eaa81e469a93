"""MNIST (LeCun et al., 1998) in torchvision's layout.  Imports torch only in `load`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardmark.workloads.datasets.checks import check_sample_counts
from shardmark.workloads.datasets.layout import check_layout, read_splits

if TYPE_CHECKING:
    from shardmark.workloads.datasets.sources import LabelledPictures
    from shardmark.workloads.vision.options import ClassificationOptions

IMAGE_SIZE = 32
TRAINING_SAMPLES = 60_000
VALIDATION_SAMPLES = 10_000
MEAN = (0.1307, 0.1307, 0.1307)
"""Of the training pictures at 28 x 28, as is `STD`."""
STD = (0.3081, 0.3081, 0.3081)
FILES = tuple(
    f"MNIST/raw/{split}-{kind}-ubyte"
    for split in ("train", "t10k")
    for kind in ("images-idx3", "labels-idx1")
)


def check(options: ClassificationOptions) -> None:
    """Raise `DataError` for missing files, `InputError` for more samples than there are."""
    check_layout(options, FILES)
    check_sample_counts(options, TRAINING_SAMPLES, VALIDATION_SAMPLES)


def load(options: ClassificationOptions, seed: int) -> LabelledPictures:
    """All pictures in memory, with one channel."""
    from torchvision.datasets import MNIST

    from shardmark.workloads.datasets.sources import InMemory, LabelledPictures

    size = options.image_size or IMAGE_SIZE
    training, validation = (
        InMemory(split.data[:, None], split.targets.long(), size)
        for split in read_splits(options, MNIST, FILES)
    )
    return LabelledPictures(
        training=training,
        validation=validation,
        classes=tuple("0123456789"),
        image_size=size,
        mean=MEAN,
        std=STD,
    ).reduced(options, seed)
