"""Labelled images, read from memory or from files.  Imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch.nn import functional

from shardmark.ranks.workloads.order import Source

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

RESIZE_WHOLE_BYTES = 2**30
"""Splits above this size are not resized as a whole, but batch by batch when they are read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Samples as they are stored."""

    pictures: Tensor
    """(n, 1 or 3, height, width), uint8."""
    labels: Tensor
    """(n,), int64."""
    sample_ids: tuple[int, ...]
    """The samples that were read: a broken one is replaced by the next one, or left out."""
    errors: tuple[str, ...] = ()


class PictureSource(Source, Protocol):
    """A split of an image data set."""

    def read(self, ids: NDArray[np.int64]) -> Reading:
        """Read these samples, in this order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelledPictures:
    """An image data set with both splits, ready to be read."""

    training: PictureSource
    validation: PictureSource
    classes: tuple[str, ...]
    image_size: int
    mean: tuple[float, float, float]
    """Mean of the channels red, green and blue, with values from 0 to 1."""
    std: tuple[float, float, float]
    synthetic: bool = False


class InMemory:
    """A `PictureSource` in one uint8 tensor; greyscale images keep their single channel."""

    def __init__(self, pictures: Tensor, labels: Tensor, image_size: int) -> None:
        samples, channels, height, width = pictures.shape
        self._image_size: int | None = None  # resize to it in each reading
        if (height, width) != (image_size, image_size):
            if samples * channels * image_size**2 <= RESIZE_WHOLE_BYTES:
                pictures = _resized(pictures, image_size)
            else:
                self._image_size = image_size
        self._pictures = pictures.contiguous()
        self._labels = labels

    def __len__(self) -> int:
        return len(self._labels)

    def read(self, ids: NDArray[np.int64]) -> Reading:
        index = torch.from_numpy(ids)
        pictures = self._pictures.index_select(0, index)
        if self._image_size is not None:
            pictures = _resized(pictures, self._image_size)
        labels = self._labels.index_select(0, index)
        return Reading(pictures=pictures, labels=labels, sample_ids=tuple(ids.tolist()))

    def select(self, ids: NDArray[np.int64]) -> InMemory:
        index = torch.from_numpy(ids)
        size = self._image_size or self._pictures.shape[-1]
        return InMemory(self._pictures[index], self._labels[index], size)


def _resized(pictures: Tensor, image_size: int) -> Tensor:
    """Resize uint8 (n, channels, height, width) to squares, bilinear with antialiasing."""
    size = (image_size, image_size)
    return functional.interpolate(pictures, size, mode="bilinear", antialias=True)
