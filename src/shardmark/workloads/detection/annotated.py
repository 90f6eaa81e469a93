"""What is marked and what is found in pictures: boxes, labels and masks.  Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

RunLengths = dict[str, Any]
"""A mask as COCO writes it, compressed: {"size": [height, width], "counts": bytes}."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Objects:
    """What is marked in one picture, n objects in the order of the annotation file."""

    boxes: NDArray[np.float32]
    """(n, 4): left, top, right, bottom, in pixels of the stored picture."""
    labels: NDArray[np.int64]
    """(n,), 1 to the number of classes; 0 is the background."""
    areas: NDArray[np.float64]
    """(n,), square pixels, as the file gives them."""
    crowds: NDArray[np.bool_]
    """(n,), true where the annotation is of a group."""
    masks: tuple[RunLengths, ...] | None = None
    """n masks of the whole picture; None where nobody asked for them."""

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnotatedReading:
    """Some samples as they are stored."""

    pictures: tuple[Tensor, ...]
    """Each (3, height, width), uint8, RGB."""
    objects: tuple[Objects, ...]
    image_ids: tuple[int, ...]
    """The annotation file's."""
    sample_ids: tuple[int, ...]
    """Those really read: a broken sample's place is taken by the next one, or is left out."""
    errors: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Detections:
    """What a model found in one picture, k objects."""

    boxes: NDArray[np.float32]
    """(k, 4): left, top, right, bottom, in pixels of the stored picture."""
    scores: NDArray[np.float32]
    """(k,)"""
    labels: NDArray[np.int64]
    """(k,), 1 to the number of classes."""
    masks: tuple[RunLengths, ...] | None = None
    """k masks of the whole picture; None for a model that finds boxes only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatedPicture:
    """What is marked in a picture, and what was found; ranks send each other these."""

    image_id: int
    truth: Objects
    found: Detections
