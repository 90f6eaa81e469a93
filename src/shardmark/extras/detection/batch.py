"""Batches of annotated images of different sizes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch

from shardmark.ranks.workloads.sampled_task import SampledBatch, with_tensors

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from shardmark.extras.detection.annotated import RunLengths


@dataclass(frozen=True, slots=True, kw_only=True)
class DetectionBatch(SampledBatch):
    """Annotated images of one step."""

    pictures: tuple[Tensor, ...]
    """Each (3, height, width): uint8 as stored, float32 from 0 to 1 after `to`."""
    targets: tuple[dict[str, Any], ...]
    """Targets of torchvision's detectors, with the `sampling_seed` of the image's proposals.

    Boxes and labels are arrays, which are cheaper to send between processes, until `to` converts
    them; masks, (n, height, width) of uint8, are tensors.
    """

    def to(self, device: torch.device) -> Self:
        """Copy the batch to the device, and convert images like torchvision's `ToTensor`."""
        pictures = tuple(
            picture.to(device, non_blocking=True).float().div_(255)
            if picture.dtype == torch.uint8
            else picture.to(device)
            for picture in self.pictures
        )
        return replace(self, pictures=pictures, targets=_moved(self.targets, device))

    def _sliced_contents(self, rows: slice) -> dict[str, Any]:
        return {"pictures": self.pictures[rows], "targets": self.targets[rows]}


def _moved(targets: Sequence[dict[str, Any]], device: torch.device) -> tuple[dict[str, Any], ...]:
    tensors = tuple(
        {
            key: torch.from_numpy(value) if isinstance(value, np.ndarray) else value
            for key, value in target.items()
        }
        for target in targets
    )
    moved: tuple[dict[str, Any], ...] = with_tensors(
        tensors, lambda tensor: tensor.to(device, non_blocking=True)
    )
    return moved


def mirrored(picture: Tensor, boxes: NDArray[np.float32]) -> tuple[Tensor, NDArray[np.float32]]:
    """Mirror an image (3, height, width) and its boxes horizontally."""
    width = np.float32(picture.shape[-1])
    flipped = boxes.copy()
    flipped[:, 0], flipped[:, 2] = width - boxes[:, 2], width - boxes[:, 0]
    return picture.flip(-1), flipped


def decoded_masks(masks: Sequence[RunLengths], picture: Tensor) -> Tensor:
    """Decode run lengths to masks (n, height, width), uint8."""
    from faster_coco_eval.core import mask as coding

    if not masks:
        return torch.zeros((0, *picture.shape[-2:]), dtype=torch.uint8)
    pixels = coding.decode(list(masks))  # (height, width, n), column by column in memory
    return torch.from_numpy(pixels.transpose(2, 0, 1))
