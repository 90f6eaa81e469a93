"""Annotations and detections in images: boxes, labels and masks.  Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

RunLengths = dict[str, Any]
"""A compressed mask in COCO's format: {"size": [height, width], "counts": bytes}."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Objects:
    """The n annotated objects of an image, in the order of the annotation file."""

    boxes: NDArray[np.float32]
    """(n, 4): left, top, right, bottom, in pixels of the stored image."""
    labels: NDArray[np.int64]
    """(n,), 1 to the number of classes; 0 is the background."""
    areas: NDArray[np.float64]
    """(n,), area in square pixels, from the file."""
    crowds: NDArray[np.bool_]
    """(n,), true for annotations of a crowd."""
    masks: tuple[RunLengths, ...] | None = None
    """n masks of the size of the image; None if masks are not read."""

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnotatedReading:
    """Samples as they are stored."""

    pictures: tuple[Tensor, ...]
    """Each (3, height, width), uint8, RGB."""
    objects: tuple[Objects, ...]
    image_ids: tuple[int, ...]
    """Ids in the annotation file."""
    sample_ids: tuple[int, ...]
    """The samples that were read: a broken one is replaced by the next one, or left out."""
    errors: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Detections:
    """The k objects that a model detected in an image."""

    boxes: NDArray[np.float32]
    """(k, 4): left, top, right, bottom, in pixels of the stored image."""
    scores: NDArray[np.float32]
    """(k,)"""
    labels: NDArray[np.int64]
    """(k,), 1 to the number of classes."""
    masks: tuple[RunLengths, ...] | None = None
    """k masks of the size of the image; None for a model without masks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatedPicture:
    """Annotations and detections of an image; ranks exchange them."""

    image_id: int
    truth: Objects
    detections: Detections
