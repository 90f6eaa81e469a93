"""Labelled pictures, read from memory or from files.  Imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch.nn import functional

from shardmark.workloads.order import Source

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

RESIZE_WHOLE_BYTES = 2**30
"""A set that would be larger is kept as it is, and each batch is resized when it is read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Some samples as they are stored."""

    pictures: Tensor
    """(n, 1 or 3, height, width), uint8."""
    labels: Tensor
    """(n,), int64."""
    sample_ids: tuple[int, ...]
    """Those really read: a broken sample's place is taken by the next one, or is left out."""
    errors: tuple[str, ...] = ()


class PictureSource(Source, Protocol):
    """One split of a data set."""

    def read(self, ids: NDArray[np.int64]) -> Reading:
        """These samples, in this order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelledPictures:
    """A data set, ready to be read."""

    training: PictureSource
    validation: PictureSource
    classes: tuple[str, ...]
    image_size: int
    mean: tuple[float, float, float]
    """Of the channels red, green and blue, with values from 0 to 1: fixed for each data set."""
    std: tuple[float, float, float]
    synthetic: bool = False


class InMemory:
    """All pictures of a split as one uint8 tensor; grey ones keep their single channel."""

    def __init__(self, pictures: Tensor, labels: Tensor, image_size: int) -> None:
        samples, channels, height, width = pictures.shape
        self._image_size: int | None = None  # to resize to in each reading
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
    """uint8 (n, channels, height, width) -> square, bilinear with antialiasing."""
    size = (image_size, image_size)
    return functional.interpolate(pictures, size, mode="bilinear", antialias=True)
