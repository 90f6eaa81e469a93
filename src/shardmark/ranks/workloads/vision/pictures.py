"""Batches of labelled images, normalised and augmented."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import torch

from shardmark.ranks.workloads.order import generator
from shardmark.ranks.workloads.sampled_task import SampledBatch, gpu_in_use

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

PADDING = 4
"""Black pixels on each side before the random crop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageBatch(SampledBatch):
    """Labelled images of one step."""

    pictures: Tensor
    """(n, 3, height, width), float32, normalised."""
    labels: Tensor
    """(n,), int64."""


class Normalise:
    """Converts uint8 images to float32: (x / 255 - mean) / std for each of the channels."""

    def __init__(self, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        means, stds = torch.tensor(mean).view(1, 3, 1, 1), torch.tensor(std).view(1, 3, 1, 1)
        self._scale = 1 / (255 * stds)
        self._shift = -means / stds

    def __call__(self, pictures: Tensor) -> Tensor:
        """Convert (n, 1 or 3, height, width) uint8 to (n, 3, height, width) float32.

        The result is in page-locked memory if this process uses a GPU, for asynchronous copies.
        """
        size = (pictures.shape[0], 3, *pictures.shape[2:])
        normalised = torch.empty(size, pin_memory=gpu_in_use())
        return normalised.copy_(pictures).mul_(self._scale).add_(self._shift)


@lru_cache(maxsize=2)
def crop_flip_draws(
    seed: int, epoch: int, samples: int
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Corner of the crop, (2, samples), and flag to flip, for each position of an epoch.

    Draws belong to positions, so that they do not depend on the rank that takes a sample.
    """
    drawn = generator(seed, "augment", epoch)
    corners = drawn.integers(0, 2 * PADDING + 1, (2, samples))
    return corners, drawn.integers(0, 2, samples).astype(np.bool_)


def crop_flip(pictures: Tensor, corners: NDArray[np.int64], flipped: NDArray[np.bool_]) -> Tensor:
    """Crop each padded image at its (top, left), 0 to 2 * PADDING, and mirror the flipped ones.

    Images are (n, channels, height, width) uint8.  Equals torchvision's transforms.
    """
    count, channels, height, width = pictures.shape
    padded = np.zeros((count, channels, height + 2 * PADDING, width + 2 * PADDING), np.uint8)
    padded[:, :, PADDING:-PADDING, PADDING:-PADDING] = pictures.numpy()
    windows = np.lib.stride_tricks.sliding_window_view(padded, (height, width), axis=(2, 3))
    tops, lefts = corners
    cropped = windows[np.arange(count), :, tops, lefts]  # copies one window per image
    cropped[flipped] = cropped[flipped][..., ::-1]
    return torch.from_numpy(cropped)
