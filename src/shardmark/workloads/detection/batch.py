"""Batches of pictures of different sizes with what is to be found in them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch

from shardmark.workloads.sampled_task import SampledBatch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from shardmark.workloads.detection.annotated import RunLengths


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What is to be found in one picture; arrays, which cross processes cheaper than tensors."""

    boxes: NDArray[np.float32]
    """(n, 4): left, top, right, bottom in pixels."""
    labels: NDArray[np.int64]
    image_id: int
    sampling_seed: int
    """Of the proposals that this picture learns from in this step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DetectionBatch(SampledBatch):
    """Annotated pictures of one step."""

    pictures: tuple[Tensor, ...]
    """Each (3, height, width): uint8 as stored, float32 from 0 to 1 once moved to a device."""
    targets: tuple[Target, ...]
    masks: tuple[Tensor, ...] | None = None
    """Each (n, height, width), uint8; None where nobody learns masks."""
    model_targets: list[dict[str, Any]] = field(default_factory=list)
    """torchvision's form of the targets, on the device; empty before."""

    def to(self, device: torch.device) -> Self:
        """A copy on the device, its pictures as torchvision's `ToTensor` makes them."""
        pictures = tuple(
            picture.to(device, non_blocking=True).float().div_(255)
            if picture.dtype == torch.uint8
            else picture.to(device)
            for picture in self.pictures
        )
        return replace(self, pictures=pictures, model_targets=self._model_targets(device))

    def _model_targets(self, device: torch.device) -> list[dict[str, Any]]:
        made: list[dict[str, Any]] = [
            {
                "boxes": torch.from_numpy(target.boxes).to(device),
                "labels": torch.from_numpy(target.labels).to(device),
                "image_id": target.image_id,
                "sampling_seed": target.sampling_seed,
            }
            for target in self.targets
        ]
        for target, masks in zip(made, self.masks or (), strict=False):
            target["masks"] = masks.to(device, non_blocking=True)
        return made

    def _contents_of(self, which: slice) -> dict[str, Any]:
        return {
            "pictures": self.pictures[which],
            "targets": self.targets[which],
            "masks": None if self.masks is None else self.masks[which],
            "model_targets": self.model_targets[which],
        }

    def pin_memory(self) -> Self:
        """A copy in page-locked memory; the loader's pinning thread calls it."""
        masks = None if self.masks is None else tuple(m.pin_memory() for m in self.masks)
        return replace(self, pictures=tuple(p.pin_memory() for p in self.pictures), masks=masks)


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
