"""Where pictures are read from: from memory or from files.  Imports torch."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Protocol, Self

import numpy as np
import torch
from PIL import Image
from torch.nn import functional

from shardmark.core.errors import DataError
from shardmark.workloads.options import check_sample_counts
from shardmark.workloads.order import subset

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from shardmark.workloads.datasets.folders import FolderSplit
    from shardmark.workloads.vision.options import ClassificationOptions

RESIZE_WHOLE_BYTES = 2**30
"""A set that would be larger is kept as it is, and each batch is resized when it is read."""

_UNREADABLE = (OSError, SyntaxError, ValueError, struct.error, Image.DecompressionBombError)
"""What Pillow raises for files that are cut off, or no pictures."""


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


class Source(Protocol):
    """One split of a data set."""

    def __len__(self) -> int: ...

    def read(self, ids: NDArray[np.int64]) -> Reading: ...

    def select(self, ids: NDArray[np.int64]) -> Self:
        """Only these samples, numbered anew from 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelledPictures:
    """A data set, ready to be read."""

    training: Source
    validation: Source
    classes: tuple[str, ...]
    image_size: int
    mean: tuple[float, float, float]
    """Of the channels red, green and blue, with values from 0 to 1: fixed for each data set."""
    std: tuple[float, float, float]
    synthetic: bool = False

    def reduced(self, options: ClassificationOptions, seed: int) -> LabelledPictures:
        """The random subsets that the options ask for."""
        check_sample_counts(options, len(self.training), len(self.validation))
        sources = []
        for split, (source, wanted) in enumerate(
            (
                (self.training, options.training_samples),
                (self.validation, options.validation_samples),
            )
        ):
            ids = subset(len(source), wanted, seed=seed, split=split)
            sources.append(source if ids is None else source.select(ids))
        return replace(self, training=sources[0], validation=sources[1])


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """Pictures decoded when they are read: RGB, resized to a square if they have another size."""

    split: FolderSplit
    image_size: int
    skip_broken: bool
    """Go on without an unreadable file, and name it."""
    replace_broken: bool
    """Let the next readable sample take its place, as training needs; else leave it out."""

    def __len__(self) -> int:
        return len(self.split.labels)

    def read(self, ids: NDArray[np.int64]) -> Reading:
        read: list[int] = []
        errors: list[str] = []
        pictures = np.empty((len(ids), self.image_size, self.image_size, 3), np.uint8)
        for wanted in ids.tolist():
            for sample in self._in_turn(wanted):
                error = self._decode_into(pictures[len(read)], sample)
                if error is None:
                    read.append(sample)
                    break
                errors.append(error)
            else:
                if self.replace_broken:
                    root = str(self.split.root)
                    raise DataError(root, "no picture in it can be read", "put readable ones there")
        stored = torch.from_numpy(pictures[: len(read)]).permute(0, 3, 1, 2).contiguous()
        labels = torch.from_numpy(self.split.labels[np.array(read, np.int64)])
        return Reading(pictures=stored, labels=labels, sample_ids=tuple(read), errors=tuple(errors))

    def select(self, ids: NDArray[np.int64]) -> Files:
        return replace(self, split=self.split.select(ids))

    def _in_turn(self, wanted: int) -> Iterable[int]:
        """Samples that may stand for the wanted one, in the order in which they are tried."""
        if not self.replace_broken:
            return (wanted,)
        return chain(range(wanted, len(self)), range(wanted))

    def _decode_into(self, place: NDArray[np.uint8], sample: int) -> str | None:
        """Fill the place, (height, width, 3), or say what is wrong with the file."""
        path = self.split.path(sample)
        try:
            with Image.open(path) as opened:
                picture = opened.convert("RGB")
            if picture.size != (self.image_size, self.image_size):
                picture = picture.resize(
                    (self.image_size, self.image_size), Image.Resampling.BILINEAR
                )
            place[:] = np.asarray(picture)
        except _UNREADABLE as error:
            if self.skip_broken:
                return f"{path}: cannot be read ({error})"
            raise DataError(
                str(path),
                f"cannot be read as a picture ({error})",
                "replace or remove it, or set workload.on_broken: skip",
            ) from error
        return None
