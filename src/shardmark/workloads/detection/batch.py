"""Batches of pictures of different sizes with what is to be found in them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch

from shardmark.workloads.sampled_task import SampledBatch, with_tensors

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from shardmark.workloads.detection.annotated import RunLengths


@dataclass(frozen=True, slots=True, kw_only=True)
class DetectionBatch(SampledBatch):
    """Annotated pictures of one step."""

    pictures: tuple[Tensor, ...]
    """Each (3, height, width): uint8 as stored, float32 from 0 to 1 once moved to a device."""
    targets: tuple[dict[str, Any], ...]
    """As torchvision's detectors take them, and the `sampling_seed` of the proposals that the
    picture learns from in this step.  Boxes and labels are arrays, which cross processes cheaper,
    until they are moved to a device; masks, (n, height, width) of uint8, are tensors.
    """

    def to(self, device: torch.device) -> Self:
        """A copy on the device, its pictures as torchvision's `ToTensor` makes them."""
        pictures = tuple(
            picture.to(device, non_blocking=True).float().div_(255)
            if picture.dtype == torch.uint8
            else picture.to(device)
            for picture in self.pictures
        )
        return replace(self, pictures=pictures, targets=_moved(self.targets, device))

    def _contents_of(self, which: slice) -> dict[str, Any]:
        return {"pictures": self.pictures[which], "targets": self.targets[which]}


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
    """Picture (3, height, width) and boxes, left and right exchanged."""
    width = np.float32(picture.shape[-1])
    turned = boxes.copy()
    turned[:, 0], turned[:, 2] = width - boxes[:, 2], width - boxes[:, 0]
    return picture.flip(-1), turned


def decoded_masks(masks: Sequence[RunLengths], picture: Tensor) -> Tensor:
    """(n, height, width), uint8, from the run lengths."""
    from faster_coco_eval.core import mask as coding

    if not masks:
        return torch.zeros((0, *picture.shape[-2:]), dtype=torch.uint8)
    pixels = coding.decode(list(masks))  # (height, width, n), column by column in memory
    return torch.from_numpy(pixels.transpose(2, 0, 1))
