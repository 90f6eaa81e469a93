"""Decodes the pictures of a data set in COCO's layout when they are read.  Imports torch."""

from __future__ import annotations

import io
import struct
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError

from shardmark.core.errors import DataError
from shardmark.workloads.detection.annotated import AnnotatedReading, Objects

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray
    from torch import Tensor

    from shardmark.workloads.detection.annotated import RunLengths
    from shardmark.workloads.detection.coco_split import CocoSplit

_UNREADABLE = (OSError, SyntaxError, ValueError, struct.error, Image.DecompressionBombError)
"""What Pillow raises for files that are cut off, or no pictures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CocoSource:
    """An `AnnotatedSource`."""

    split: CocoSplit
    with_masks: bool
    skip_broken: bool
    """Go on without an unreadable picture, and name it."""
    replace_broken: bool
    """Let the next readable sample take its place, as training needs; else leave it out."""

    def __len__(self) -> int:
        return len(self.split)

    def read(self, ids: NDArray[np.int64]) -> AnnotatedReading:
        """Pictures, their values laid out in memory as (height, width, 3), and their objects."""
        samples: list[int] = []
        pictures: list[Tensor] = []
        objects: list[Objects] = []
        errors: list[str] = []
        for wanted in ids.tolist():
            for sample in self._in_turn(wanted):
                try:
                    picture = _decoded(self.split.path(sample))
                    objects.append(self._objects(sample, picture))
                except _UNREADABLE as error:
                    errors.append(self._skip(sample, error))
                    continue
                pictures.append(picture)
                samples.append(sample)
                break
            else:
                if self.replace_broken:
                    root = str(self.split.root)
                    raise DataError(root, "no picture in it can be read", "put readable ones there")
        known = self.split.index.image_ids[self.split.pictures[samples]]
        return AnnotatedReading(
            pictures=tuple(pictures),
            objects=tuple(objects),
            image_ids=tuple(known.tolist()),
            sample_ids=tuple(samples),
            errors=tuple(errors),
        )

    def select(self, ids: NDArray[np.int64]) -> CocoSource:
        return replace(self, split=self.split.select(ids))

    def _in_turn(self, wanted: int) -> Iterable[int]:
        """Samples that may stand for the wanted one, in the order in which they are tried."""
        if not self.replace_broken:
            return (wanted,)
        return chain(range(wanted, len(self)), range(wanted))

    def _skip(self, sample: int, error: Exception) -> str:
        path = self.split.path(sample)
        if self.skip_broken:
            return f"{path}: cannot be read ({error})"
        raise DataError(
            str(path),
            f"cannot be read as the picture that is annotated ({error})",
            "replace or remove it, or set workload.on_broken: skip",
        ) from error

    def _objects(self, sample: int, picture: Tensor) -> Objects:
        """Raises `ValueError` where the annotations are of a picture of another size."""
        index = self.split.index
        number = int(self.split.pictures[sample])
        height, width = picture.shape[-2:]
        annotated = (int(index.widths[number]), int(index.heights[number]))
        if annotated != (width, height):
            raise ValueError(
                f"it is {width} x {height} and its annotations are of {annotated[0]} x "
                f"{annotated[1]}"
            )
        first, last = self.split.offsets[number : number + 2].tolist()
        rows = self.split.shown[first:last]
        return Objects(
            boxes=self.split.boxes[first:last],
            labels=index.labels[rows],
            areas=index.areas[rows],
            crowds=index.crowds[rows],
            masks=self._masks(rows, height, width) if self.with_masks else None,
        )

    def _masks(self, rows: NDArray[np.int64], height: int, width: int) -> tuple[RunLengths, ...]:
        from shardmark.workloads.detection.coco_masks import run_lengths

        return tuple(run_lengths(self.split.index, row, height, width) for row in rows.tolist())


def _decoded(path: Path) -> Tensor:
    """(3, height, width), uint8, RGB, without any turn that EXIF asks for: annotations count the
    stored pixels.

    torchvision's own decoder gives the same values in 6/7 of the time, but is to be removed.
    """
    content = io.BytesIO(path.read_bytes())  # in one piece: Pillow would read bit by bit
    try:
        opened = Image.open(content)
    except UnidentifiedImageError as error:  # it names an address, another one each time
        raise OSError("cannot identify image file") from error
    with opened:
        pixels = np.array(opened if opened.mode == "RGB" else opened.convert("RGB"))
    return torch.from_numpy(pixels).permute(2, 0, 1)
