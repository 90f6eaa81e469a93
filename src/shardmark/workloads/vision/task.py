"""Picture classification as a workload."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch.nn import functional

from shardmark.core.errors import InputError
from shardmark.workloads.base import LossSum
from shardmark.workloads.flops import training_flops
from shardmark.workloads.model_building import build_model
from shardmark.workloads.sampled_task import SampledTask
from shardmark.workloads.vision.data import load
from shardmark.workloads.vision.pictures import ImageBatch, Normalise, crop_flip, crop_flip_draws

if TYPE_CHECKING:
    from torch import Tensor, nn

    from shardmark.core.shares import Shard
    from shardmark.workloads.base import Batch, BatchPlan
    from shardmark.workloads.datasets.sources import Reading
    from shardmark.workloads.order import Share
    from shardmark.workloads.vision.options import ClassificationOptions

EVALUATION_BATCH = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationPart:
    """Sums over one shard's validation samples."""

    samples: int
    loss: float
    top1: int
    """Samples whose label has the largest logit."""
    top5: int
    """Samples whose label is among the five largest logits."""


class Classification(SampledTask[ImageBatch]):
    """Cross entropy on labelled pictures."""

    def __init__(self, options: ClassificationOptions, seed: int) -> None:
        self._options = options
        self._seed = seed
        self._data = load(options, seed)
        self._normalise = Normalise(self._data.mean, self._data.std)
        super().__init__(options, self._data)

    @property
    def classes(self) -> tuple[str, ...]:
        """Name of each class, in the order of the labels."""
        return self._data.classes

    def build_model(self) -> nn.Module:
        return build_model(
            self._options.model,
            self._options.model_options,
            classes=len(self.classes),
            image_size=self._data.image_size,
            seed=self._seed,
        )

    def _training_batch(self, plan: BatchPlan, share: Share) -> ImageBatch:
        read = self._data.training.read(share.ids)
        if self._options.augment == "none":
            return self._batch(read, read.pictures, share.step_weight)
        corners, flipped = crop_flip_draws(plan.seed, share.epoch, self.training_samples)
        places = share.positions
        pictures = crop_flip(read.pictures, corners[:, places], flipped[places])
        return self._batch(read, pictures, share.step_weight)

    def _batch(self, read: Reading, pictures: Tensor, step_weight: float) -> ImageBatch:
        return ImageBatch(
            pictures=self._normalise(pictures),
            labels=read.labels,
            sample_ids=read.sample_ids,
            step_weight=step_weight,
            errors=read.errors,
        )

    def loss(self, model: nn.Module, batch: Batch) -> LossSum:
        """Cross entropy, summed over the pictures in fp32 under every precision."""
        pictures = cast("ImageBatch", batch)
        total = functional.cross_entropy(
            self._logits(model, pictures),
            pictures.labels,
            label_smoothing=self._options.label_smoothing,
            reduction="sum",
        )
        return LossSum(total=total, weight=batch.weight)

    @torch.inference_mode()
    def evaluate(self, model: nn.Module, shard: Shard, device: torch.device) -> EvaluationPart:
        """Sums over validation samples index, index + count, ...; labels are not smoothed."""
        sums = torch.zeros(3, dtype=torch.float64, device=device)  # loss, top-1, top-5
        samples = 0
        for batch in self._validation_batches(shard):
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
        return EvaluationPart(samples=samples, loss=loss, top1=round(top1), top5=round(top5))

    def quality(self, parts: Iterable[object]) -> Mapping[str, float]:
        """`validation_loss`, `accuracy_top1` and, with more than five classes, `accuracy_top5`."""
        known = [part for part in parts if isinstance(part, EvaluationPart)]
        samples = sum(part.samples for part in known)
        if samples == 0:
            return {}
        metrics = {
            "validation_loss": sum(part.loss for part in known) / samples,
            "accuracy_top1": sum(part.top1 for part in known) / samples,
        }
        if len(self.classes) > 5:
            metrics["accuracy_top5"] = sum(part.top5 for part in known) / samples
        return metrics

    def sample_input_flops(self, model: nn.Module) -> int | None:
        size = self._data.image_size
        return training_flops(model, (3, size, size), len(self.classes))

    def _logits(self, model: nn.Module, batch: ImageBatch) -> Tensor:
        logits = model(batch.pictures)
        expected = (len(batch), len(self.classes))
        if isinstance(logits, torch.Tensor) and tuple(logits.shape) == expected:
            return logits.float()
        kind = type(logits).__name__
        returned = (
            f"a tensor of shape {tuple(logits.shape)}"
            if isinstance(logits, torch.Tensor)
            else f"{'an' if kind[0] in 'AEIOUaeiou' else 'a'} {kind}"
        )
        raise InputError(
            "workload.model",
            f"{self._options.model} returns {returned}",
            f"expected one tensor of shape {expected}: a logit for each sample and class",
        )

    def _validation_batches(self, shard: Shard) -> Iterator[ImageBatch]:
        mine = np.arange(shard.index, self.validation_samples, shard.count)

        def make(start: int) -> ImageBatch:
            read = self._data.validation.read(mine[start : start + EVALUATION_BATCH])
            return self._batch(read, read.pictures, float(len(mine)))

        return self._in_order(make, range(0, len(mine), EVALUATION_BATCH))


build = Classification
