"""CIFAR-10 (Krizhevsky, 2009) in torchvision's layout.  Imports torch only in `load`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardmark.workloads.datasets.checks import check_sample_counts
from shardmark.workloads.datasets.layout import check_layout, read_splits

if TYPE_CHECKING:
    from shardmark.workloads.datasets.sources import LabelledPictures
    from shardmark.workloads.vision.options import ClassificationOptions

IMAGE_SIZE = 32
TRAINING_SAMPLES = 50_000
VALIDATION_SAMPLES = 10_000
MEAN = (0.4914, 0.4822, 0.4465)
"""Of the training pictures, as is `STD`."""
STD = (0.2470, 0.2435, 0.2616)
FILES = tuple(
    f"cifar-10-batches-py/{name}"
    for name in (*(f"data_batch_{part}" for part in range(1, 6)), "test_batch", "batches.meta")
)


def check(options: ClassificationOptions) -> None:
    """Raise `DataError` for missing files, `InputError` for more samples than there are."""
    check_layout(options, FILES)
    check_sample_counts(options, TRAINING_SAMPLES, VALIDATION_SAMPLES)


def load(options: ClassificationOptions, seed: int) -> LabelledPictures:
    """All pictures in memory."""
    import torch
    from torchvision.datasets import CIFAR10

    from shardmark.workloads.datasets.sources import InMemory, LabelledPictures

    size = options.image_size or IMAGE_SIZE
    splits = read_splits(options, CIFAR10, FILES)
    training, validation = (
        InMemory(
            torch.from_numpy(split.data).permute(0, 3, 1, 2), torch.tensor(split.targets), size
        )
        for split in splits
    )
    return LabelledPictures(
        training=training,
        validation=validation,
        classes=tuple(splits[0].classes),
        image_size=size,
        mean=MEAN,
        std=STD,
    ).reduced(options, seed)
