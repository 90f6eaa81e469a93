"""Synthetic images.  Tables of results mark them as synthetic.  Imports torch in `load`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardmark.ranks.workloads.datasets.sources import InMemory, LabelledPictures
    from shardmark.ranks.workloads.vision.options import ClassificationOptions

IMAGE_SIZE = 32
CLASSES = 10
TRAINING_SAMPLES = 1024
VALIDATION_SAMPLES = 256
_PATTERN = 4
"""Number of rows and columns of tiles in the pattern of a class."""


def check(options: ClassificationOptions) -> int:
    return options.training_samples or TRAINING_SAMPLES


def paths(options: ClassificationOptions) -> tuple[Path, ...]:  # noqa: ARG001  (one signature)
    return ()


def load(options: ClassificationOptions, seed: int) -> LabelledPictures:
    """Generate images: half the pattern of the class and half noise, so that it can be learned."""
    import numpy as np
    import torch

    from shardmark.ranks.workloads.datasets.sources import InMemory, LabelledPictures
    from shardmark.ranks.workloads.order import generator

    classes = options.classes or CLASSES
    size = options.image_size or IMAGE_SIZE
    patterns = generator(seed, "pictures").integers(0, 128, (classes, 3, _PATTERN, _PATTERN))
    tiles = np.arange(size) * _PATTERN // size  # tile of each row and column
    stretched = patterns.astype(np.uint8)[:, :, tiles][:, :, :, tiles]

    def split_of(samples: int, split: int) -> InMemory:
        drawn = generator(seed, "pictures", 1 + split)
        labels = drawn.integers(0, classes, samples)
        pictures = drawn.integers(0, 128, (samples, 3, size, size), dtype=np.uint8)
        for label, pattern in enumerate(stretched):
            pictures[labels == label] += pattern  # 127 + 127 at most
        return InMemory(torch.from_numpy(pictures), torch.from_numpy(labels), size)

    return LabelledPictures(
        training=split_of(options.training_samples or TRAINING_SAMPLES, 0),
        validation=split_of(options.validation_samples or VALIDATION_SAMPLES, 1),
        classes=tuple(str(label) for label in range(classes)),
        image_size=size,
        mean=(0.5, 0.5, 0.5),
        std=(0.25, 0.25, 0.25),
        synthetic=True,
    )
