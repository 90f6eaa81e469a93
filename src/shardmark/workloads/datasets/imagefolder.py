"""The user's own pictures, in one folder a class.  Imports torch only in `load`."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from shardmark.workloads.datasets.folders import FolderSplit, find_splits
from shardmark.workloads.options import check_sample_counts

if TYPE_CHECKING:
    from shardmark.workloads.datasets.sources import LabelledPictures
    from shardmark.workloads.vision.options import ClassificationOptions

LARGEST_OWN_SIZE = 224
MEAN = (0.485, 0.456, 0.406)
"""ImageNet's, as all of torchvision's models use."""
STD = (0.229, 0.224, 0.225)


def check(options: ClassificationOptions) -> None:
    """Raise `DataError` unless both splits have the same classes, and a picture in each."""
    training, validation = find_splits(options.folder)
    check_sample_counts(options, len(training.names), len(validation.names))


def load(options: ClassificationOptions, seed: int) -> LabelledPictures:
    """Find the files; pictures are decoded when they are read."""
    from shardmark.workloads.datasets.sources import Files, LabelledPictures

    training, validation = find_splits(options.folder)
    image_size = options.image_size or own_size(training)
    skip_broken = options.on_broken == "skip"
    return LabelledPictures(
        training=Files(
            split=training, image_size=image_size, skip_broken=skip_broken, replace_broken=True
        ),
        validation=Files(
            split=validation, image_size=image_size, skip_broken=skip_broken, replace_broken=False
        ),
        classes=training.classes,
        image_size=image_size,
        mean=MEAN,
        std=STD,
    ).reduced(options, seed)


def own_size(split: FolderSplit) -> int:
    """Side of the first picture whose size can be read, if square and under 224; else 224."""
    from PIL import Image

    for sample in islice(range(len(split.names)), 16):
        try:
            with Image.open(split.path(sample)) as picture:
                width, height = picture.size
        except (OSError, SyntaxError, ValueError):
            continue
        return width if width == height and width < LARGEST_OWN_SIZE else LARGEST_OWN_SIZE
    return LARGEST_OWN_SIZE
