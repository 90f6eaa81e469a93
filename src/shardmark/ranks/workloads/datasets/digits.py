"""Handwritten digits, the embedded default data set.  Imports torch only in `load`.

The file `digits.npz` is the test set of Alpaydin and Kaynak (1998); see `digits.NOTICE.md`.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from shardmark.ranks.workloads.datasets.sources import LabelledPictures
    from shardmark.ranks.workloads.vision.options import ClassificationOptions

    Split = tuple[NDArray[np.uint8], NDArray[np.int64]]

FILE = Path(__file__).with_name("digits.npz")
"""`pictures`, uint8 (1797, 8, 8) with values from 0 to 16, and `labels`, uint8 (1797,)."""
IMAGE_SIZE = 32
SAMPLES = 1797
VALIDATION_EVERY = 5
VALIDATION_SAMPLES = 360


def check(options: ClassificationOptions) -> int:
    """Return the number of training samples; `InputError` for more than there are."""
    return options.check_sample_counts(SAMPLES - VALIDATION_SAMPLES, VALIDATION_SAMPLES)


def paths(options: ClassificationOptions) -> tuple[Path, ...]:  # noqa: ARG001  (one signature)
    """Return no paths: the file is a part of the package."""
    return ()


def load(options: ClassificationOptions, seed: int) -> LabelledPictures:  # noqa: ARG001
    import torch

    from shardmark.ranks.workloads.datasets.sources import InMemory, LabelledPictures

    size = options.image_size or IMAGE_SIZE
    training, validation = (
        InMemory(torch.from_numpy(pictures), torch.from_numpy(labels), size)
        for pictures, labels in read_splits()
    )
    return LabelledPictures(
        training=training,
        validation=validation,
        classes=tuple("0123456789"),
        image_size=size,
        mean=(0.306, 0.306, 0.306),  # values of the training images at 32 x 32
        std=(0.324, 0.324, 0.324),
    )


@cache
def read_splits() -> tuple[Split, Split]:
    """Training and validation digits: images (n, 1, 8, 8) and labels (n,).  Imports no torch.

    The split is fixed: with the samples sorted by class, every fifth one is for validation.
    """
    import numpy as np

    with np.load(FILE) as stored:
        values, labels = stored["pictures"], stored["labels"].astype(np.int64)
    pictures = np.rint(values * (255 / 16)).astype(np.uint8)[:, None]
    by_class = np.argsort(labels, kind="stable")
    validating = np.zeros(len(labels), np.bool_)
    validating[by_class[::VALIDATION_EVERY]] = True
    return (
        (pictures[~validating], labels[~validating]),
        (pictures[validating], labels[validating]),
    )
