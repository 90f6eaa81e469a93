"""The image classification task, and its batches of normalised and augmented images."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch.nn import functional

from shardmark.ranks.workloads.base import CannotShard, LossSum, TensorPlan
from shardmark.ranks.workloads.datasets.sources import PictureSource
from shardmark.ranks.workloads.flops import flops_on_meta
from shardmark.ranks.workloads.model_building import build_model, seeded
from shardmark.ranks.workloads.order import generator
from shardmark.ranks.workloads.sampled_task import (
    SampledBatch,
    SampledTask,
    added,
    checked_logits,
    gpu_in_use,
)
from shardmark.ranks.workloads.vision.data import load, weights_file

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor, nn

    from shardmark.base.layout import Shard
    from shardmark.ranks.workloads.base import Batch, BatchPlan
    from shardmark.ranks.workloads.datasets.sources import Reading
    from shardmark.ranks.workloads.order import Share
    from shardmark.ranks.workloads.vision.options import ClassificationOptions

COUNTED_PICTURES = 2
"""Images of a made-up batch; batch norm rejects one sample with a feature map of one pixel."""
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


class Classification(SampledTask[PictureSource, ImageBatch]):
    """Image classification with cross entropy."""

    _evaluation_batch = 128

    def __init__(self, options: ClassificationOptions, seed: int) -> None:
        self._options = options
        self._data = data = load(options, seed)
        self._normalise = Normalise(data.mean, data.std)
        self._initial_weights: str | None = None
        super().__init__(options, seed, data.training, data.validation, synthetic=data.synthetic)

    @property
    def classes(self) -> tuple[str, ...]:
        """Name of each class, in the order of the labels."""
        return self._data.classes

    def build_model(self) -> nn.Module:
        classes = len(self.classes)
        model = build_model(
            self._options.model,
            self._options.model_options,
            classes=classes,
            image_size=self._data.image_size,
            seed=self._seed,
        )
        file = weights_file(self._options)
        if file is not None:
            from shardmark.ranks.workloads.trained_weights import fill_classifier

            initial = fill_classifier(model, file, classes=classes)
            head = f"; {' and '.join(initial)} from the seed, for {classes} classes"
            self._initial_weights = f"{file.name}{head if initial else ''}"
        return model

    @property
    def settings(self) -> Mapping[str, object]:
        return {"initial_weights": self._initial_weights} if self._initial_weights else {}

    def _training_batch(self, plan: BatchPlan, share: Share) -> ImageBatch:
        read = self._training.read(share.ids)
        if self._options.augment == "none":
            return self._batch(read, read.pictures, share.step_weight)
        corners, flipped = crop_flip_draws(plan.seed, share.epoch, self.training_samples)
        rows = share.positions
        pictures = crop_flip(read.pictures, corners[:, rows], flipped[rows])
        return self._batch(read, pictures, share.step_weight)

    def _validation_batch(self, ids: NDArray[np.int64]) -> ImageBatch:
        read = self._validation.read(ids)
        return self._batch(read, read.pictures, float(len(ids)))

    def _batch(self, read: Reading, pictures: Tensor, step_weight: float) -> ImageBatch:
        return ImageBatch(
            pictures=self._normalise(pictures),
            labels=read.labels,
            sample_ids=read.sample_ids,
            step_weight=step_weight,
            errors=read.errors,
        )

    def loss(self, model: nn.Module, batch: Batch) -> LossSum:
        """Cross entropy, summed over the images in fp32 under every precision."""
        pictures = cast("ImageBatch", batch)
        total = functional.cross_entropy(
            self._logits(model, pictures),
            pictures.labels,
            label_smoothing=self._options.label_smoothing,
            reduction="sum",
        )
        return LossSum(total=total, weight=batch.weight)

    @torch.inference_mode()
    def evaluate(self, model: nn.Module, shard: Shard, device: torch.device) -> dict[str, float]:
        """Sums over the shard's validation batches, without label smoothing."""
        sums = torch.zeros(3, dtype=torch.float64, device=device)  # loss, top-1, top-5
        samples = 0
        for batch in self._validated(self._validation_batch, shard):
            if not len(batch):
                continue
            moved = batch.to(device)
            logits = self._logits(model, moved)  # (batch, classes)
            losses = functional.cross_entropy(logits, moved.labels, reduction="none")
            best = logits.topk(min(5, len(self.classes))).indices
            hits = best == moved.labels[:, None]
            sums += torch.stack([losses.double().sum(), hits[:, 0].sum(), hits.sum()])
            samples += len(batch)
        loss, top1, top5 = sums.tolist()
        return {"samples": samples, "loss": loss, "top1": top1, "top5": top5}

    def quality(self, parts: Iterable[object]) -> Mapping[str, float]:
        """`validation_loss`, `accuracy_top1` and, with more than five classes, `accuracy_top5`."""
        sums = added(parts)
        samples = sums.get("samples")
        if not samples:
            return {}
        names = {"validation_loss": "loss", "accuracy_top1": "top1"}
        if len(self.classes) > 5:
            names["accuracy_top5"] = "top5"
        return {metric: sums[name] / samples for metric, name in names.items()}

    def tensor_plan(self, model: nn.Module) -> TensorPlan | CannotShard:
        from shardmark.ranks.workloads.vision import transformers

        if not transformers.is_vision_transformer(model):
            return super().tensor_plan(model)
        return transformers.tensor_plan(model)

    def pipeline_parts(self, model: nn.Module) -> Sequence[nn.Module] | CannotShard:
        from shardmark.ranks.workloads.vision import transformers

        if not transformers.is_vision_transformer(model):
            return super().pipeline_parts(model)
        with seeded(0):
            batch = self._example_batch(torch.rand)
        return transformers.pipeline_parts(model, lambda module: self._logits(module, batch))

    def _example_batch(self, make: Callable[..., Tensor], **options: Any) -> ImageBatch:
        size = self._data.image_size
        return ImageBatch(
            pictures=make((COUNTED_PICTURES, 3, size, size), **options),
            labels=torch.zeros(COUNTED_PICTURES, dtype=torch.int64, **options),
            sample_ids=tuple(range(COUNTED_PICTURES)),
            step_weight=1.0,
        )

    def sample_input_flops(self, model: nn.Module) -> int | None:
        batch = self._example_batch(torch.empty, device="meta")
        total = flops_on_meta(model, lambda: self.loss(model, batch).total)
        return None if total is None else total // COUNTED_PICTURES or None

    def _logits(self, model: nn.Module, batch: ImageBatch) -> Tensor:
        shape = (len(batch), len(self.classes))
        return checked_logits(model(batch.pictures), shape, self._options.model).float()


build = Classification
