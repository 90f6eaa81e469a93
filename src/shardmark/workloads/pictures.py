"""Batches of labelled pictures: normalised, augmented, moved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np
import torch

from shardmark.core.errors import InputError
from shardmark.workloads.order import generator

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

PADDING = 4
"""Black pixels on each side before the random crop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageBatch:
    """Some samples of one step, ready for the model."""

    pictures: Tensor
    """(n, 3, height, width), float32, normalised."""
    labels: Tensor
    """(n,), int64."""
    sample_ids: tuple[int, ...]
    """Index of each sample in the training set, in order."""
    errors: tuple[str, ...] = ()
    """One line for each unreadable picture met while making this batch."""

    def __len__(self) -> int:
        return len(self.sample_ids)

    def to(self, device: torch.device) -> Self:
        """A copy on the device; asynchronous where the memory is pinned."""
        if device.type == "cpu":
            return self
        pinned = self.pictures.is_pinned()
        return self._with(
            self.pictures.to(device, non_blocking=pinned),
            self.labels.to(device, non_blocking=pinned),
        )

    def split(self, parts: int) -> tuple[Self, ...]:
        """Equal, consecutive micro-batches."""
        if parts == 1:
            return (self,)
        if len(self) % parts:
            raise InputError(
                "recipe.gradient_accumulation",
                f"a rank's {len(self)} samples cannot be cut into {parts} equal micro-batches",
                f"a divisor of {len(self)}",
            )
        size = len(self) // parts
        return tuple(
            type(self)(
                pictures=self.pictures[start : start + size],
                labels=self.labels[start : start + size],
                sample_ids=self.sample_ids[start : start + size],
            )
            for start in range(0, len(self), size)
        )

    def pin_memory(self) -> Self:
        """A copy in page-locked memory; the loader's pinning thread calls it."""
        return self._with(self.pictures.pin_memory(), self.labels.pin_memory())

    def _with(self, pictures: Tensor, labels: Tensor) -> Self:
        return type(self)(
            pictures=pictures, labels=labels, sample_ids=self.sample_ids, errors=self.errors
        )


def gpu_in_use() -> bool:
    """Whether this process has set up CUDA; asking does not."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


class Normalise:
    """uint8 pictures to float32 ones: (x / 255 - mean) / std for each of the three channels."""

    def __init__(self, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        means, stds = torch.tensor(mean).view(1, 3, 1, 1), torch.tensor(std).view(1, 3, 1, 1)
        self._scale = 1 / (255 * stds)
        self._shift = -means / stds

    def __call__(self, pictures: Tensor) -> Tensor:
        """(n, 1 or 3, height, width) uint8 -> (n, 3, height, width) float32.

        In page-locked memory where this process uses a GPU, so that the copy there need not wait.
        """
        size = (pictures.shape[0], 3, *pictures.shape[2:])
        normalised = torch.empty(size, pin_memory=gpu_in_use())
        return normalised.copy_(pictures).mul_(self._scale).add_(self._shift)


class CropFlip:
    """Random crop out of a black frame, then a horizontal flip, as torchvision's transforms do.

    Drawn for each position of an epoch, so that a sample's draw does not depend on who takes it.
    """

    def __init__(self, seed: int, samples: int) -> None:
        self._seed = seed
        self._samples = samples
        self._epoch = -1
        self._corners = np.empty((2, 0), np.int64)
        self._flipped = np.empty(0, np.bool_)

    def __call__(self, pictures: Tensor, epoch: int, positions: slice) -> Tensor:
        """uint8 (n, channels, height, width) -> the same shape, augmented."""
        if epoch != self._epoch:
            drawn = generator(self._seed, "augment", epoch)
            self._corners = drawn.integers(0, 2 * PADDING + 1, (2, self._samples))
            self._flipped = drawn.integers(0, 2, self._samples).astype(np.bool_)
            self._epoch = epoch
        tops, lefts = self._corners[:, positions]
        return crop_flip(pictures, tops, lefts, self._flipped[positions])


def crop_flip(
    pictures: Tensor, tops: NDArray[np.int64], lefts: NDArray[np.int64], flipped: NDArray[np.bool_]
) -> Tensor:
    """Cut each framed picture at its (top, left), 0 to 2 * PADDING, and mirror the flipped ones."""
    count, channels, height, width = pictures.shape
    framed = np.zeros((count, channels, height + 2 * PADDING, width + 2 * PADDING), np.uint8)
    framed[:, :, PADDING:-PADDING, PADDING:-PADDING] = pictures.numpy()
    windows = np.lib.stride_tricks.sliding_window_view(framed, (height, width), axis=(2, 3))
    cropped = windows[np.arange(count), :, tops, lefts]  # copies one window of each picture
    cropped[flipped] = cropped[flipped][..., ::-1]
    return torch.from_numpy(cropped)
